# SPDX-License-Identifier: Apache-2.0
"""Kernels that quantize straight into the operands of FP8 products."""
