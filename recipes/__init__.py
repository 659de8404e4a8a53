# SPDX-License-Identifier: Apache-2.0
"""Scripts to run (`grpo.py`, `pretrain.py`, `ablation.py`, `evaluate.py`) and the parts that they are made of.

Parts are imported as `recipes.common`, `recipes.tasks` and so on, which Python finds where the root of the checkout is
on its search path: in `python -m benchmarks.NAME` run from there, in the tests (`pythonpath` in `pyproject.toml`), and
in the scripts, which begin with [`from_root`]. They are not installed: a recipe is for copying and changing, and must
not run with the parts of another version.
"""
