# SPDX-License-Identifier: Apache-2.0
"""Adapters merged into the weights that they were trained on, and what that costs."""
