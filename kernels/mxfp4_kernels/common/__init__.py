# SPDX-License-Identifier: Apache-2.0
"""What all kernels share: blocks, tiles, random numbers, launches' parameters."""
