# SPDX-License-Identifier: Apache-2.0
"""Layers that compute on MXFP4 operands."""

from ..ops import WEIGHT_FORMS, WeightCache, cached_weights, uncached_weights
from .experts import ExpertsBase, MXFP4Experts
from .linear import MXFP4Linear
from .model import (
    PACKED,
    QUANTIZED,
    TRAINABLE,
    WeightMatrix,
    full_precision,
    gathered,
    is_full_precision,
    joined_layers,
    matrix_names,
    n_elements,
    random_layers,
    set_quantization_step,
    trainable_matrices,
)
from .packed_experts import MXFP4PackedExperts
from .packed_linear import MXFP4PackedLinear
