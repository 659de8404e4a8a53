# SPDX-License-Identifier: Apache-2.0
"""Runs that stop and go on: saved state, where a step ended, signals, trackers that fail."""
