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
    layers = [layer for layer in adapters_on_quantized(model) if not isinstance(layer, _ON_LINEARS)]
    return any(getattr(layer, "is_on_weight", True) for layer in layers)


def adapter_rank(model: nn.Module) -> int:
    """Return the largest rank that active adapters have together on one quantized linear layer; 0 without any."""
    layers = [module for module in model.modules() if isinstance(module, _ON_LINEARS)]
    return max((sum(layer.r[adapter] for adapter in _active(layer)) for layer in layers), default=0)


def _active(module: BaseTunerLayer) -> list[str]:
    """Return the adapters that a layer computes with beside its weight."""
    names = [] if module.disable_adapters or module.merged else module.active_adapters
    return [name for name in names if name in module.lora_A]


def adapter_factors(
    model: nn.Module, everywhere: bool = False
) -> dict[str, Callable[[], tuple[torch.Tensor, torch.Tensor]]]:
    """Return what the active adapters have on each quantized linear layer (``everywhere``: also on those without), by
    its name without PEFT: a function which gives ``A`` ``[r, K]`` and ``B`` ``[N, r]`` with the scaling in it, in
    float32; zeros of rank 1 where none is active. Under FSDP2 all processes must call the function.
    """
    found: dict[str, Callable[[], tuple[torch.Tensor, torch.Tensor]]] = {}
    for name, module in _plain_modules(model):
        if isinstance(module, _ON_LINEARS):
            found[name] = partial(_factors, module.get_base_layer(), module)
        elif everywhere and isinstance(module, (MXFP4Linear, MXFP4PackedLinear)):
            found.setdefault(name, partial(_factors, module))
    return found


def _plain_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield all modules by the names that they have without PEFT, adapters before what they are on."""
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    for name, module in base.named_modules():
        yield name.replace(".base_layer", ""), module


@torch.no_grad()
def _factors(layer: nn.Linear, module: LoraLinear | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    adapters = [] if module is None else _active(module)
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
        adapters = _active(module) if isinstance(module, (LoraLinear, ParamWrapper)) else None
        if adapters is None or any(each in module.lora_variant or module.lora_bias.get(each) for each in adapters):
            raise ValueError(
                f"{name} has an adapter of {type(module).__name__} that does more than add to the weight, which cannot "
                "be given to another engine; use plain LoRA, leave the layer out of the adapter's targets, or set "
                "use_vllm=False"
            )
        if adapters:
            owned = module.parameter_name if isinstance(module, ParamWrapper) else "weight"
            sums[f"{name}.{owned}"] = partial(_sum_of_weights, module, adapters)
    return sums


@torch.no_grad()
def _sum_of_weights(module: LoraLinear | ParamWrapper, adapters: list[str]) -> torch.Tensor:
    is_ours = isinstance(module, MXFP4LoraExpertParameter) and module.is_on_weight
    return sum(whole(module.delta(a) if is_ours else module.get_delta_weight(a)).float() for a in adapters)


def adapted_parameters(model: PeftModel) -> set[str]:
    """Return the names of the frozen parameters that have adapters in them when they are pushed."""
    names = set()
    for name, module in _plain_modules(model):
        if isinstance(module, ParamWrapper):
            if module.merged or isinstance(module, MXFP4LoraPackedExpertParameter) and _active(module):
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
    base, seen = model.get_base_model(), set()
    inside = "\0"  # the adapter layer that the walk is in
    for name, module in base.named_modules():
        if name.startswith(inside):
            continue
        layer = module
        if isinstance(module, BaseTunerLayer):
            layer, inside = module.get_base_layer(), f"{name}."
        _check_pushable(name, module, packed)
        is_plain = isinstance(module, LoraLinear) and not isinstance(layer, MXFP4PackedLinear)
        if is_plain and id(layer.weight) in seen:
            raise ValueError(f"{name} has an adapter and is tied; leave it out of the adapter's targets")
        if is_plain or isinstance(layer, MXFP4PackedLinear) or isinstance(layer, MXFP4PackedExperts) and not packed:
            yield from ((f"{name}.{own}", tensor) for own, tensor in _parameters(layer, module, packed))
        else:
            for own, parameter in module.named_parameters(name, recurse=False):
                plain = _without_wrapper(own, model)
                if plain is not None and id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield plain, parameter.data


def _check_pushable(name: str, module: nn.Module, packed: bool) -> None:
    is_adapter = isinstance(module, BaseTunerLayer)
    on_experts = isinstance(module, MXFP4LoraPackedExpertParameter)
    is_lora = (
        isinstance(module, LoraLinear) or on_experts and all(each.is_on_weight for each in nested_wrappers(module))
    )
    if is_adapter and (not is_lora or module.lora_variant or any(module.lora_bias.values())):
        raise ValueError(
            f"{name} has an adapter that is no plain LoRA on a linear layer; leave it out of the adapter's targets "
            "when rollouts run in another engine"
        )
    if packed and on_experts:
        raise ValueError(f"{name} has adapters on experts, which cannot be given apart from their weights")
    for own, parameter in module.named_parameters(name, recurse=is_adapter):
        if parameter.numel() == 0 or hasattr(parameter, "full_tensor"):
            raise RuntimeError(f"{own} is sharded; a packed policy is pushed to other engines from whole weights only")


def _parameters(layer: nn.Module, module: nn.Module, packed: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters of a layer, of which ``module`` is the layer itself if it is packed, or adapters on it."""
    if isinstance(layer, nn.Linear) and not isinstance(layer, MXFP4PackedLinear):
        deltas = (module.get_delta_weight(adapter).float() for adapter in _active(module))
        yield "weight", sum(deltas, layer.weight.float()).to(layer.weight.dtype)
    elif packed:
        yield from ((field, getattr(layer, field).data) for field in layer.shapes())
    elif isinstance(layer, MXFP4PackedLinear):
        weight = layer.dequantized_weight() if module is layer else module.effective_weight().to(layer.compute_dtype)
        yield "weight", weight
    else:
        adapted = {wrapper.parameter_name: wrapper for wrapper in nested_wrappers(module)}
        for projection in layer.projections:
            if projection in adapted:
                yield projection, adapted[projection].effective_weight(layer.compute_dtype)
            else:
                yield projection, layer.dequantized_weight(projection)
    yield from ((own, bias.data) for own, bias in layer.named_parameters(recurse=False) if own.endswith("bias"))


def _without_wrapper(name: str, model: PeftModel) -> str | None:
    """Return the plain name of a parameter that PEFT may have wrapped; `None` for the copy not in use."""
    if ".original_module." in name:
        return None
    for adapter in model.active_adapters:
        name = name.replace(f".modules_to_save.{adapter}.", ".")
    return None if ".modules_to_save." in name else name
