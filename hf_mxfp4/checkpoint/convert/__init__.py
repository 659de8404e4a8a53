# SPDX-License-Identifier: Apache-2.0
"""Conversions of whole checkpoints: packing, export and import."""
