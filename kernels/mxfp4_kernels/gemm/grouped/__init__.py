# SPDX-License-Identifier: Apache-2.0
"""Products of many experts in one launch: ordinary operands, E4M3 ones, packed weights."""
