# SPDX-License-Identifier: Apache-2.0
"""A grid tried end to end on the CPU before it is started on GPUs: every cell, tiny models, a few steps."""
