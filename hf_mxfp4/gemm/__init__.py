# SPDX-License-Identifier: Apache-2.0
"""Products of MXFP4 operands, differentiable, and the choice of the GEMM kernel that computes them."""

from . import custom_ops as library  # noqa: F401  (registers the operators)
from .experts import grouped_linear, packed_grouped_linear
from .fast_experts import FastExperts
from .fast_products import FastProducts
from .groups import Groups, group_by_expert
from .layer_rng import Draws
from .linear import autocast_dtype, quantized_linear
from .operands import BackwardProducts, quantize_operand, rotate_back, rotate_operand
from .packed import computes_on_codes, packed_product, packed_product_route
from .saved import SavedInput, cat_rows, keep_input, pack_rows, restore_input
from .select import Engine, engine_counts, engine_for, hardware_of, reset_engine_counts


__all__ = [
    "BackwardProducts",
    "Draws",
    "Engine",
    "FastExperts",
    "FastProducts",
    "Groups",
    "SavedInput",
    "autocast_dtype",
    "cat_rows",
    "computes_on_codes",
    "engine_counts",
    "engine_for",
    "group_by_expert",
    "grouped_linear",
    "hardware_of",
    "keep_input",
    "pack_rows",
    "packed_grouped_linear",
    "packed_product",
    "packed_product_route",
    "quantize_operand",
    "quantized_linear",
    "reset_engine_counts",
    "restore_input",
    "rotate_back",
    "rotate_operand",
]
