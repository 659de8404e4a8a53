# SPDX-License-Identifier: Apache-2.0
"""Scripts to run (`grpo.py`, `pretrain.py`, `ablation.py`, `evaluate.py`) and the parts that they are made of.

Parts are imported as `recipes.common`, `recipes.tasks` and so on, from the root of the checkout: the scripts begin with
[`from_root`]. They are not installed: a recipe is for copying and changing.
"""
