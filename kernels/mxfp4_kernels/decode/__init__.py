# SPDX-License-Identifier: Apache-2.0
"""Products of a few rows with packed weights, whose codes are decoded on the way to the tensor cores."""
