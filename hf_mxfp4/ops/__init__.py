# SPDX-License-Identifier: Apache-2.0
"""Differentiable operations on MXFP4 operands, and the choice of the backend that computes them."""

from .backends import backend_for, fake_quantize
from .linear import autocast_dtype, quantized_linear


__all__ = ["autocast_dtype", "backend_for", "fake_quantize", "quantized_linear"]
