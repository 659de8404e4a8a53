# SPDX-License-Identifier: Apache-2.0
"""Quantization and products of MXFP4 operands, differentiable, and the choice of what computes them."""

from .autograd import autocast_dtype, quantized_linear
from .cache import WEIGHT_FORMS, WeightCache, cached_weights, gemm_states, uncached_weights
from .fp4 import to_fp4
from .functional import fake_quantize, quantize
from .groups import Groups, group_by_expert
from .matmul import (
    hardware_of,
    matmul,
    matmul_counts,
    reads_packed_on_gpus,
    reset_matmul_counts,
    select_matmul,
    to_fp8,
)
from .operands import (
    effective_rows,
    quantize_input,
    rows_first,
    weight_codes,
    weight_operand,
    weight_quantizations,
)
from .operators import compiled_linear, compiled_packed_linear, read_input_scheme, read_scheme
from .packed import packed_forward, packed_linear
from .packed_weight import (
    PACKED_FIELDS,
    PACKED_SUFFIXES,
    PackedWeight,
    check_finite,
    check_packed,
    check_rotation,
    not_finite,
    packed_shapes,
    packed_tensor,
    quantize_experts,
    quantize_weight,
    weight_values,
)
from .quantization import backend_for, dequantize, quantize_e4m3, rotate_rows, widest_float
from .rng import LayerRng
from .spec import GemmSpec
from .state import GemmState
