# SPDX-License-Identifier: Apache-2.0
"""Callbacks that watch a run, and the report of it."""
