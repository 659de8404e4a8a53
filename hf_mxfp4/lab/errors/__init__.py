# SPDX-License-Identifier: Apache-2.0
"""Errors of tensors and of the weights of checkpoints, read from their files without a model."""
