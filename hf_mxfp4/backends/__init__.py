# SPDX-License-Identifier: Apache-2.0
"""How a tensor is quantized: by the eager reference, the Triton kernels, or the fused C++ on the CPU."""

from .select import backend_for, fake_quantize


__all__ = ["backend_for", "fake_quantize"]
