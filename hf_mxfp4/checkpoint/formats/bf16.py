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
        notes = []
        if config.weight_rotation is not None:
            notes.append(
                f"Weights were rotated before they were quantized ({config.weight_rotation}); the exported ones are "
                "rotated back and rounded to bfloat16, and no input is rotated."
            )
        if config.activation_scheme is not None:
            notes.append(
                f"Activations were quantized ({config.activation_scheme}); the exported model computes in full "
                "precision."
            )
        return notes
