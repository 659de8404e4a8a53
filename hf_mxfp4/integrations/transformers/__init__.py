# SPDX-License-Identifier: Apache-2.0
"""The quantizer that transformers calls: which modules it replaces, how weights are loaded and packed, the report."""

from ...utils import lazy_names


__all__ = ["MXFP4RLQuantizer", "pack", "quantize_linears"]

__getattr__ = lazy_names(__name__, {"MXFP4RLQuantizer": "quantizer", "pack": "pack_model", "quantize_linears": "swap"})
