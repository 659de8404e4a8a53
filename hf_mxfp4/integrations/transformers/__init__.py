# SPDX-License-Identifier: Apache-2.0
"""The quantizer that transformers calls: which modules it replaces, how weights are loaded and packed, the report."""

from ...utils import lazy_names


__getattr__, __all__ = lazy_names(__name__)
