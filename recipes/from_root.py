# SPDX-License-Identifier: Apache-2.0
"""Imported first by the scripts beside this file: the root of the checkout takes the place of this folder.

Python searches the folder of a script first, so that `import evaluate` would find `evaluate.py` here instead of the
library. From the root everything has one name: `recipes.tasks`, and `evaluate` is the library, whoever imports it.
"""

import sys
from pathlib import Path


_HERE = Path(__file__).resolve().parent

sys.path[:] = [str(_HERE.parent) if Path(place).resolve() == _HERE else place for place in sys.path]

import hf_mxfp4  # noqa: E402, F401  before TRL, which imports torchao: what that says of its own parts is not shown then
