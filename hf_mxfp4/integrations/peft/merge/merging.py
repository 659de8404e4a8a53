# SPDX-License-Identifier: Apache-2.0
"""What PEFT layers on quantized weights share once adapters are merged into them."""

import warnings

import torch
from peft.tuners.tuners_utils import check_adapters_to_merge
from torch import nn

from .merge_report import MergeError


class Merges:
    """Mixin before a PEFT layer on a quantized one.

    Attributes:
        merge_error: what quantizing the sum cost in the last merge; `None` while nothing is merged.
        unload_dtype: when set, `merge_and_unload` makes this layer a plain one of that dtype instead of quantizing.
    """

    merge_error: MergeError | None = None
    unload_dtype: torch.dtype | None = None

    def unload_and_optionally_merge_module(
        self, merge: bool, safe_merge: bool, adapter_names: list[str] | None
    ) -> nn.Module:
        """The layer without adapters, for PEFT's `unload` and `merge_and_unload`."""
        if not merge:
            return self.get_base_layer()
        if self.unload_dtype is not None:
            return self.to_plain(self.unload_dtype, adapter_names)
        self.merge(safe_merge=safe_merge, adapter_names=adapter_names)
        return self.get_base_layer()


class MergesIntoPacked(Merges):
    """Mixin before a PEFT layer whose `merge` keeps the packed tensors from before the first merge in ``_unmerged``."""

    _unmerged: dict[str, nn.Parameter | None] | None = None

    def unmerge(self) -> None:
        """Put back the tensors that the layer had before the first merge: the same bits."""
        if not self.merged:
            warnings.warn("Already unmerged. Nothing to do.", stacklevel=2)
            return
        base = self.get_base_layer()
        for name, parameter in (self._unmerged or {}).items():
            now = getattr(base, name)
            if parameter is not None and parameter.device != now.device:
                parameter = nn.Parameter(parameter.to(now.device), parameter.requires_grad)
            setattr(base, name, parameter)
        self.merged_adapters = []
        self._unmerged = self.merge_error = None


class MergesIntoMasters(Merges):
    """Mixin before a PEFT layer on trainable weights: merging and unmerging are PEFT's, on the master weight ``W``, and
    what the quantizer makes of it is measured.

    Before a merge the layer computes with ``Q(W) + delta``, afterwards with ``Q(W + delta)``: `merge_error` is of
    the difference of the two. A subclass says what its weight is.
    """

    def master(self) -> nn.Parameter:
        """The master weight that adapters are merged into."""
        raise NotImplementedError

    def quantized(self, weight: torch.Tensor) -> torch.Tensor:
        """The values that the forward product takes for a master weight, in its layout, in float32."""
        raise NotImplementedError

    def delta(self, adapter: str) -> torch.Tensor:
        """Return what an adapter adds, in the layout of the weight, in float32."""
        raise NotImplementedError

    @torch.no_grad()
    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Add these adapters (default: the active ones) to the master weight, as PEFT does, and measure in
        `merge_error` what quantizing the sum costs."""
        names = [name for name in check_adapters_to_merge(self, adapter_names) if name in self.lora_A]
        if not names:
            return
        unmerged = _values(self.master()).to(torch.float32, copy=True)
        earlier = self._sum(self.merged_adapters)
        if earlier is not None:
            unmerged -= earlier
        reference = self.quantized(unmerged.to(self.master().dtype))
        update = self._sum([*self.merged_adapters, *names])
        super().merge(safe_merge, names)
        after = _values(self.master())
        self.merge_error = MergeError.of(reference + update, update, self.quantized(after))

    def unmerge(self) -> None:
        """Take the adapters off the master weight again, as PEFT does: the sum less the adapters, rounded."""
        super().unmerge()
        self.merge_error = None

    def _sum(self, adapters: list[str]) -> torch.Tensor | None:
        """Return what adapters add together, or `None` for no adapters."""
        deltas = [_values(self.delta(name)) for name in adapters if name in self.lora_A]
        return sum(deltas) if deltas else None


def _values(tensor: torch.Tensor) -> torch.Tensor:
    """All values of a tensor that FSDP2 may have spread over processes."""
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
