# SPDX-License-Identifier: Apache-2.0
"""Give a policy with adapters to a sampler: as a plain one, or as its base and the adapters' factors."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from peft import PeftModel
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from ...layers import MXFP4Linear, MXFP4PackedExperts, MXFP4PackedLinear
from .layers import (
    MXFP4LoraExpertParameter,
    MXFP4LoraLinear,
    MXFP4LoraMasterLinear,
    MXFP4LoraPackedExpertParameter,
    nested_wrappers,
)
from .merging import adapters_on_quantized, whole


#: LoRA on quantized linear layers.
_ON_LINEARS = (MXFP4LoraLinear, MXFP4LoraMasterLinear)


def has_inseparable_adapters(model: nn.Module) -> bool:
    """Return whether an adapter on a quantized weight has no [`adapter_factors`], as those of experts."""
    others = [layer for layer in adapters_on_quantized(model) if not isinstance(layer, _ON_LINEARS)]
    return any(getattr(layer, "is_on_weight", True) for layer in others)


def adapter_rank(model: nn.Module) -> int:
    """Return the largest rank that active adapters have together on one quantized linear layer; 0 without any."""
    largest = 0
    for module in model.modules():
        if isinstance(module, _ON_LINEARS):
            rank = sum(module.r[adapter] for adapter in _active(module))
            largest = max(largest, rank)
    return largest


def _active(module: BaseTunerLayer) -> list[str]:
    """Return the adapters that a layer computes with beside its weight."""
    if module.disable_adapters or module.merged:
        return []
    return [name for name in module.active_adapters if name in module.lora_A]


def adapter_factors(
    model: nn.Module, everywhere: bool = False
) -> dict[str, Callable[[], tuple[torch.Tensor, torch.Tensor]]]:
    """Return what the active adapters have on each quantized linear layer (``everywhere``: also on those without), by
    its name without PEFT: a function which gives ``A`` ``[r, K]`` and ``B`` ``[N, r]`` with the scaling in it, in
    float32; zeros of rank 1 where none is active. Under FSDP2 all processes must call the function.
    """
    factors: dict[str, Callable[[], tuple[torch.Tensor, torch.Tensor]]] = {}
    for name, module in _plain_modules(model):
        if isinstance(module, _ON_LINEARS):
            factors[name] = partial(_factors, module.get_base_layer(), module)
        elif everywhere and isinstance(module, (MXFP4Linear, MXFP4PackedLinear)):
            factors.setdefault(name, partial(_factors, module))
    return factors


def _plain_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield all modules by the names that they have without PEFT, adapters before what they are on."""
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    for name, module in base.named_modules():
        yield name.replace(".base_layer", ""), module


@torch.no_grad()
def _factors(layer: nn.Linear, module: LoraLinear | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``A`` and ``B`` of all active adapters of ``module`` on ``layer``, one after the other along the rank."""
    adapters = []
    if module is not None:
        adapters = _active(module)
    if not adapters:
        device = layer.weight.device
        return torch.zeros(1, layer.in_features, device=device), torch.zeros(layer.out_features, 1, device=device)
    a = [whole(module.lora_A[adapter].weight).float() for adapter in adapters]
    b = [whole(module.lora_B[adapter].weight).float() * module.scaling[adapter] for adapter in adapters]
    return torch.cat(a), torch.cat(b, dim=1)


def adapter_sums(model: PeftModel) -> dict[str, Callable[[], torch.Tensor]]:
    """Return what the active adapters add to the parameters of a policy on trainable layers, by their names without
    PEFT: a function for each, which gives the sum in float32 and in full; under FSDP2 all processes must call it.

    Raises `ValueError` for an adapter that does more than add to one weight.
    """
    sums: dict[str, Callable[[], torch.Tensor]] = {}
    for name, module in _plain_modules(model):
        if not isinstance(module, BaseTunerLayer):
            continue
        is_lora = isinstance(module, (LoraLinear, ParamWrapper))
        adapters = _active(module) if is_lora else []
        does_more = any(adapter in module.lora_variant or module.lora_bias.get(adapter) for adapter in adapters)
        if not is_lora or does_more:
            raise ValueError(
                f"{name} has an adapter of {type(module).__name__} that does more than add to the weight, which cannot "
                "be given to another engine; use plain LoRA, leave the layer out of the adapter's targets, or set "
                "use_vllm=False"
            )
        if adapters:
            parameter_name = "weight"
            if isinstance(module, ParamWrapper):
                parameter_name = module.parameter_name
            sums[f"{name}.{parameter_name}"] = partial(_sum_of_weights, module, adapters)
    return sums


@torch.no_grad()
def _sum_of_weights(module: LoraLinear | ParamWrapper, adapters: list[str]) -> torch.Tensor:
    """Return what adapters add to the parameter that they are on, in float32 and in full."""
    delta = module.get_delta_weight
    if isinstance(module, MXFP4LoraExpertParameter) and module.is_on_weight:
        delta = module.delta
    return sum(whole(delta(adapter)).float() for adapter in adapters)


def adapted_parameters(model: PeftModel) -> set[str]:
    """Return the names of the frozen parameters that have adapters in them when they are pushed."""
    names = set()
    for name, module in _plain_modules(model):
        if isinstance(module, ParamWrapper):
            is_packed = isinstance(module, MXFP4LoraPackedExpertParameter)
            if module.merged or (is_packed and _active(module)):
                names.add(f"{name}.{module.parameter_name}")
        elif isinstance(module, BaseTunerLayer) and module.merged:
            names |= {f"{name}.weight", f"{name}.bias"}
        elif isinstance(module, LoraLinear) and not isinstance(module, MXFP4LoraMasterLinear) and _active(module):
            names.add(f"{name}.weight")
    return names


@torch.no_grad()
def policy_parameters(model: PeftModel, packed: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters of the model that ``model`` stands for by their names without PEFT and packing:
    ``Q(W) + delta`` of the active adapters in the layer's compute dtype, all others as they are. Nothing is written.

    Args:
        packed: give packed weights as they are stored, without what adapters add to them, see [`adapter_factors`].

    Raises:
        RuntimeError: weights are sharded, so that no process has them in full.
        ValueError: other adapters than LoRA on linear layers and packed experts, or with ``packed`` on experts.
    """
    seen = set()  # parameters that were given under another name
    inside = "\0"  # the adapter layer that the walk is in
    for name, module in model.get_base_model().named_modules():
        if name.startswith(inside):
            continue
        layer = module
        if isinstance(module, BaseTunerLayer):
            layer = module.get_base_layer()
            inside = f"{name}."
        _check_pushable(name, module, packed)
        is_on_master = isinstance(module, LoraLinear) and not isinstance(layer, MXFP4PackedLinear)
        if is_on_master and id(layer.weight) in seen:
            raise ValueError(f"{name} has an adapter and is tied; leave it out of the adapter's targets")
        has_experts_to_unpack = isinstance(layer, MXFP4PackedExperts) and not packed
        if is_on_master or isinstance(layer, MXFP4PackedLinear) or has_experts_to_unpack:
            for parameter_name, tensor in _parameters(layer, module, packed):
                yield f"{name}.{parameter_name}", tensor
        else:
            for full_name, parameter in module.named_parameters(name, recurse=False):
                plain_name = _without_wrapper(full_name, model)
                if plain_name is not None and id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield plain_name, parameter.data


def _check_pushable(name: str, module: nn.Module, packed: bool) -> None:
    """Raise for a module whose parameters cannot be given to another engine, as [`policy_parameters`] says."""
    is_adapter = isinstance(module, BaseTunerLayer)
    on_experts = isinstance(module, MXFP4LoraPackedExpertParameter)
    is_lora = isinstance(module, LoraLinear)
    if on_experts:
        is_lora = all(wrapper.is_on_weight for wrapper in nested_wrappers(module))
    if is_adapter and (not is_lora or module.lora_variant or any(module.lora_bias.values())):
        raise ValueError(
            f"{name} has an adapter that is no plain LoRA on a linear layer; leave it out of the adapter's targets "
            "when rollouts run in another engine"
        )
    if packed and on_experts:
        raise ValueError(f"{name} has adapters on experts, which cannot be given apart from their weights")
    for full_name, parameter in module.named_parameters(name, recurse=is_adapter):
        if parameter.numel() == 0 or hasattr(parameter, "full_tensor"):
            raise RuntimeError(
                f"{full_name} is sharded; a packed policy is pushed to other engines from whole weights only"
            )


def _parameters(layer: nn.Module, module: nn.Module, packed: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters of a layer, of which ``module`` is the layer itself if it is packed, or adapters on it."""
    if isinstance(layer, nn.Linear) and not isinstance(layer, MXFP4PackedLinear):
        deltas = (module.get_delta_weight(adapter).float() for adapter in _active(module))
        yield "weight", sum(deltas, layer.weight.float()).to(layer.weight.dtype)
    elif packed:
        yield from ((field, getattr(layer, field).data) for field in layer.shapes())
    elif isinstance(layer, MXFP4PackedLinear):
        if module is layer:
            yield "weight", layer.dequantized_weight()
        else:
            yield "weight", module.effective_weight().to(layer.compute_dtype)
    else:
        adapted = {wrapper.parameter_name: wrapper for wrapper in nested_wrappers(module)}
        for projection in layer.projections:
            if projection in adapted:
                yield projection, adapted[projection].effective_weight(layer.compute_dtype)
            else:
                yield projection, layer.dequantized_weight(projection)
    for parameter_name, parameter in layer.named_parameters(recurse=False):
        if parameter_name.endswith("bias"):
            yield parameter_name, parameter.data


def _without_wrapper(name: str, model: PeftModel) -> str | None:
    """Return the plain name of a parameter that PEFT may have wrapped; `None` for the copy not in use."""
    if ".original_module." in name:
        return None
    for adapter in model.active_adapters:
        name = name.replace(f".modules_to_save.{adapter}.", ".")
    if ".modules_to_save." in name:  # of an adapter that is not active
        return None
    return name
