# SPDX-License-Identifier: Apache-2.0
"""Accuracy of a policy under its own quantization scheme: greedy and sampled, with confidence intervals.

    python recipes/evaluate.py MODEL --task gsm8k [--samples 16 --k 1,4,16] [--dequantize] [--compare RESULT.json]

`docs/evaluation.md` has the options and what they mean.
"""

import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path


def _become_the_library() -> None:
    """With this folder first on the path, as it is for its own scripts, `import evaluate` finds this file. The library
    of that name, which was meant, takes its place."""
    here = Path(__file__).resolve().parent
    spec = PathFinder.find_spec("evaluate", [place for place in sys.path if Path(place or ".").resolve() != here])
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError("the library 'evaluate' is not installed: pip install evaluate", name="evaluate")
    sys.modules["evaluate"] = library = module_from_spec(spec)
    spec.loader.exec_module(library)


if __name__ == "evaluate":
    _become_the_library()
elif __name__ == "__main__":
    from common.process_group import leave_together
    from evaluation.run import main

    main(sys.argv[1:])
    leave_together()
