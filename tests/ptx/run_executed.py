# SPDX-License-Identifier: Apache-2.0
"""Runs a script that compares kernels with their definitions, with the kernels compiled and their PTX executed.

python run_executed.py 80 run_quantize.py schemes
"""

import runpy
import sys
from pathlib import Path


HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from ptx.device import executed  # noqa: E402


if __name__ == "__main__":
    arch, script, *sys.argv[1:] = sys.argv[1:]
    with executed(int(arch)):
        runpy.run_path(str(HERE.parent / "kernels" / script), run_name="__main__")
