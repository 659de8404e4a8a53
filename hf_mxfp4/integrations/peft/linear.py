# SPDX-License-Identifier: Apache-2.0
"""LoRA on quantized linear layers: PEFT's layer, with merging that knows what the weight is."""

import warnings
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora import Linear as LoraLinear
from torch import nn

from .merging import MergesIntoMasters, MergesIntoPacked


class MXFP4LoraLinear(MergesIntoPacked, LoraLinear):
    """[`peft.tuners.lora.Linear`] on an [`MXFP4PackedLinear`]: ``Q(x) Q(W)^T + b + s B A x``."""

    def places(self) -> list[tuple]:
        return [()]

    def parts(self, tensors: dict[str, torch.Tensor], place: tuple) -> dict[str, torch.Tensor]:
        return tensors

    def factors(self, place: tuple, adapter: str) -> tuple[torch.Tensor, torch.Tensor]:
        return self.lora_A[adapter].weight, self.lora_B[adapter].weight

    def pack(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        return self.get_base_layer().pack_weight(weight)

    def unpack(self, packed: dict[str, torch.Tensor], place: tuple) -> torch.Tensor:
        return self.get_base_layer().unpacked(packed, torch.float32)

    @torch.no_grad()
    def effective_weight(self) -> torch.Tensor:
        """Return the float32 weight ``Q(W) + delta`` of the active adapters, as the forward pass computes with."""
        if self.merged:
            return self.get_base_layer().dequantized_weight(torch.float32)
        return self.sum_at((), [] if self.disable_adapters else self.active_here())[0]

    def __repr__(self) -> str:
        return super().__repr__().replace("lora.Linear", f"lora.{type(self).__name__}", 1)


class MXFP4LoraMasterLinear(MergesIntoMasters, LoraLinear):
    """[`peft.tuners.lora.Linear`] on an [`MXFP4Linear`]: ``Q(x) Q(W)^T + b + s B A x``, with a frozen master ``W``.

    Everything is PEFT's; a merge leaves its cost in `merge_error`.
    """

    def __init__(self, base_layer: nn.Module, adapter_name: str, config: LoraConfig, **kwargs: Any):
        if config.fan_in_fan_out:  # as PEFT does for linear layers
            warnings.warn(
                "fan_in_fan_out is set to True but the target module is a linear layer. Setting it to False.",
                stacklevel=2,
            )
            config.fan_in_fan_out = False
        super().__init__(base_layer, adapter_name, config=config, **kwargs)

    def master(self) -> nn.Parameter:
        return self.get_base_layer().weight

    def quantized(self, weight: torch.Tensor) -> torch.Tensor:
        return self.get_base_layer().effective_weight(weight).float()

    def delta(self, adapter: str) -> torch.Tensor:
        return self.get_delta_weight(adapter).float()

    def __repr__(self) -> str:
        return super().__repr__().replace("lora.Linear", f"lora.{type(self).__name__}", 1)
