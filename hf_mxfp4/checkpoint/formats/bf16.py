# SPDX-License-Identifier: Apache-2.0
"""A plain bfloat16 checkpoint that holds the dequantized values: anything loads it."""

from collections.abc import Sequence

from ...config import MXFP4RLConfig
from .base import Format


class BF16Format(Format):
    name = "bf16"

    def quantization_config(self, config: MXFP4RLConfig, ignored: Sequence[str], quantized: Sequence[str] = ()) -> None:
        return None

    def notes(self, config: MXFP4RLConfig, ignored: Sequence[str], quantized: Sequence[str] = ()) -> list[str]:
        if config.activation_scheme is None:
            return []
        return [
            f"Activations were quantized ({config.activation_scheme}); the exported model computes in full precision."
        ]
