# SPDX-License-Identifier: Apache-2.0
"""Round the weights of a model onto the grid of their scheme, so that the outputs of its layers change least (GPTQ)."""

from ..._lazy import lazy_names


_LAZY = {"Rounding": "rounding", "round_model": "rounding", "round_checkpoint": "checkpoint"}

__all__ = sorted(_LAZY)

__getattr__ = lazy_names(__name__, _LAZY)
