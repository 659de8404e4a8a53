# SPDX-License-Identifier: Apache-2.0
"""Experts in vLLM: its own unquantized ones, whose weights were converted on their way."""

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

from .expected import ExpectedLayers


class MXFP4RLExpertsMethod(UnquantizedFusedMoEMethod):
    """vLLM's method for 16-bit experts, that does not run on weights which reached it unconverted."""

    def __init__(self, moe: Any, expected: ExpectedLayers, name: str):
        super().__init__(moe)
        self.expected, self.name = expected, name

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Raise `RuntimeError` unless both projections went through the plugin; vLLM would read codes as numbers."""
        for projection in ("gate_up_proj", "down_proj"):
            if not self.expected.has_arrived(f"{self.name}.{projection}"):
                raise RuntimeError(
                    f"{self.name}.{projection} was not converted: vLLM loads this model's weights past the plugin; "
                    "export the checkpoint with hf-mxfp4 export --format bf16"
                )
        self.expected.is_loaded = True
        super().process_weights_after_loading(layer)
