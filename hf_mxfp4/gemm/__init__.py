# SPDX-License-Identifier: Apache-2.0
"""Products of MXFP4 operands, differentiable, and the choice of the GEMM kernel that computes them."""

from ..backends.functional import fake_quantize, quantize
from . import custom_ops  # noqa: F401  (registers the operators, which those functions call in compiled code)
from .groups import Groups, group_by_expert
from .layer_rng import LayerRng
from .linear import autocast_dtype, quantized_linear
from .operands import quantize_operand, rotate_back, rotate_operand
from .spec import GemmSpec, PackedSpec
from .state import GemmState
from .storage.copies import computes_on_codes
from .storage.packed import packed_linear, packed_product, packed_product_route
from .tensor_cores.select import GemmKernel, gemm_kernel_counts, hardware_of, reset_gemm_kernel_counts, select_kernel


__all__ = [
    "GemmKernel",
    "GemmSpec",
    "GemmState",
    "Groups",
    "LayerRng",
    "PackedSpec",
    "autocast_dtype",
    "computes_on_codes",
    "fake_quantize",
    "gemm_kernel_counts",
    "group_by_expert",
    "hardware_of",
    "packed_linear",
    "packed_product",
    "packed_product_route",
    "quantize",
    "quantize_operand",
    "quantized_linear",
    "reset_gemm_kernel_counts",
    "rotate_back",
    "rotate_operand",
    "select_kernel",
]
