# SPDX-License-Identifier: Apache-2.0
"""Which GEMM kernel multiplies, and operands that go straight into FP8 or MXFP4 tensor cores."""
