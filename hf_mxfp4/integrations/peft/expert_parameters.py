# SPDX-License-Identifier: Apache-2.0
"""LoRA on single weights of trainable experts (PEFT's ``target_parameters``), added beside the quantized weight."""

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora.layer import ParamWrapper
from torch import nn

from ...gemm import Groups
from ...layers import is_full_precision
from .expert_lora import add_factors
from .merge.merging import MergesIntoMasters


class MXFP4LoraExpertParameter(MergesIntoMasters, ParamWrapper):
    """[`peft.tuners.lora.ParamWrapper`] on a projection of [`MXFP4Experts`]: expert ``e`` computes
    ``Q(x) Q(W_e)^T + b_e + s B_e A_e x``, as linear layers and packed experts with adapters do.

    PEFT's own computes with ``Q(W_e + s B_e A_e)``: a change of the weight that is small against its quantization steps
    is lost in them, or comes out as another one, and the adapter is trained on that.

    Factors, their names, files, adapters and switching are PEFT's. So is the nesting: a wrapper for each parameter, one
    inside the other. Biases, which are not quantized, are adapted by PEFT's own code, and so are weights within
    [`full_precision`].
    """

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As that of the experts.

        Raises `ValueError` for ``adapter_names`` (another adapter for each sample), as PEFT does.
        """
        base = self.get_base_layer()
        if is_full_precision(base):
            return super().forward(x, *args, **kwargs)
        self._check_forward_args(x, *args, **kwargs)
        kwargs.pop("adapter_names", None)
        with contextlib.ExitStack() as stack:
            wrappers = {}
            for wrapper in self._nested():
                if wrapper.disable_adapters and wrapper.merged:
                    wrapper.unmerge()
                if wrapper.disable_adapters or wrapper.merged:
                    continue
                if wrapper.parameter_name in base.projections:
                    wrappers[wrapper.parameter_name] = wrapper
                else:
                    stack.enter_context(wrapper._activate_lora(wrapper.active_adapters))
            return base(x, *args, project=partial(_project, base, wrappers), **kwargs)

    def factors(self, adapter: str) -> tuple[torch.Tensor, torch.Tensor]:
        """``A`` ``[experts, r, K]`` and ``B`` ``[experts, N, r]`` of an adapter, views of PEFT's parameters."""
        a, b = self.lora_A[adapter].weight, self.lora_B[adapter].weight
        return a.view(self.num_experts, -1, a.shape[1]), b.view(b.shape[0], -1, self.num_experts).permute(2, 0, 1)

    def master(self) -> nn.Parameter:
        return self.get_param()

    def quantized(self, weight: torch.Tensor) -> torch.Tensor:
        return self.get_base_layer().effective_weight(self.parameter_name, weight).float()

    def delta(self, adapter: str) -> torch.Tensor | None:
        a, b = self.factors(adapter)
        delta = self.scaling[adapter] * (b.float() @ a.float())
        return delta.transpose(1, 2) if self.get_base_layer().is_transposed else delta

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """[`MergesIntoMasters.merge`]; into a bias PEFT's own, which costs nothing."""
        if self.parameter_name in self.get_base_layer().projections:
            super().merge(safe_merge, adapter_names)
        else:
            ParamWrapper.merge(self, safe_merge, adapter_names)

    def unload_and_optionally_merge_module(
        self, merge: bool, safe_merge: bool, adapter_names: list[str] | None
    ) -> nn.Module:
        if merge and self.unload_dtype is not None:
            return self.to_plain(self.unload_dtype, adapter_names)
        return ParamWrapper.unload_and_optionally_merge_module(self, merge, safe_merge, adapter_names)

    @torch.no_grad()
    def to_plain(self, dtype: torch.dtype, adapter_names: list[str] | None = None) -> nn.Module:
        """Plain experts of weights ``Q(W) + delta``, of this parameter and of those that are wrapped inside, summed in
        float32 and rounded to ``dtype`` once; adapters that are merged already count too."""
        added = []
        for wrapper in self._nested():
            names = wrapper.active_adapters if adapter_names is None else adapter_names
            names = list(dict.fromkeys([*wrapper.merged_adapters, *(n for n in names if n in wrapper.lora_A)]))
            if wrapper.merged:
                wrapper.unmerge()
            added.append((wrapper, names))
        plain = self.get_base_layer().to_experts(torch.float32)
        for wrapper, names in added:
            is_weight = wrapper.parameter_name in self.get_base_layer().projections
            for name in names:
                delta = wrapper.delta(name) if is_weight else wrapper.get_delta_weight(name).float()
                getattr(plain, wrapper.parameter_name).data += delta
        for parameter in plain.parameters():
            parameter.data = parameter.data.to(dtype)
        return plain

    def _nested(self) -> Iterator["MXFP4LoraExpertParameter"]:
        """This wrapper and those inside."""
        layer: nn.Module = self
        while isinstance(layer, ParamWrapper):
            yield layer
            layer = layer.base_layer

    def _added(self, result: torch.Tensor, x: torch.Tensor, groups: Groups) -> torch.Tensor:
        names = [name for name in self.active_adapters if name in self.lora_A]
        factors = [(*self.factors(name), self.scaling[name], self.lora_dropout[name]) for name in names]
        return add_factors(self, result, x, groups, factors)


# PEFT finds the wrapper of an adapter by this name of its class when another adapter goes on the same parameter.
MXFP4LoraExpertParameter.__name__ = ParamWrapper.__name__


def lora_on_experts(
    target: nn.Module, adapter_name: str, config: LoraConfig, parameter_name: str | None = None, **kwargs: Any
) -> MXFP4LoraExpertParameter | None:
    """The PEFT layer on trainable experts, for `LoraConfig._register_custom_module`; `None`, which PEFT refuses, for
    ``target_modules``."""
    if parameter_name is None:
        return None
    return MXFP4LoraExpertParameter(target, adapter_name, parameter_name=parameter_name, config=config, **kwargs)


def _project(
    base: nn.Module,
    wrappers: dict[str, MXFP4LoraExpertParameter],
    projection: str,
    x: torch.Tensor,
    groups: Groups,
) -> torch.Tensor:
    result = base.project(projection, x, groups)
    return wrappers[projection]._added(result, x, groups) if projection in wrappers else result
