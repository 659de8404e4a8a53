# SPDX-License-Identifier: Apache-2.0
"""How a tensor is quantized: by the eager reference, the Triton kernels, or the fused C++ on the CPU."""

from .dispatch import backend_for, dequantize, fake_quantize, quantize_e4m3, rotate_rows, widest_float
