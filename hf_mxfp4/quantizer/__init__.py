# SPDX-License-Identifier: Apache-2.0
"""The quantizer that transformers calls: which modules it replaces, how weights are loaded and packed, the report."""

from .quantizer import MXFP4RLQuantizer


__all__ = ["MXFP4RLQuantizer"]
