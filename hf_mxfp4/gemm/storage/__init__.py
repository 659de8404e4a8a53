# SPDX-License-Identifier: Apache-2.0
"""Weights as they are stored: packed, the products with them, and the form that rollouts take."""
