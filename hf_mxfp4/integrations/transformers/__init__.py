# SPDX-License-Identifier: Apache-2.0
"""The quantizer that transformers calls: which modules it replaces, how weights are loaded and packed, the report."""

from ...utils import lazy_names, stub_names


_LAZY = stub_names(__name__)

__all__ = sorted(_LAZY)

__getattr__ = lazy_names(__name__, _LAZY)
