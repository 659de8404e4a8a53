# SPDX-License-Identifier: Apache-2.0
"""Quantization fused into one pass on the CPU: C++ that is compiled on first use and has the reference's bits."""

from .functions import ErrorSums, dequantize, error_sums, fake_quantize, quantize, unsupported_reason


__all__ = ["ErrorSums", "dequantize", "error_sums", "fake_quantize", "unsupported_reason", "quantize"]
