# SPDX-License-Identifier: Apache-2.0
"""Imported first by the scripts beside this file: the root of the checkout takes the place of this folder.

Python searches the folder of a script first, so that `import evaluate` would find `evaluate.py` here instead of the
library. Parts have one name, such as `hf_mxfp4.recipes.tasks`: `hf_mxfp4/recipes` is a link to this folder.
"""

import sys
from pathlib import Path


_HERE = Path(__file__).resolve().parent
_ROOT = [str(_HERE.parent)] if (_HERE.parent / "hf_mxfp4").is_dir() else []  # no checkout: it is installed

sys.path[:] = _ROOT + [place for place in sys.path if Path(place).resolve() != _HERE]
