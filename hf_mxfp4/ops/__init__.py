# SPDX-License-Identifier: Apache-2.0
"""Differentiable operations on MXFP4 operands, and the choice of the backend that computes them."""

from .backends import backend_for, fake_quantize
from .draws import Draws
from .experts import Groups, group_by_expert, grouped_linear, packed_grouped_linear
from .gemms import BackwardProducts, quantize_operand, rotate_back, rotate_operand
from .linear import autocast_dtype, quantized_linear
from .saved import SavedInput, cat_rows, keep_input, pack_rows, restore_input


__all__ = [
    "BackwardProducts",
    "Draws",
    "Groups",
    "SavedInput",
    "autocast_dtype",
    "backend_for",
    "cat_rows",
    "fake_quantize",
    "group_by_expert",
    "grouped_linear",
    "keep_input",
    "pack_rows",
    "packed_grouped_linear",
    "quantize_operand",
    "quantized_linear",
    "restore_input",
    "rotate_back",
    "rotate_operand",
]
