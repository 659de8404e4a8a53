# SPDX-License-Identifier: Apache-2.0
"""Move the scales of outlier channels from activations into weights, exactly, before a model is quantized."""

from ..._lazy import lazy_names


_LAZY = {"Smoothing": "smooth", "smooth_model": "smooth", "smooth_checkpoint": "checkpoint"}

__all__ = sorted(_LAZY)

__getattr__ = lazy_names(__name__, _LAZY)
