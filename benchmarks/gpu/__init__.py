# SPDX-License-Identifier: Apache-2.0
"""What kernels, layers and whole runs reach on a GPU, beside its own ceilings and other libraries.

python -m benchmarks.gpu.timed --out DIR
"""
