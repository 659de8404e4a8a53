# SPDX-License-Identifier: Apache-2.0
"""Kernels that quantize and dequantize."""
