# SPDX-License-Identifier: Apache-2.0
"""What the model of `benchmarks.gpu.model` makes of kernels that it compiles for one architecture; prints JSON.

python run_model.py sm_90 [case ...]
"""

import json
import sys

from benchmarks.gpu.cases import cases
from benchmarks.gpu.model.__main__ import modelled
from benchmarks.gpu.model.gpus import gpus_of


if __name__ == "__main__":
    arch, *names = sys.argv[1:]
    first = {}
    for case in cases():
        # Of each name the first shape.
        if not names or case.name in names:
            first.setdefault(case.name, case)
    print(json.dumps({name: modelled(case, gpus_of(arch)[0]) for name, case in first.items()}))
