# SPDX-License-Identifier: Apache-2.0
"""Adapters merged into quantized weights: what PEFT layers of all kinds share, and the report of what it cost."""

import math
import warnings
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from peft.tuners.tuners_utils import check_adapters_to_merge
from torch import nn

from ...layers import PACKED, QUANTIZED


#: Below this SQNR of the adapters' change, a merge into quantized weights is pointed out: at 4 to 5 dB the policies of
#: `recipes/configs/tiny_cpu_lora.yaml` lose half of what training gained (accuracy 0.80 to 0.64, from 0.50).
LOSSY_DB = 10.0


@dataclass(frozen=True)
class MergeError:
    """Energies (sums of squares) of one merged weight: of the sum ``Q(W) + delta``, of ``delta``, and of the error that
    quantizing the sum made.

    For a trainable weight, ``Q(W)`` are the quantized values of the master weight before the merge.
    """

    signal: float
    update: float
    noise: float

    @classmethod
    def of(cls, total: torch.Tensor, update: torch.Tensor, merged: torch.Tensor) -> "MergeError":
        """From the float32 sum, the adapters' part of it, and the values that the merged layer computes with."""
        parts = (total, update, merged - total)
        return cls(*(float(torch.linalg.vector_norm(part, dtype=torch.float64)) ** 2 for part in parts))

    @classmethod
    def summed(cls, errors: Iterable["MergeError"]) -> "MergeError":
        errors = list(errors)
        return cls(*(sum(getattr(error, part) for error in errors) for part in ("signal", "update", "noise")))

    @property
    def sqnr_db(self) -> float:
        """Signal to quantization noise ratio of the merged weight, in decibels."""
        return _decibels(self.signal, self.noise)

    @property
    def update_sqnr_db(self) -> float:
        """The same ratio for what the adapters add: below 0, more was lost in quantizing than they had changed."""
        return _decibels(self.update, self.noise)


@dataclass(frozen=True)
class MergeReport:
    """Errors of merging, by the layers' names; `model.merge_report` after `merge_and_unload`.

    Attributes:
        layers: by name; of experts whose adapters are on single parameters, by the parameters' names.
    """

    layers: dict[str, MergeError]

    @property
    def total(self) -> MergeError:
        """Return the energies summed over the layers."""
        return MergeError.summed(self.layers.values())

    def __str__(self) -> str:
        lines = [f"merged into {len(self.layers)} quantized layers: {_line(self.total)}"]
        return "\n".join([*lines, *(f"  {name}: {_line(error)}" for name, error in self.layers.items())])


def _line(error: MergeError) -> str:
    return f"SQNR {error.sqnr_db:.2f} dB, of the adapters' change {error.update_sqnr_db:.2f} dB"


def _decibels(signal: float, noise: float) -> float:
    """Infinite without noise; NaN where there is nothing, or where weights are not finite."""
    if not (math.isfinite(signal) and math.isfinite(noise)) or signal == noise == 0:
        return math.nan
    if noise == 0:
        return math.inf
    return 10.0 * math.log10(signal / noise) if signal > 0 else -math.inf


class Merges:
    """Mixin before a PEFT layer on a quantized one.

    Attributes:
        merge_error: what quantizing the sum cost in the last merge; `None` while nothing is merged.
    """

    merge_error: MergeError | None = None

    def names_to_merge(self, adapter_names: list[str] | None) -> list[str]:
        """Return which of these adapters (default: the active ones) are on this layer and not merged yet."""
        return [name for name in check_adapters_to_merge(self, adapter_names) if name in self.lora_A]

    def active_here(self) -> list[str]:
        """Return the active adapters that this layer has."""
        return [name for name in self.active_adapters if name in self.lora_A]


class MergesIntoPacked(Merges):
    """Mixin before a PEFT layer on packed weights: a merge packs the sum of the weight and the adapters, always from
    the weight as it was before any merge, so that the order of adapters does not matter; unmerging puts that weight's
    very tensors back.

    A subclass has `places()`, what identifies each matrix of the layer; `parts(tensors, place)`, the packed tensors of
    one in all tensors of the layer; `factors(place, adapter)`, its ``A`` and ``B``; and `pack` and `unpack`, from and
    to float32 values.
    """

    _unmerged: dict[str, nn.Parameter] | None = None

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Pack the sums of the weights and these adapters (default: the active ones) in place of the weights.

        Args:
            safe_merge: raise `ValueError`, and change nothing, when a sum is not finite.

        Raises `ValueError` for weights that are not here in full.
        """
        base, names = self.get_base_layer(), self.names_to_merge(adapter_names)
        if not names:
            return
        if not isinstance(base, PACKED):  # it was dequantized, to be merged in full precision
            super().merge(safe_merge, names)
            return
        base.check()
        names, errors = [*self.merged_adapters, *names], []
        merged = {name: torch.empty_like(getattr(base, name)) for name in base.shapes()}
        for place in self.places():
            total, update = self.sum_at(place, names)
            if safe_merge and not total.isfinite().all():
                name = ".".join(map(str, (base.name, *place)))
                raise ValueError(f"{name}: merging {', '.join(names)} gives weights that are not finite")
            packed = self.pack(total)
            for field, tensor in self.parts(merged, place).items():
                tensor.copy_(packed[field])
            errors.append(MergeError.of(total, update, self.unpack(packed, place)))
        if self._unmerged is None:
            self._unmerged = {name: getattr(base, name) for name in merged}
        for name, tensor in merged.items():
            setattr(base, name, nn.Parameter(tensor, requires_grad=False))
        self.merged_adapters, self.merge_error = names, MergeError.summed(errors)

    @torch.no_grad()
    def sum_at(self, place: tuple, names: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return in float32 an unmerged weight ``[N, K]`` with these adapters, and the adapters' part alone."""
        stored = {name: self._stored(name) for name in self.get_base_layer().shapes()}
        weight = self.unpack(self.parts(stored, place), place)
        update = torch.zeros_like(weight)
        for name in names:
            a, b = self.factors(place, name)
            update.addmm_(b.to(update), a.to(update), alpha=self.scaling[name])
        return weight + update, update

    def _stored(self, name: str) -> torch.Tensor:
        """Return a packed tensor of the base layer as it was before any merge, on the device that it is on now."""
        now = getattr(self.get_base_layer(), name)
        return now if self._unmerged is None else self._unmerged[name].to(now.device)

    def unmerge(self) -> None:
        """Put back the tensors that the layer had before the first merge: the same bits."""
        if not self.merged:
            warnings.warn("Already unmerged. Nothing to do.", stacklevel=2)
            return
        for name in self._unmerged:
            setattr(self.get_base_layer(), name, nn.Parameter(self._stored(name), requires_grad=False))
        self.merged_adapters = []
        self._unmerged = self.merge_error = None


class MergesIntoMasters(Merges):
    """Mixin before a PEFT layer on trainable weights: merging and unmerging are PEFT's, on the master weight ``W``, and
    what the quantizer makes of it is measured.

    Before a merge the layer computes with ``Q(W) + delta``, afterwards with ``Q(W + delta)``: `merge_error` is of the
    difference of the two. A subclass has `master()`, the parameter ``W``; `quantized(weight)`, the values of a master
    weight in the forward product, in its layout and in float32; and `delta(adapter)`, likewise.
    """

    @torch.no_grad()
    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Add these adapters (default: the active ones) to the master weight, as PEFT does, and measure in
        `merge_error` what quantizing the sum costs."""
        names = self.names_to_merge(adapter_names)
        if not isinstance(self.get_base_layer(), QUANTIZED) or not names:
            super().merge(safe_merge, names)
            return
        before = self.quantized(whole(self.master()))
        update = sum(whole(self.delta(name)) for name in names)
        super().merge(safe_merge, names)
        self.merge_error = MergeError.of(before + update, update, self.quantized(whole(self.master())))

    def unmerge(self) -> None:
        """Take the adapters off the master weight again, as PEFT does: the sum less the adapters, rounded."""
        super().unmerge()
        self.merge_error = None


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return all values of a tensor that FSDP2 may have spread over processes."""
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
