# SPDX-License-Identifier: Apache-2.0
"""LoRA on quantized layers: PEFT's layers with merging that knows what the weight is; and on experts, which get a pair
of factors for each projection of each expert."""

import contextlib
import itertools
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from torch import nn

from ...gemm import PACKED_FIELDS, Groups, compiled_linear, quantized_linear
from ...layers import ExpertsBase, is_full_precision
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


class MXFP4LoraMasterLinear(MergesIntoMasters, LoraLinear):
    """[`peft.tuners.lora.Linear`] on an [`MXFP4Linear`]: ``Q(x) Q(W)^T + b + s B A x``, with a frozen master ``W``."""

    def master(self) -> nn.Parameter:
        return self.get_base_layer().weight

    def quantized(self, weight: torch.Tensor) -> torch.Tensor:
        return self.get_base_layer().effective_weight(weight).float()

    def delta(self, adapter: str) -> torch.Tensor:
        return self.get_delta_weight(adapter).float()


# ---- packed experts -------------------------------------------------------------------------------------------------

#: ``A`` ``[experts, r, K]`` and ``B`` ``[experts, N, r]`` of a projection, by adapter.
Factors = dict[str, tuple[torch.Tensor, torch.Tensor]]


def add_factors(
    layer: LoraLayer, result: torch.Tensor, x: torch.Tensor, groups: Groups, factors: Factors
) -> torch.Tensor:
    """Add ``s B_e A_e x`` of each adapter of ``layer``, for the rows of expert ``e``, to ``result`` ``[S, N]`` of a
    projection, for rows ``x`` ``[S, K]`` in full precision, sorted by expert."""
    total, linear = result, compiled_linear if torch.compiler.is_compiling() else quantized_linear
    for name, (a, b) in factors.items():
        inner = linear(layer.lora_dropout[name](layer._cast_input_dtype(x, a.dtype)), a, None, groups=groups)
        total = total + linear(inner, b, None, groups=groups) * layer.scaling[name]
    return total.to(result.dtype)


class MXFP4LoraExperts(MergesIntoPacked, nn.Module, LoraLayer):
    """LoRA on [`MXFP4PackedExperts`]: expert ``e`` computes ``Q(x) Q(W_e)^T + b_e + s B_e A_e x`` in both projections.

    `lora_A.<adapter>.gate_up_proj` is ``[experts, r, K]``, `lora_B.<adapter>.gate_up_proj` ``[experts, N, r]``,
    likewise `down_proj`: each expert starts as PEFT's linear layers do, and one without tokens has zero gradients.
    All else is as in [`MXFP4LoraLinear`]; `merge_error` is summed over experts.
    """

    def __init__(self, base_layer: nn.Module, adapter_name: str, config: LoraConfig, r: int, lora_alpha: int, **kwargs):
        super().__init__()
        LoraLayer.__init__(self, base_layer, **kwargs)
        self._active_adapter = adapter_name
        self.update_layer(adapter_name, r, lora_alpha, config, **kwargs)

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
        first, last = module.projections
        return module.weight_size(first)[2], module.weight_size(last)[1]

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config: LoraConfig, **kwargs: Any) -> None:
        """Add an adapter. Raises `ValueError` for a rank below 1."""
        if r <= 0:
            raise ValueError(f"r={r} is not a positive rank")
        base, down, up = self.get_base_layer(), nn.ParameterDict(), nn.ParameterDict()
        for projection in base.projections:
            experts, rows, columns = base.weight_size(projection)
            down[projection] = nn.Parameter(torch.empty(experts, r, columns))
            up[projection] = nn.Parameter(torch.empty(experts, rows, r))
        self.r[adapter_name], self.lora_alpha[adapter_name] = r, lora_alpha
        self.lora_bias[adapter_name] = self.use_dora[adapter_name] = False
        self.use_rslora[adapter_name] = config.use_rslora
        self.scaling[adapter_name] = lora_alpha / (math.sqrt(r) if config.use_rslora else r)
        self.lora_dropout[adapter_name] = nn.Dropout(config.lora_dropout) if config.lora_dropout else nn.Identity()
        self.lora_A[adapter_name], self.lora_B[adapter_name] = down, up
        self.reset_lora_parameters(adapter_name, config.init_lora_weights)
        self._move_adapter_to_device_of_base_layer(adapter_name)
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)

    @torch.no_grad()
    def reset_lora_parameters(self, adapter_name: str, init_lora_weights: bool | str) -> None:
        for side in (self.lora_A, self.lora_B):
            for matrix in (matrix for factors in side[adapter_name].values() for matrix in factors):
                if side is self.lora_B and init_lora_weights is not False:
                    nn.init.zeros_(matrix)
                elif init_lora_weights == "gaussian":
                    nn.init.normal_(matrix, std=1 / self.r[adapter_name])
                else:
                    nn.init.kaiming_uniform_(matrix, a=math.sqrt(5))

    def _move_adapter_to_device_of_base_layer(self, adapter_name: str, device: torch.device | None = None) -> None:
        # PEFT looks for a parameter called weight.
        base = self.get_base_layer()
        device = device or next(base.parameters()).device
        for factors in (self.lora_A[adapter_name], self.lora_B[adapter_name]):
            if not any(parameter.is_meta for parameter in factors.parameters()):
                factors.to(device, base.compute_dtype)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor, **kwargs: Any
    ) -> torch.Tensor:
        """Compute what the experts do, with their adapters. Raises `ValueError` for ``adapter_names``."""
        if kwargs.get("adapter_names") is not None:
            raise ValueError("adapter_names in one batch is not supported on experts; call the model once per adapter")
        if self.disable_adapters and self.merged:
            self.unmerge()
        base = self.get_base_layer()
        return ExpertsBase.forward(base, hidden_states, top_k_index, top_k_weights, self._project)

    def _project(self, projection: str, x: torch.Tensor, groups: Groups) -> torch.Tensor:
        result = self.get_base_layer().project(projection, x, groups)
        if self.disable_adapters or self.merged:
            return result
        sides = {name: (self.lora_A[name][projection], self.lora_B[name][projection]) for name in self.active_here()}
        return add_factors(self, result, x, groups, sides)

    def places(self) -> Iterator[tuple[str, int]]:
        base = self.get_base_layer()
        return itertools.product(base.projections, range(base.n_experts))

    def parts(self, tensors: dict[str, torch.Tensor], place: tuple[str, int]) -> dict[str, torch.Tensor]:
        projection, expert = place
        names = {field: f"{projection}{field.removeprefix('weight')}" for field in PACKED_FIELDS}
        return {field: tensors[name][expert] for field, name in names.items() if name in tensors}

    def factors(self, place: tuple[str, int], adapter: str) -> tuple[torch.Tensor, torch.Tensor]:
        projection, expert = place
        return self.lora_A[adapter][projection][expert], self.lora_B[adapter][projection][expert]

    def pack(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        return self.get_base_layer().pack_matrix(weight)

    def unpack(self, packed: dict[str, torch.Tensor], place: tuple[str, int]) -> torch.Tensor:
        return self.get_base_layer().unpacked(place[0], packed, torch.float32)

    @torch.no_grad()
    def effective_weight(self, projection: str, dtype: torch.dtype) -> torch.Tensor:
        """Return ``Q(W) + delta`` of the active adapters in the model's layout, summed in float32 and rounded once."""
        base = self.get_base_layer()
        weight = base.dequantized_weight(projection, dtype)
        if not self.merged and not self.disable_adapters:
            for expert, rows in enumerate(weight.transpose(1, 2) if base.is_transposed else weight):
                rows.copy_(self.sum_at((projection, expert), self.active_here())[0])
        return weight


# ---- trainable experts ----------------------------------------------------------------------------------------------


class MXFP4LoraExpertParameter(MergesIntoMasters, ParamWrapper):
    """[`peft.tuners.lora.ParamWrapper`] on a projection of [`MXFP4Experts`]: expert ``e`` computes
    ``Q(x) Q(W_e)^T + b_e + s B_e A_e x``, as linear layers and packed experts with adapters do.

    PEFT's own computes with ``Q(W_e + s B_e A_e)``, in which a change below a quantization step is lost. All else is
    PEFT's: a wrapper for each parameter, one inside the other; biases, and weights within [`full_precision`].
    """

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Compute what the experts do, with their adapters. Raises `ValueError` for ``adapter_names``, as PEFT does."""
        base, layer, wrappers = self.get_base_layer(), self, dict[str, Any]()
        if is_full_precision(base):
            return super().forward(x, *args, **kwargs)
        self._check_forward_args(x, *args, **kwargs)
        kwargs.pop("adapter_names", None)

        def project(projection: str, rows: torch.Tensor, groups: Groups) -> torch.Tensor:
            result = base.project(projection, rows, groups)
            return wrappers[projection]._added(result, rows, groups) if projection in wrappers else result

        with contextlib.ExitStack() as stack:
            while isinstance(layer, ParamWrapper):  # this one and those inside
                if layer.disable_adapters and layer.merged:
                    layer.unmerge()
                if not layer.disable_adapters and not layer.merged:
                    if layer.is_on_weight:
                        wrappers[layer.parameter_name] = layer
                    else:
                        stack.enter_context(layer._activate_lora(layer.active_adapters))
                layer = layer.base_layer
            return base(x, *args, project=project, **kwargs)

    @property
    def is_on_weight(self) -> bool:
        """Return whether the parameter is a quantized weight, and not a bias."""
        return self.parameter_name in getattr(self.get_base_layer(), "projections", ())

    def factors(self, adapter: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``A`` ``[experts, r, K]`` and ``B`` ``[experts, N, r]`` of an adapter, views of PEFT's parameters."""
        a, b = self.lora_A[adapter].weight, self.lora_B[adapter].weight
        return a.view(self.num_experts, -1, a.shape[1]), b.view(b.shape[0], -1, self.num_experts).permute(2, 0, 1)

    def master(self) -> nn.Parameter:
        return self.get_param()

    def quantized(self, weight: torch.Tensor) -> torch.Tensor:
        return self.get_base_layer().effective_weight(self.parameter_name, weight).float()

    def delta(self, adapter: str) -> torch.Tensor:
        a, b = self.factors(adapter)
        delta = self.scaling[adapter] * (b.float() @ a.float())
        return delta.transpose(1, 2) if self.get_base_layer().is_transposed else delta

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """[`MergesIntoMasters.merge`]; into a bias PEFT's own."""
        merge = super().merge if self.is_on_weight else partial(ParamWrapper.merge, self)
        merge(safe_merge, adapter_names)

    def _added(self, result: torch.Tensor, x: torch.Tensor, groups: Groups) -> torch.Tensor:
        return add_factors(self, result, x, groups, {name: self.factors(name) for name in self.active_here()})


# PEFT finds the wrapper of an adapter by this name of its class when another adapter goes on the same parameter.
MXFP4LoraExpertParameter.__name__ = ParamWrapper.__name__


def lora_on_experts(
    target: nn.Module, adapter_name: str, config: LoraConfig, parameter_name: str | None = None, **kwargs: Any
) -> MXFP4LoraExpertParameter | None:
    """Return the PEFT layer on trainable experts; `None`, which PEFT refuses, for ``target_modules``."""
    if parameter_name is None:
        return None
    return MXFP4LoraExpertParameter(target, adapter_name, parameter_name=parameter_name, config=config, **kwargs)
