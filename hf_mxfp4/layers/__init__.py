# SPDX-License-Identifier: Apache-2.0
"""Layers that compute on MXFP4 operands."""

from .fallback import fallback_thresholds, named_fallback_thresholds, update_fallback_thresholds
from .linear import MXFP4Linear
from .packed_linear import MXFP4PackedLinear
from .step import random_layers, set_quantization_step
from .weight_cache import cached_weights


__all__ = [
    "MXFP4Linear",
    "MXFP4PackedLinear",
    "cached_weights",
    "fallback_thresholds",
    "named_fallback_thresholds",
    "random_layers",
    "set_quantization_step",
    "update_fallback_thresholds",
]
