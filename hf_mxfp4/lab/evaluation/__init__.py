# SPDX-License-Identifier: Apache-2.0
"""Models run on texts: schemes put on them, likelihoods, divergences, and intervals of what is measured."""
