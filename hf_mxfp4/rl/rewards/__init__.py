# SPDX-License-Identifier: Apache-2.0
"""Rewards: numbers and mathematical answers read from completions, and guards around reward functions."""
