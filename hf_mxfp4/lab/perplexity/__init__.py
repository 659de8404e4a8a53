# SPDX-License-Identifier: Apache-2.0
"""Perplexity of schemes on texts, and their divergence from full precision."""
