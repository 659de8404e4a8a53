# SPDX-License-Identifier: Apache-2.0
"""Differentiable operations on MXFP4 operands, and the choice of the backend that computes them."""

from .backends import backend_for, fake_quantize
from .linear import quantized_linear


__all__ = ["backend_for", "fake_quantize", "quantized_linear"]
