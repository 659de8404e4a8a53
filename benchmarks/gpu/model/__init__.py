# SPDX-License-Identifier: Apache-2.0
"""What kernels and layers would reach on GPUs that are not there: a model of compiled code, no measurement.

python -m benchmarks.gpu.model
"""
