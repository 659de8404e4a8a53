# SPDX-License-Identifier: Apache-2.0
"""Quantized models on disk: saving, loading, packing, export, import and verification."""

from ..utils import lazy_names, stub_names


_LAZY = stub_names(__name__)

__all__ = sorted(_LAZY)

__getattr__ = lazy_names(__name__, _LAZY)
