# SPDX-License-Identifier: Apache-2.0
"""Merge adapters into quantized weights, and report what that cost."""

import dataclasses
import warnings
from collections.abc import Iterable

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer, check_adapters_to_merge
from torch import nn

from ...layers import PACKED, QUANTIZED, TRAINABLE
from ...numerics import ErrorEnergy, decibels
from ...utils import Mixin
from ..transformers import check_here, pack, to_plain


#: Below this SQNR of the adapters' change, a merge into quantized weights is pointed out: at 4 to 5 dB the policies of
#: `recipes/configs/tiny_cpu_lora.yaml` lose half of what training gained (accuracy 0.80 to 0.64, from 0.50).
LOSSY_DB = 10.0


@dataclasses.dataclass
class MergeError(ErrorEnergy):
    """Energies of one merged weight: of the sum ``Q(W) + delta`` (``signal``), of the error that quantizing the sum
    made (``noise``), and of ``delta`` (``update``)."""

    update: float

    @classmethod
    def measure(cls, total: torch.Tensor, update: torch.Tensor, merged: torch.Tensor) -> "MergeError":
        """Measure the float32 sum, the adapters' part of it, and the values after the merge."""
        parts = {"signal": total, "update": update, "noise": merged - total}
        norms = {name: float(torch.linalg.vector_norm(part, dtype=torch.float64)) for name, part in parts.items()}
        return cls(**{name: norm**2 for name, norm in norms.items()})

    @classmethod
    def summed(cls, errors: Iterable["MergeError"]) -> "MergeError":
        """Return the energies summed over several weights."""
        errors = list(errors)
        return cls(
            signal=sum(error.signal for error in errors),
            update=sum(error.update for error in errors),
            noise=sum(error.noise for error in errors),
        )

    @property
    def update_sqnr_db(self) -> float:
        """The same ratio for what the adapters add: below 0, more was lost in quantizing than they had changed."""
        return decibels(self.update, self.noise)

    def __str__(self) -> str:
        return f"SQNR {self.sqnr_db:.2f} dB, of the adapters' change {self.update_sqnr_db:.2f} dB"


@dataclasses.dataclass(frozen=True)
class MergeReport:
    """Errors of merging by the names of layers, or of single parameters that have adapters."""

    layers: dict[str, MergeError]

    @property
    def total(self) -> MergeError:
        """Return the energies summed over the layers."""
        return MergeError.summed(self.layers.values())

    def __str__(self) -> str:
        lines = [f"merged into {len(self.layers)} quantized layers: {self.total}"]
        for name, error in self.layers.items():
            lines.append(f"  {name}: {error}")
        return "\n".join(lines)


class Merges(Mixin):
    """Mixin before a PEFT layer on a quantized one."""

    #: What quantizing the sum cost in the last merge; `None` while nothing is merged.
    merge_error: MergeError | None = None
    merged_adapters: list[str]

    def active_here(self) -> list[str]:
        """Return the active adapters that this layer has."""
        return [name for name in self.active_adapters if name in self.lora_A]

    def _names_to_merge(self, adapter_names: list[str] | None) -> list[str]:
        """Return those of the adapters asked for (default: the active ones) that this layer has, and not merged."""
        return [name for name in check_adapters_to_merge(self, adapter_names) if name in self.lora_A]


class MergesIntoPacked(Merges):
    """Mixin before a PEFT layer on packed weights: a merge packs the sum of the adapters and of the weight as it was
    before any merge; unmerging puts that weight's very tensors back.

    A subclass has `places()`, which identify the matrices of the layer; `parts(tensors, place)`, the packed tensors of
    one in all of the layer; `factors(place, adapter)`, its ``A`` and ``B``; and `pack` and `unpack` of float32 values.
    """

    _unmerged: dict[str, nn.Parameter] | None = None

    def names(self) -> list[str]:
        """Return the names of the packed tensors that adapters are merged into."""
        return list(self.get_base_layer().shapes())

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Pack the sums of the weights and these adapters (default: the active ones) in place of the weights.

        Raises `ValueError`, and changes nothing, for weights that are not here in full and, with ``safe_merge``, for
        sums that are not finite.
        """
        base = self.get_base_layer()
        names = self._names_to_merge(adapter_names)
        if not names:
            return
        if not isinstance(base, PACKED):  # it was dequantized, to be merged in full precision
            super().merge(safe_merge, names)
            return
        base.check()

        # Pack all sums before the layer is changed: the last may be refused.
        names = [*self.merged_adapters, *names]
        errors = []
        merged = {name: torch.empty_like(getattr(base, name)) for name in self.names()}
        for place in self.places():
            total, update = self.sum_at(place, names)
            if safe_merge and not total.isfinite().all():
                name = ".".join(map(str, (base.name, *place)))
                raise ValueError(f"{name}: merging {', '.join(names)} gives weights that are not finite")
            packed = self.pack(total)
            for field, tensor in self.parts(merged, place).items():
                tensor.copy_(packed[field])
            errors.append(MergeError.measure(total, update, self.unpack(packed, place)))

        # Put them in place of the weights.
        if self._unmerged is None:
            self._unmerged = {name: getattr(base, name) for name in merged}
        for name, tensor in merged.items():
            setattr(base, name, nn.Parameter(tensor, requires_grad=False))
        self.merged_adapters = names
        self.merge_error = MergeError.summed(errors)

    @torch.no_grad()
    def sum_at(self, place: tuple, names: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return in float32 an unmerged weight ``[N, K]`` with these adapters, and the adapters' part alone."""
        stored = {name: self._stored(name) for name in self.names()}
        weight = self.unpack(self.parts(stored, place), place)
        update = torch.zeros_like(weight)
        for name in names:
            a, b = self.factors(place, name)
            update.addmm_(b.to(update), a.to(update), alpha=self.scaling[name])
        return weight + update, update

    def _stored(self, name: str) -> torch.Tensor:
        """Return a packed tensor of the base layer as it was before any merge, on the device that it is on now."""
        stored = getattr(self.get_base_layer(), name)
        if self._unmerged is None:
            return stored
        return self._unmerged[name].to(stored.device)

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
    """Mixin before a PEFT layer on trainable weights: merging and unmerging are PEFT's, on the master weight ``W``.

    A subclass has `master()`, the parameter ``W``; and in its layout and float32 `quantized(weight)`, its values in the
    forward product, and `delta(adapter)`.
    """

    @torch.no_grad()
    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Add these adapters (default: the active ones) to the master weight, and measure the cost in `merge_error`."""
        names = self._names_to_merge(adapter_names)
        if not isinstance(self.get_base_layer(), QUANTIZED) or not names:
            super().merge(safe_merge, names)
            return
        before = self.quantized(whole(self.master()))
        update = sum(whole(self.delta(name)) for name in names)
        super().merge(safe_merge, names)
        self.merge_error = MergeError.measure(before + update, update, self.quantized(whole(self.master())))

    def unmerge(self) -> None:
        """Subtract the adapters from the master weight, as PEFT does."""
        super().unmerge()
        self.merge_error = None


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return all values of a tensor that FSDP2 may have spread over processes."""
    tensor = tensor.detach()
    if hasattr(tensor, "full_tensor"):
        return tensor.full_tensor()
    return tensor


# ---- a whole model ---------------------------------------------------------------------------------------------------


def adapters_on_quantized(model: nn.Module) -> list[BaseTunerLayer]:
    """Return the adapters on quantized layers, of any method; those of one layer from the outside in."""
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    return [layer for layer in layers if isinstance(layer.get_base_layer(), QUANTIZED)]


def merge_adapters(model: PeftModel, into: str = "packed") -> nn.Module:
    """Merge the active adapters of a quantized model into its weights; return the model without adapters.

    Args:
        model: a model with adapters on quantized layers. Methods other than LoRA merge ``into="bf16"`` only.
        into: ``"packed"``: a packed model of the sums; what packing them cost is logged per layer and kept in
            `merge_report`. ``"bf16"``: a plain bfloat16 model of weights ``Q(W) + delta``; each sum is made in float32
            and rounded once.

    Raises:
        TypeError: ``model`` is no PEFT model with adapters in its layers.
        ValueError: another ``into``, a base that is offloaded or not quantized, or a method that cannot be merged so.
    """
    if into not in ("packed", "bf16"):
        raise ValueError(f"into={into!r} is not supported; choose one of 'packed', 'bf16'")
    if not isinstance(model, PeftModel) or not isinstance(model.base_model, BaseTuner):
        raise TypeError(f"merge_adapters takes a PeftModel with adapters in its layers, not {type(model).__name__}")
    check_here(model)
    layers = adapters_on_quantized(model)
    if not layers:
        raise ValueError(
            "no adapter of this model is on a quantized layer; use model.merge_and_unload(), which sums in full "
            "precision"
        )
    if into == "bf16":
        return _merged_into_bfloat16(model, layers)
    masters = [layer for layer in layers if isinstance(layer.get_base_layer(), TRAINABLE)]
    if masters:
        masters[0].get_base_layer().config.packed()  # raises for a scheme whose weights cannot be packed
    merged = model.merge_and_unload()
    if masters:
        return pack(merged)
    return merged


def _merged_into_bfloat16(model: PeftModel, layers: list[BaseTunerLayer]) -> nn.Module:
    """Return a plain bfloat16 model with the adapters in its weights; ``layers`` are those on quantized layers."""
    bases = dict.fromkeys(layer.get_base_layer() for layer in layers)  # experts have several adapters
    for base in bases:
        _merge_into_plain(base, [layer for layer in layers if layer.get_base_layer() is base])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "All adapters are already merged")
        plain = model.merge_and_unload()  # what is on plain layers
    return plain.hf_quantizer.make_plain(plain, torch.bfloat16)


def _merge_into_plain(base: nn.Module, layers: list[BaseTunerLayer]) -> None:
    """Put a plain layer that holds ``Q(W)`` below the adapters on ``base``, and merge them into it in float32."""
    names_of_layers = []
    for layer in layers:
        names_of_layers.append(list(dict.fromkeys([*layer.merged_adapters, *layer.active_adapters])))
        if layer.merged:
            layer.unmerge()
    plain = to_plain(base, torch.float32)
    layers[-1].base_layer = plain  # the innermost of the adapters
    for layer, names in zip(layers, names_of_layers, strict=True):
        layer.merge(adapter_names=names)
    plain.to(torch.bfloat16)
