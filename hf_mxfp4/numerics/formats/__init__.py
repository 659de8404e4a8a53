# SPDX-License-Identifier: Apache-2.0
"""The number formats: E2M1 elements, E8M0 block scales, and E4M3."""
