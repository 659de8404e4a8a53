# SPDX-License-Identifier: Apache-2.0
"""The quantizer that transformers calls: which modules it replaces, how weights are loaded and packed, the report."""

from ...utils import lazy_names


_LAZY = {"MXFP4RLQuantizer": "quantizer", "pack": "quantizer", "quantize_linears": "swap", "to_plain": "swap"}

__all__ = ["MXFP4RLQuantizer", "pack", "quantize_linears", "to_plain"]

__getattr__ = lazy_names(__name__, _LAZY)
