# SPDX-License-Identifier: Apache-2.0
"""Recipes, to run from here (`train.py`, `grpo.py`, `distill.py`, `pretrain.py`, `ablation.py`, `evaluate.py`) or as
`hf-mxfp4 train`, and the parts that they are made of.

Parts are imported as `hf_mxfp4.recipes.common` and so on everywhere: `hf_mxfp4/recipes` is a link to this folder, so
that a wheel has the recipes and their YAML files. Scripts begin with [`from_root`].
"""

from hf_mxfp4._logging import hide_import_noise


hide_import_noise()
