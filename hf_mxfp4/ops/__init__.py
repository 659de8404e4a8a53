# SPDX-License-Identifier: Apache-2.0
"""Quantization and products of MXFP4 operands, differentiable, and the choice of what computes them."""

from .autograd import autocast_dtype, quantized_linear
from .cache import WEIGHT_FORMS, WeightCache, cached_weights, gemm_states, uncached_weights
from .choice import hardware_of, select_matmul
from .codes import reads_packed_on_gpus
from .fp4 import to_fp4
from .fp8 import multiply_fp8, to_fp8
from .functional import fake_quantize, quantize
from .groups import Groups, group_by_expert
from .joined import JoinedRows, observe, traced_product
from .operands import quantize_input
from .operators import compiled_linear, read_input_scheme, read_scheme
from .packed import PackedState, packed_forward, packed_linear
from .packed_operators import compiled_packed_experts, compiled_packed_linear, is_same_memory, register_owner
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
from .products import matmul_counts, reset_matmul_counts
from .quantization import backend_for, dequantize, is_captured, quantize_e4m3, rotate_rows, widest_float
from .rng import LayerRng
from .spec import GemmSpec
from .state import GemmState
from .values import matmul
from .weights import effective_rows, rows_first, weight_codes, weight_operand, weight_quantizations
