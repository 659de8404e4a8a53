# SPDX-License-Identifier: Apache-2.0
"""Rollouts: sampling, the log-probabilities of what was sampled, and corrections for how it was sampled."""
