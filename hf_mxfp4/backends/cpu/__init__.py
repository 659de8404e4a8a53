# SPDX-License-Identifier: Apache-2.0
"""Quantization fused into one pass on the CPU, with the reference's bits, and products with packed weights: C++ that is
compiled on first use."""

from .functions import dequantize, fake_quantize, quantize, rotate, takes_rotation, unsupported_reason
from .packed_product import grouped_product, product


__all__ = [
    "dequantize",
    "fake_quantize",
    "grouped_product",
    "product",
    "quantize",
    "rotate",
    "takes_rotation",
    "unsupported_reason",
]
