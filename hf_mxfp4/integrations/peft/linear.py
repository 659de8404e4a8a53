# SPDX-License-Identifier: Apache-2.0
"""LoRA on quantized linear layers: PEFT's layer, with merging that knows what the weight is."""

import warnings
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora import Linear as LoraLinear
from torch import nn

from ...gemm import PACKED_FIELDS
from ...layers import MXFP4PackedLinear
from .merging import MergeError, MergesIntoMasters, MergesIntoPacked


class MXFP4LoraLinear(MergesIntoPacked, LoraLinear):
    """[`peft.tuners.lora.Linear`] on an [`MXFP4PackedLinear`]: ``Q(x) Q(W)^T + b + s B A x``."""

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Pack the sum of the weight and these adapters (default: the active ones) in place of the weight.

        Args:
            safe_merge: raise `ValueError`, and change nothing, when the sum is not finite.

        Raises `ValueError` for a weight that is not here in full.
        """
        base, names = self.get_base_layer(), self.names_to_merge(adapter_names)
        if not isinstance(base, MXFP4PackedLinear):  # it was dequantized, to be merged in full precision
            super().merge(safe_merge, names)
            return
        if not names:
            return
        base.check()
        names = [*self.merged_adapters, *names]
        total, update = self._sum(names)
        if safe_merge:
            self.check_finite(total, names)
        packed = base.pack_weight(total)
        self.set_merged(packed, names, MergeError.of(total, update, base.unpacked(packed, torch.float32)))

    @torch.no_grad()
    def effective_weight(self) -> torch.Tensor:
        """Return the float32 weight ``Q(W) + delta`` of the active adapters, as the forward pass computes with."""
        if self.merged:
            return self.get_base_layer().dequantized_weight(torch.float32)
        return self._sum([] if self.disable_adapters else self.active_here())[0]

    @torch.no_grad()
    def _sum(self, names: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return in float32 the unmerged weight with these adapters, and the adapters' part alone."""
        base = self.get_base_layer()
        update = torch.zeros(base.out_features, base.in_features, device=base.weight.device)
        for name in names:
            a, b = self.lora_A[name].weight, self.lora_B[name].weight
            update.addmm_(b.float(), a.float(), alpha=self.scaling[name])
        packed = {name: self.stored(name) for name in PACKED_FIELDS if getattr(base, name) is not None}
        return base.unpacked(packed, torch.float32) + update, update

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
