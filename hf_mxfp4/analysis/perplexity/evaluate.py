# SPDX-License-Identifier: Apache-2.0
"""Perplexity of schemes, and their divergence from full precision."""

from .scoring import Reference, Score, reference_of, score


__all__ = ["Reference", "Score", "reference_of", "score"]
