# SPDX-License-Identifier: Apache-2.0
"""Kernels for MXFP4. In Triton: quantization, dequantization, operands of FP8 and NVFP4 products, and products of few
rows with packed weights; in C++ for CPUs, compiled on first use: [`mxfp4_kernels.cpu`]. Needs torch, and Triton or a
C++ compiler.

Blocks are quantized as a [`Scheme`] says, along an axis with what a [`Side`] has of its own; codes and scales are a
[`Packed`]. Names are imported when they are first used, so that the C++ needs no Triton.
"""

from importlib import import_module
from typing import Any


_MODULES = {
    ".common.packed": ("Packed",),
    ".common.scheme": ("Scheme", "Side", "unsupported_scheme"),
    ".common.tensors": ("unsupported_dtype",),
    ".decode.product": ("PackedProduct", "linear_w4a16", "unsupported_weight"),
    ".dequantization": ("dequantize",),
    ".fp4": ("nvfp4_scales",),
    ".fp8": ("from_fp8", "to_fp8", "to_fp8_rows_and_columns", "transpose_fp8"),
    ".fp8_gradient": ("FP8Gradient", "gradient_to_fp8"),
    ".quantization": ("fake_quantize", "fake_quantize_rows_and_columns", "quantize", "quantize_rows_and_columns"),
}

__all__ = sorted(name for names in _MODULES.values() for name in names)


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            value = globals()[name] = getattr(import_module(module, __name__), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
