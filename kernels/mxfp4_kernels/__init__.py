# SPDX-License-Identifier: Apache-2.0
"""Triton kernels for MXFP4: quantization, dequantization, conversion to FP8, and products of a few rows with packed
weights. Needs torch and Triton only.

Blocks are quantized as a [`Scheme`] says, along an axis with what a [`Side`] has of its own; codes and scales are a
[`Packed`].
"""

from .common.scheme import Packed, Scheme, Side, unsupported_dtype, unsupported_scheme
from .decode.product import linear_w4a16, unsupported_weight
from .dequantize import dequantize
from .fp8 import from_fp8, to_fp8
from .quantize import fake_quantize, fake_quantize_both, quantize, quantize_both


__all__ = [
    "Packed",
    "Scheme",
    "Side",
    "dequantize",
    "fake_quantize",
    "fake_quantize_both",
    "from_fp8",
    "linear_w4a16",
    "quantize",
    "quantize_both",
    "to_fp8",
    "unsupported_dtype",
    "unsupported_scheme",
    "unsupported_weight",
]
