# SPDX-License-Identifier: Apache-2.0
"""Quantized models on disk: saving, loading, packing, export, import and verification."""

from ..utils import lazy_names


__getattr__, __all__ = lazy_names(__name__)
