# SPDX-License-Identifier: Apache-2.0
"""LoRA on layers of trainable weights (mode ``"qat"``): PEFT's layers, with merging that measures what it costs."""

import warnings
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora import Linear as LoraLinear
from torch import nn

from .fused_factors import FusesFactors
from .merge.merging import MergesIntoMasters


class MXFP4LoraMasterLinear(FusesFactors, MergesIntoMasters, LoraLinear):
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

    @torch.no_grad()
    def to_plain(self, dtype: torch.dtype, adapter_names: list[str] | None = None) -> nn.Linear:
        """A plain layer of weight ``Q(W) + delta``, summed in float32 and rounded to ``dtype`` once; adapters that are
        merged already count too.

        Raises `RuntimeError` where an adapter has a bias and the layer none.
        """
        names = self.active_adapters if adapter_names is None else adapter_names
        names = [*self.merged_adapters, *(n for n in names if n in self.lora_A and n not in self.merged_adapters)]
        if self.merged:
            self.unmerge()
        base = self.get_base_layer()
        linear = base.to_linear(torch.float32)
        for name in names:
            linear.weight += self.delta(name)
            if self.lora_bias[name]:
                if linear.bias is None:
                    raise RuntimeError(
                        f"adapter {name!r} has a bias (lora_bias=True), which cannot be merged into {base.name}: the "
                        "layer has none"
                    )
                linear.bias += self.scaling[name] * self.lora_B[name].bias.float()
        return linear.to(dtype)

    def __repr__(self) -> str:
        return super().__repr__().replace("lora.Linear", f"lora.{type(self).__name__}", 1)
