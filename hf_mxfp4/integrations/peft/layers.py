# SPDX-License-Identifier: Apache-2.0
"""LoRA on quantized layers: PEFT's layers with merging that knows what the weight is; and on experts, which get a pair
of factors for each projection of each expert."""

import contextlib
import copy
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.lora.layer import ParamWrapper
from torch import nn

from ...layers import PACKED, is_full_precision
from ...ops import PACKED_SUFFIXES, Groups, compiled_linear, quantized_linear
from .merging import Merges, MergesIntoMasters, MergesIntoPacked


class MXFP4LoraLinear(MergesIntoPacked, LoraLinear):
    """[`peft.tuners.lora.Linear`] on an [`MXFP4PackedLinear`]: ``Q(x) Q(W)^T + b + s B A x``."""

    def places(self) -> list[tuple]:
        return [()]

    def parts(self, tensors: dict[str, torch.Tensor], place: tuple) -> dict[str, torch.Tensor]:
        return tensors

    def factors(self, place: tuple, adapter: str) -> tuple[torch.Tensor, torch.Tensor]:
        return self.lora_A[adapter].weight, self.lora_B[adapter].weight

    def orthogonal_init(self, adapter_name: str) -> None:
        """Initialize as PEFT does, which makes factors in the dtype of the layer's weight: not in that of the codes."""
        base = self.get_base_layer()
        self.base_layer = nn.Linear(self.in_features, self.out_features, device="meta", dtype=base.compute_dtype)
        try:
            super().orthogonal_init(adapter_name)
        finally:
            self.base_layer = base

    def pack(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        return self.get_base_layer().pack_weight(weight)

    def unpack(self, packed: dict[str, torch.Tensor], place: tuple) -> torch.Tensor:
        return self.get_base_layer().unpacked(packed, torch.float32)

    @torch.no_grad()
    def effective_weight(self) -> torch.Tensor:
        """Return the float32 weight ``Q(W) + delta`` of the active adapters, as the forward pass computes with."""
        if self.merged:
            return self.get_base_layer().dequantized_weight(torch.float32)
        adapters = []
        if not self.disable_adapters:
            adapters = self.active_here()
        total, _ = self.sum_at((), adapters)
        return total


class MXFP4LoraMasterLinear(MergesIntoMasters, LoraLinear):
    """[`peft.tuners.lora.Linear`] on an [`MXFP4Linear`]: ``Q(x) Q(W)^T + b + s B A x``, with a frozen master ``W``."""

    def master(self) -> nn.Parameter:
        return self.get_base_layer().weight

    def quantized(self, weight: torch.Tensor) -> torch.Tensor:
        return self.get_base_layer().effective_weight(weight).float()

    def delta(self, adapter: str) -> torch.Tensor:
        return self.get_delta_weight(adapter).float()


# ---- experts ---------------------------------------------------------------------------------------------------------


class ExpertParameter(Merges):
    """Mixin before [`peft.tuners.lora.ParamWrapper`] on a projection of quantized experts: expert ``e`` computes
    ``Q(x) Q(W_e)^T + b_e + s B_e A_e x``, as linear layers with adapters do.

    PEFT's own computes with the sum ``W_e + s B_e A_e``, which packed experts do not have, and of which trainable ones
    quantize away what is below a quantization step. All else is PEFT's: a wrapper for each parameter, one inside the
    other, with factors as PEFT lays them out; biases, and weights within [`full_precision`].
    """

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Compute what the experts do, with their adapters. Raises `ValueError` for ``adapter_names``."""
        if kwargs.pop("adapter_names", None) is not None:
            raise ValueError("adapter_names in one batch is not supported on experts; call the model once per adapter")
        base = self.get_base_layer()
        if is_full_precision(base):
            return super().forward(x, *args, **kwargs)
        wrappers: dict[str, ExpertParameter] = {}  # with something to add, by projection

        def project(projection: str, rows: torch.Tensor, groups: Groups) -> torch.Tensor:
            result = base.project(projection, rows, groups)
            if projection in wrappers:
                return wrappers[projection]._added(result, rows, groups)
            return result

        with contextlib.ExitStack() as stack:
            for layer in nested_wrappers(self):
                if layer.disable_adapters and layer.merged:
                    layer.unmerge()
                if layer.disable_adapters or layer.merged:
                    continue
                if layer.is_on_weight:
                    wrappers[layer.parameter_name] = layer
                else:
                    # Biases are not quantized, so PEFT's own sum of bias and adapter is right.
                    stack.enter_context(layer._activate_lora(layer.active_adapters))
            return base(x, *args, project=project, **kwargs)

    @property
    def is_on_weight(self) -> bool:
        """Return whether the parameter is a quantized weight, and not a bias."""
        return self.parameter_name in getattr(self.get_base_layer(), "projections", ())

    def expert_factors(self, adapter: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``A`` ``[experts, r, K]`` and ``B`` ``[experts, N, r]`` of an adapter, views of PEFT's parameters."""
        a = self.lora_A[adapter].weight
        b = self.lora_B[adapter].weight
        return a.view(self.num_experts, -1, a.shape[1]), b.view(b.shape[0], -1, self.num_experts).permute(2, 0, 1)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Merge as [`Merges`] does; into a bias as PEFT does."""
        if self.is_on_weight:
            super().merge(safe_merge, adapter_names)
        else:
            ParamWrapper.merge(self, safe_merge, adapter_names)

    def _added(self, result: torch.Tensor, x: torch.Tensor, groups: Groups) -> torch.Tensor:
        """Add ``s B_e A_e x`` of the active adapters, for the rows of expert ``e``, to ``result`` ``[S, N]``, for rows
        ``x`` ``[S, K]`` in full precision, sorted by expert."""
        total = result
        grouped_linear = compiled_linear if torch.compiler.is_compiling() else quantized_linear
        for name in self.active_here():
            a, b = self.expert_factors(name)
            rows = self._cast_input_dtype(x, a.dtype)
            rows = self.lora_dropout[name](rows)
            rows = grouped_linear(rows, a, None, groups=groups)
            rows = grouped_linear(rows, b, None, groups=groups)
            total = total + rows * self.scaling[name]
        return total.to(result.dtype)


def nested_wrappers(layer: nn.Module) -> Iterator[ParamWrapper]:
    """Yield the wrappers of experts' parameters from the outside in."""
    while isinstance(layer, ParamWrapper):
        yield layer
        layer = layer.base_layer


class MXFP4LoraExpertParameter(ExpertParameter, MergesIntoMasters, ParamWrapper):
    """[`peft.tuners.lora.ParamWrapper`] on a projection of [`MXFP4Experts`], with a frozen master weight."""

    def master(self) -> nn.Parameter:
        return self.get_param()

    def quantized(self, weight: torch.Tensor) -> torch.Tensor:
        return self.get_base_layer().effective_weight(self.parameter_name, weight).float()

    def delta(self, adapter: str) -> torch.Tensor:
        a, b = self.expert_factors(adapter)
        delta = self.scaling[adapter] * (b.float() @ a.float())
        if self.get_base_layer().is_transposed:
            delta = delta.transpose(1, 2)
        return delta


class MXFP4LoraPackedExpertParameter(ExpertParameter, MergesIntoPacked, ParamWrapper):
    """[`peft.tuners.lora.ParamWrapper`] on a projection of [`MXFP4PackedExperts`].

    Unlike PEFT's it supports ``lora_dropout``: it is given the input, and not only the weight.
    """

    def __init__(
        self, base_layer: nn.Module, adapter_name: str, parameter_name: str, config: LoraConfig, **kwargs: Any
    ):
        super().__init__(base_layer, adapter_name, parameter_name, config=_without_dropout(config), **kwargs)
        self._set_dropout(adapter_name, config)

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config: LoraConfig, **kwargs: Any) -> None:
        """Add an adapter. Raises `ValueError` for a rank below 1."""
        super().update_layer(adapter_name, r, lora_alpha, config=_without_dropout(config), **kwargs)
        self._set_dropout(adapter_name, config)

    def _set_dropout(self, adapter_name: str, config: LoraConfig) -> None:
        """Set the dropout of an adapter. PEFT, whose layer refuses any, has set `nn.Identity`."""
        if config.lora_dropout:
            self.lora_dropout[adapter_name] = nn.Dropout(config.lora_dropout)

    def get_param(self) -> torch.Tensor:
        """Return the parameter; of a packed weight, of which PEFT reads shape, dtype and device, a tensor without
        memory of its own that has those of the full-precision weight."""
        base = self.get_base_layer()
        parameter = super().get_param()
        if not isinstance(base, PACKED) or not self.is_on_weight:
            return parameter
        shape = base.weight_size(self.parameter_name)
        one_element = parameter.new_empty(1, dtype=base.compute_dtype)
        weight = one_element.expand(shape)
        return weight.transpose(1, 2) if base.is_transposed else weight

    def names(self) -> list[str]:
        own_names = [f"{self.parameter_name}{suffix}" for suffix in PACKED_SUFFIXES]
        return [name for name in self.get_base_layer().shapes() if name in own_names]

    def places(self) -> Iterator[tuple[str, int]]:
        return itertools.product([self.parameter_name], range(self.num_experts))

    def parts(self, tensors: dict[str, torch.Tensor], place: tuple[str, int]) -> dict[str, torch.Tensor]:
        projection, expert = place
        return {f"weight{name.removeprefix(projection)}": tensor[expert] for name, tensor in tensors.items()}

    def factors(self, place: tuple[str, int], adapter: str) -> tuple[torch.Tensor, torch.Tensor]:
        _, expert = place
        a, b = self.expert_factors(adapter)
        return a[expert], b[expert]

    def pack(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        return self.get_base_layer().pack_matrix(weight)

    def unpack(self, packed: dict[str, torch.Tensor], place: tuple[str, int]) -> torch.Tensor:
        projection, _ = place
        return self.get_base_layer().unpacked(projection, packed, torch.float32)

    @torch.no_grad()
    def effective_weight(self, dtype: torch.dtype) -> torch.Tensor:
        """Return ``Q(W) + delta`` of the active adapters in the model's layout, summed in float32 and rounded once."""
        base = self.get_base_layer()
        weight = base.dequantized_weight(self.parameter_name, dtype)
        if self.merged or self.disable_adapters:
            return weight
        rows_first = weight.transpose(1, 2) if base.is_transposed else weight
        for place in self.places():
            _, expert = place
            total, _ = self.sum_at(place, self.active_here())
            rows_first[expert].copy_(total)
        return weight


def _without_dropout(config: LoraConfig) -> LoraConfig:
    """Return a copy of a config without dropout, which PEFT refuses for parameters."""
    config = copy.copy(config)
    config.lora_dropout = 0.0
    return config


# PEFT finds the wrapper of an adapter by this name of its class when another adapter goes on the same parameter.
MXFP4LoraExpertParameter.__name__ = MXFP4LoraPackedExpertParameter.__name__ = ParamWrapper.__name__


def lora_on_experts(
    target: nn.Module, adapter_name: str, config: LoraConfig, parameter_name: str | None = None, **kwargs: Any
) -> ExpertParameter | None:
    """Return the PEFT layer on a parameter of experts; `None`, which PEFT refuses, for ``target_modules``."""
    if parameter_name is None:
        return None
    base = target
    if isinstance(target, ParamWrapper):  # another parameter of the same experts has an adapter
        base = target.get_base_layer()
    wrapper = MXFP4LoraPackedExpertParameter if isinstance(base, PACKED) else MXFP4LoraExpertParameter
    return wrapper(target, adapter_name, parameter_name=parameter_name, config=config, **kwargs)
