# SPDX-License-Identifier: Apache-2.0
"""A policy with adapters as a plain one: what a sampler that knows none must be given."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from peft import PeftModel
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from ..layers import PACKED, TRAINABLE, MXFP4PackedExperts, MXFP4PackedLinear
from .expert_lora import MXFP4LoraExperts
from .lora_layer import MXFP4LoraLinear
from .merge.merging import MergesIntoMasters


def is_packed_with_adapters(model: nn.Module) -> bool:
    """Whether ``model`` is a PEFT model on packed layers."""
    return isinstance(model, PeftModel) and any(isinstance(m, PACKED) for m in model.modules())


def is_trainable_with_adapters(model: nn.Module) -> bool:
    """Whether ``model`` is a PEFT model on layers of (frozen) master weights."""
    return isinstance(model, PeftModel) and any(isinstance(m, TRAINABLE) for m in model.modules())


def adapter_sums(model: PeftModel) -> dict[str, Callable[[], torch.Tensor]]:
    """What the active adapters add to the parameters of a policy on trainable layers, by the names that those have
    without PEFT: a function for each, which gives the sum in float32 and in full, under FSDP2 too, whose processes must
    all call it.

    Raises `ValueError` for an adapter that does more than add, as DoRA does, or is no LoRA of a linear layer or of a
    single parameter.
    """
    sums: dict[str, Callable[[], torch.Tensor]] = {}
    for full_name, module in model.get_base_model().named_modules():
        if not isinstance(module, BaseTunerLayer):
            continue
        name = full_name.replace(".base_layer", "")
        if not isinstance(module, (LoraLinear, ParamWrapper)):
            raise ValueError(
                f"{name} has an adapter of {type(module).__name__}, which cannot be given to another engine; leave it "
                "out of the adapter's targets, or set use_vllm=False"
            )
        active = [] if module.disable_adapters or module.merged else module.active_adapters
        adapters = [adapter for adapter in active if adapter in module.lora_A]
        for adapter in adapters:
            if adapter in module.lora_variant:
                raise ValueError(
                    f"{name}: adapter {adapter!r} is a variant of LoRA that does more than add to the weight, which "
                    "cannot be given to another engine; use plain LoRA, or set use_vllm=False"
                )
        if not adapters:
            continue
        owned = module.parameter_name if isinstance(module, ParamWrapper) else "weight"
        sums[f"{name}.{owned}"] = partial(_sum_of_weights, module, adapters)
        biased = [adapter for adapter in adapters if module.lora_bias.get(adapter)]
        if biased:
            if module.get_base_layer().bias is None:
                raise ValueError(f"{name}: an adapter has a bias (lora_bias=True) and the layer none to add it to")
            sums[f"{name}.bias"] = partial(_sum_of_biases, module, biased)
    return sums


@torch.no_grad()
def _sum_of_weights(module: LoraLinear | ParamWrapper, adapters: list[str]) -> torch.Tensor:
    is_ours = isinstance(module, MergesIntoMasters) and not _is_bias(module)
    return sum(_whole(module.delta(a) if is_ours else module.get_delta_weight(a)).float() for a in adapters)


@torch.no_grad()
def _sum_of_biases(module: LoraLinear, adapters: list[str]) -> torch.Tensor:
    return sum(module.scaling[a] * _whole(module.lora_B[a].bias).float() for a in adapters)


def _is_bias(module: nn.Module) -> bool:
    """Whether the adapter is on a parameter of experts that is none of their weights."""
    return isinstance(module, ParamWrapper) and module.parameter_name not in module.get_base_layer().projections


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@torch.no_grad()
def policy_parameters(model: PeftModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters of the model that ``model`` stands for, one at a time, by the names that they have without PEFT and
    without packing: ``Q(W) + delta`` of the active adapters in the layer's compute dtype, all others as they are.

    Nothing is merged or written.

    Raises:
        RuntimeError: weights are sharded, so that no process has them in full.
        ValueError: adapters on other layers than packed ones, whose sum is not made here.
    """
    base = model.get_base_model()
    seen: set[int] = set()
    inside = "\0"  # the adapter layer that the walk is in
    for name, module in base.named_modules():
        if name.startswith(inside):
            continue
        if isinstance(module, (MXFP4LoraLinear, MXFP4LoraExperts)):
            inside = f"{name}."
            _check_whole(name, module)
            yield from (_adapted if isinstance(module, MXFP4LoraLinear) else _adapted_experts)(name, module)
        elif isinstance(module, BaseTunerLayer):
            raise ValueError(
                f"{name} has an adapter but is no packed layer; leave it out of the adapter's targets when rollouts "
                "run in another engine"
            )
        elif isinstance(module, MXFP4PackedLinear):
            _check_whole(name, module)
            yield f"{name}.weight", module.dequantized_weight()
            if module.bias is not None:
                yield f"{name}.bias", module.bias.data
        elif isinstance(module, MXFP4PackedExperts):
            _check_whole(name, module)
            for projection in module.projections:
                yield f"{name}.{projection}", module.dequantized_weight(projection)
                if module.bias_of(projection) is not None:
                    yield f"{name}.{projection}_bias", module.bias_of(projection).data
        else:
            _check_whole(name, module)
            for own, parameter in module.named_parameters(name, recurse=False):
                plain = _without_wrapper(own, model)
                if plain is not None and id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield plain, parameter.data


def _adapted(name: str, layer: MXFP4LoraLinear) -> Iterator[tuple[str, torch.Tensor]]:
    base = layer.get_base_layer()
    weight, bias = layer.effective_weight()
    yield f"{name}.weight", weight.to(base.compute_dtype)
    if bias is not None:
        yield f"{name}.bias", bias.to(base.bias.dtype)


def _adapted_experts(name: str, layer: MXFP4LoraExperts) -> Iterator[tuple[str, torch.Tensor]]:
    base = layer.get_base_layer()
    for projection in base.projections:
        yield f"{name}.{projection}", layer.effective_weight(projection, base.compute_dtype)
        if base.bias_of(projection) is not None:
            yield f"{name}.{projection}_bias", base.bias_of(projection).data


def _check_whole(name: str, module: nn.Module) -> None:
    for own, parameter in module.named_parameters(name, recurse=isinstance(module, BaseTunerLayer)):
        if parameter.numel() == 0 or hasattr(parameter, "full_tensor"):
            raise RuntimeError(f"{own} is sharded; a packed policy is pushed to other engines from whole weights only")


def _without_wrapper(name: str, model: PeftModel) -> str | None:
    """The plain name of a parameter that PEFT may have wrapped to train it in full; `None` for the copy not in use."""
    if ".original_module." in name:
        return None
    for adapter in model.active_adapters:
        name = name.replace(f".modules_to_save.{adapter}.", ".")
    return None if ".modules_to_save." in name else name
