# SPDX-License-Identifier: Apache-2.0
"""LoRA on one packed layer: PEFT's layer, with merging that knows what a packed weight is."""

import torch
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.tuners_utils import check_adapters_to_merge
from torch import nn

from ...gemm import PACKED_FIELDS
from .fused_factors import FusesFactors
from .merge.merge_report import MergeError
from .merge.merging import MergesIntoPacked


class MXFP4LoraLinear(FusesFactors, MergesIntoPacked, LoraLinear):
    """[`peft.tuners.lora.Linear`] on an [`MXFP4PackedLinear`]: ``Q(x) Q(W)^T + b + s B A x``.

    The forward pass is PEFT's. Merging packs the sum of weight and adapters again, always from the weight as it was
    before any merge, so that the order of adapters does not matter; unmerging puts that weight's very tensors back.
    """

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Pack the sum of the weight and these adapters (default: the active ones) in place of the weight.

        Args:
            safe_merge: raise `ValueError`, and change nothing, when the sum is not finite.

        Raises `ValueError` for a weight that is not here in full, `RuntimeError` for an adapter with a bias on a layer
        without one.
        """
        names = [name for name in check_adapters_to_merge(self, adapter_names) if name in self.lora_A]
        if not names:
            return
        base = self.get_base_layer()
        base.check()
        names = [*self.merged_adapters, *names]
        total, update, bias = self._sum(names)
        if safe_merge and not (total.isfinite().all() and (bias is None or bias.isfinite().all())):
            raise ValueError(f"{base.name or 'a layer'}: merging {', '.join(names)} gives weights that are not finite")
        packed = base.pack_weight(total)
        if self._unmerged is None:
            self._unmerged = {name: getattr(base, name) for name in (*PACKED_FIELDS, "bias")}
        for name, tensor in packed.items():
            setattr(base, name, nn.Parameter(tensor, requires_grad=False))
        if bias is not None:
            base.bias = nn.Parameter(bias.to(base.bias.dtype), base.bias.requires_grad)
        self.merged_adapters = names
        self.merge_error = MergeError.of(total, update, base.dequantized_weight(torch.float32))

    @torch.no_grad()
    def to_plain(self, dtype: torch.dtype, adapter_names: list[str] | None = None) -> nn.Linear:
        """A plain layer of weight ``Q(W) + delta``, summed in float32 and rounded to ``dtype`` once; adapters that are
        merged already count too."""
        names = self.active_adapters if adapter_names is None else adapter_names
        names = [*self.merged_adapters, *(n for n in names if n in self.lora_A and n not in self.merged_adapters)]
        weight, _, bias = self._sum(names)
        base = self.get_base_layer()
        linear = nn.Linear(base.in_features, base.out_features, base.bias is not None, device="meta")
        linear.weight = nn.Parameter(weight.to(dtype))
        if base.bias is not None:
            bias = (self._bias() if bias is None else bias).detach().to(dtype, copy=True)
            linear.bias = nn.Parameter(bias, base.bias.requires_grad)
        return linear.train(base.training)

    @torch.no_grad()
    def effective_weight(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Float32 weight ``Q(W) + delta`` of the active adapters, and the bias, as the forward pass computes with."""
        if self.merged:
            base = self.get_base_layer()
            return base.dequantized_weight(torch.float32), base.bias
        names = [] if self.disable_adapters else [name for name in self.active_adapters if name in self.lora_A]
        weight, _, bias = self._sum(names)
        return weight, self._bias() if bias is None else bias

    @torch.no_grad()
    def _sum(self, names: list[str]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return in float32 the unmerged weight with these adapters, the adapters' part alone, and the bias with theirs
        (`None` when they have none)."""
        base = self.get_base_layer()
        update = torch.zeros(base.out_features, base.in_features, device=base.weight.device)
        bias = None
        for name in names:
            a, b = self.lora_A[name], self.lora_B[name]
            update.addmm_(b.weight.float(), a.weight.float(), alpha=self.scaling[name])
            if b.bias is not None:
                if self._bias() is None:
                    raise RuntimeError(
                        f"adapter {name!r} has a bias (lora_bias=True), which cannot be merged into {base.name}: the "
                        "layer has none"
                    )
                bias = (self._bias().float() if bias is None else bias) + self.scaling[name] * b.bias.float()
        packed = {name: self._before(name, getattr(base, name)) for name in PACKED_FIELDS}
        return base.unpacked(packed, torch.float32) + update, update, bias

    def first_sum(self, names: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return in float32 the unmerged weight with these adapters, and the adapters' part alone."""
        return self._sum(names)[:2]

    @torch.no_grad()
    def repacked(self, rows: torch.Tensor) -> torch.Tensor:
        """Return what rows of a sum become when they are packed, in float32."""
        base = self.get_base_layer()
        return base.unpacked(base.pack_weight(rows), torch.float32)

    def _bias(self) -> torch.Tensor | None:
        return self._before("bias", self.get_base_layer().bias)

    def _before(self, name: str, now: torch.Tensor | None) -> torch.Tensor | None:
        """A tensor of the base layer as it was before any merge."""
        kept = now if self._unmerged is None else self._unmerged[name]
        return None if kept is None else kept.detach().to(now.device)

    def __repr__(self) -> str:
        return super().__repr__().replace("lora.Linear", f"lora.{type(self).__name__}", 1)
