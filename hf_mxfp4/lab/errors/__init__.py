# SPDX-License-Identifier: Apache-2.0
"""Error statistics of weights and activations."""
