# SPDX-License-Identifier: Apache-2.0
"""Runs that stop and are resumed: saved state, where a step ended, signals."""
