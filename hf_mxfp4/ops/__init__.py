# SPDX-License-Identifier: Apache-2.0
"""Differentiable operations on MXFP4 operands, and the choice of the backend that computes them."""

from . import library  # noqa: F401  (registers the operators)
from .backends import backend_for, fake_quantize
from .decode import computes_on_codes, packed_product, packed_product_route
from .draws import Draws
from .engines import Engine, engine_counts, engine_for, hardware_of, reset_engine_counts
from .experts import grouped_linear, packed_grouped_linear
from .fast_experts import FastExperts
from .fast_products import FastProducts
from .gemms import BackwardProducts, quantize_operand, rotate_back, rotate_operand
from .groups import Groups, group_by_expert
from .linear import autocast_dtype, quantized_linear
from .saved import SavedInput, cat_rows, keep_input, pack_rows, restore_input


__all__ = [
    "BackwardProducts",
    "Draws",
    "Engine",
    "FastExperts",
    "FastProducts",
    "Groups",
    "SavedInput",
    "autocast_dtype",
    "backend_for",
    "cat_rows",
    "computes_on_codes",
    "engine_counts",
    "engine_for",
    "fake_quantize",
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
