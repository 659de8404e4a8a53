# SPDX-License-Identifier: Apache-2.0
"""A packed policy with adapters as a plain one: what a sampler that knows neither must be given."""

from collections.abc import Iterator

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from ..layers import PACKED, MXFP4PackedExperts, MXFP4PackedLinear
from .expert_lora import MXFP4LoraExperts
from .lora_layer import MXFP4LoraLinear


def is_packed_with_adapters(model: nn.Module) -> bool:
    """Whether ``model`` is a PEFT model on packed layers."""
    return isinstance(model, PeftModel) and any(isinstance(m, PACKED) for m in model.modules())


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
