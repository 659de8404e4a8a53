# SPDX-License-Identifier: Apache-2.0
"""A policy with adapters as a sampler must be given it: as a plain one where the sampler knows no adapters, as its base
and the adapters' factors where it does."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from peft import PeftModel
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from ...gemm import PACKED_FIELDS
from ...layers import PACKED, QUANTIZED, TRAINABLE, MXFP4Linear, MXFP4PackedExperts, MXFP4PackedLinear
from .expert_lora import MXFP4LoraExperts
from .lora_layer import MXFP4LoraLinear
from .master_lora import MXFP4LoraMasterLinear
from .merge.merging import MergesIntoMasters


def is_packed_with_adapters(model: nn.Module) -> bool:
    """Whether ``model`` is a PEFT model on packed layers."""
    return isinstance(model, PeftModel) and any(isinstance(m, PACKED) for m in model.modules())


def is_trainable_with_adapters(model: nn.Module) -> bool:
    """Whether ``model`` is a PEFT model on layers of (frozen) master weights."""
    return isinstance(model, PeftModel) and any(isinstance(m, TRAINABLE) for m in model.modules())


def has_inseparable_adapters(model: nn.Module) -> bool:
    """Whether an adapter is on a quantized weight and not what [`adapter_factors`] has: as those of experts."""
    layers = [m for m in model.modules() if isinstance(m, BaseTunerLayer) and not isinstance(m, _ON_LINEARS)]
    return any(isinstance(layer.get_base_layer(), QUANTIZED) and not _is_bias(layer) for layer in layers)


def adapter_rank(model: nn.Module) -> int:
    """The largest rank that active adapters have together on one quantized linear layer; 0 without any."""
    layers = [module for module in model.modules() if isinstance(module, _ON_LINEARS)]
    return max((sum(layer.r[adapter] for adapter in _active(layer)) for layer in layers), default=0)


def adapter_factors(
    model: nn.Module, everywhere: bool = False
) -> dict[str, Callable[[], tuple[torch.Tensor, torch.Tensor]]]:
    """What the active adapters have on each quantized linear layer, by the name that it has without PEFT: a function
    which gives ``A`` ``[r, K]`` and ``B`` ``[N, r]`` with the scaling in it, in float32; several adapters are one of
    the sum of their ranks, and where none is active the factors are zero, of rank 1. Weights must be whole when it is
    called; under FSDP2 it gathers factors, and all processes must call it.

    Args:
        everywhere: for all quantized linear layers, also those without adapters.
    """
    base, found = model.get_base_model() if isinstance(model, PeftModel) else model, {}
    for full_name, module in base.named_modules():
        name = full_name.replace(".base_layer", "")
        if isinstance(module, _ON_LINEARS):
            found[name] = partial(_factors, module)
        elif everywhere and isinstance(module, (MXFP4Linear, MXFP4PackedLinear)):
            found.setdefault(name, partial(_no_factors, module))
    return found


#: LoRA on quantized linear layers.
_ON_LINEARS = (MXFP4LoraLinear, MXFP4LoraMasterLinear)


def _active(module: BaseTunerLayer) -> list[str]:
    """The adapters that a layer computes with beside its weight."""
    names = [] if module.disable_adapters or module.merged else module.active_adapters
    return [name for name in names if name in module.lora_A]


@torch.no_grad()
def _factors(module: LoraLinear) -> tuple[torch.Tensor, torch.Tensor]:
    adapters = _active(module)
    if not adapters:
        return _no_factors(module.get_base_layer())
    a = [_whole(module.lora_A[adapter].weight).float() for adapter in adapters]
    b = [_whole(module.lora_B[adapter].weight).float() * module.scaling[adapter] for adapter in adapters]
    return torch.cat(a), torch.cat(b, dim=1)


def _no_factors(layer: nn.Linear) -> tuple[torch.Tensor, torch.Tensor]:
    device = layer.weight.device
    return torch.zeros(1, layer.in_features, device=device), torch.zeros(layer.out_features, 1, device=device)


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
        adapters = _active(module)
        if any(adapter in module.lora_variant for adapter in adapters):
            raise ValueError(
                f"{name}: an adapter is a variant of LoRA that does more than add to the weight, which cannot be given "
                "to another engine; use plain LoRA, or set use_vllm=False"
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
    """Whether the adapter is on a parameter that is none of the weights."""
    owned = getattr(module.get_base_layer(), "projections", ("weight",))
    return isinstance(module, ParamWrapper) and module.parameter_name not in owned


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def adapted_parameters(model: PeftModel) -> set[str]:
    """Names of the frozen parameters with adapters in them: merged ones, and of packed layers those that
    [`policy_parameters`] makes."""
    names = set()
    for full_name, module in model.get_base_model().named_modules():
        name = full_name.replace(".base_layer", "")
        if isinstance(module, ParamWrapper) and module.merged:
            names.add(f"{name}.{module.parameter_name}")
        elif isinstance(module, MXFP4LoraExperts) and (module.merged or _active(module)):
            names |= {f"{name}.{projection}" for projection in module.get_base_layer().projections}
        elif isinstance(module, BaseTunerLayer) and module.merged:
            names |= {f"{name}.weight", f"{name}.bias"}
        elif isinstance(module, MXFP4LoraLinear) and _active(module):
            biased = any(module.lora_bias.get(adapter) for adapter in _active(module))
            names |= {f"{name}.weight", *([f"{name}.bias"] if biased else [])}
    return names


@torch.no_grad()
def policy_parameters(model: PeftModel, packed: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters of the model that ``model`` stands for, one at a time, by the names that they have without PEFT and
    without packing: ``Q(W) + delta`` of the active adapters in the layer's compute dtype, all others as they are.

    Nothing is merged or written.

    Args:
        packed: give packed weights as they are stored, by the names of packed checkpoints, without what adapters add to
            them, see [`adapter_factors`].

    Raises:
        RuntimeError: weights are sharded, so that no process has them in full.
        ValueError: adapters on other layers than packed ones, or with ``packed`` on experts, whose sum is not made
            here.
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
            if not packed:
                yield from (_adapted if isinstance(module, MXFP4LoraLinear) else _adapted_experts)(name, module)
            elif isinstance(module, MXFP4LoraLinear):
                yield from _stored(name, module.get_base_layer(), _adapted_bias(module))
            else:
                raise ValueError(f"{name} has adapters on experts, which cannot be given apart from their weights")
        elif isinstance(module, BaseTunerLayer):
            raise ValueError(
                f"{name} has an adapter but is no packed layer; leave it out of the adapter's targets when rollouts "
                "run in another engine"
            )
        elif isinstance(module, MXFP4PackedLinear):
            _check_whole(name, module)
            if packed:
                yield from _stored(name, module, module.bias)
                continue
            yield f"{name}.weight", module.dequantized_weight()
            if module.bias is not None:
                yield f"{name}.bias", module.bias.data
        elif isinstance(module, MXFP4PackedExperts) and not packed:
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


def _stored(name: str, layer: MXFP4PackedLinear, bias: torch.Tensor | None) -> Iterator[tuple[str, torch.Tensor]]:
    for field in PACKED_FIELDS:
        if getattr(layer, field) is not None:
            yield f"{name}.{field}", getattr(layer, field).data
    if bias is not None:
        yield f"{name}.bias", bias.data


def _adapted_bias(layer: MXFP4LoraLinear) -> torch.Tensor | None:
    """The bias with those of the active adapters, as the forward pass computes with."""
    bias = layer.get_base_layer().bias
    biased = [adapter for adapter in _active(layer) if layer.lora_bias.get(adapter)]
    if not biased:
        return bias
    if bias is None:
        raise ValueError(
            f"{layer.get_base_layer().name}: an adapter has a bias (lora_bias=True) and the layer none to add it to"
        )
    return (bias.float() + _sum_of_biases(layer, biased)).to(bias.dtype)


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
