# SPDX-License-Identifier: Apache-2.0
"""The router modules of a mixture-of-experts model, and what their forward pass returns.

In transformers 5 (checked in 5.17 and 5.23) a router is a module of its own that takes the hidden states and returns
``(logits [T, E], weights [T, k], indices [T, k])`` for the T tokens of a batch (GraniteMoE of 5.17 in the reverse
order), and chooses by `torch.topk`. The weights are what its architecture makes of the chosen logits: Qwen2-MoE,
Qwen3-MoE and OLMoE take the softmax over all experts, which `norm_topk_prob` renormalises over the chosen; Mixtral
always renormalises; gpt-oss and GraniteMoE take the softmax of the chosen; DeepSeek-V3 takes sigmoids, chooses by them
plus a bias within the best groups, renormalises and scales.
"""

from typing import Any

import torch
from torch import nn


def find_routers(model: nn.Module) -> dict[str, nn.Module]:
    """[`present_routers`], from the first layer to the last; raises `ValueError` when there is none."""
    routers = present_routers(model)
    if not routers:
        raise ValueError(
            f"{type(model).__name__} has no router: no module has top_k, num_experts and a weight of [num_experts, "
            "hidden], and the model does not declare where its router_logits come from; router options are for "
            "mixture-of-experts models"
        )
    return routers


def present_routers(model: nn.Module) -> dict[str, nn.Module]:
    """The routers of ``model`` by name, none for a dense model.

    Found by structure (a 2-D ``weight`` of its own with one row for each of ``num_experts``, and ``top_k``), and by
    what a transformers model says about the origin of its router logits.
    """
    declared = tuple({kind for module in model.modules() for kind in _declared_routers(module)})
    return {
        name: module
        for name, module in model.named_modules()
        # Of a router that PEFT trains a copy of (modules_to_save), the copy is the one that runs.
        if not name.endswith(".original_module") and (isinstance(module, declared) or _looks_like_a_router(module))
    }


def _looks_like_a_router(module: nn.Module) -> bool:
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() != 2 or not isinstance(getattr(module, "top_k", None), int):
        return False
    return weight.shape[0] == getattr(module, "num_experts", None)


def _declared_routers(module: nn.Module) -> list[type[nn.Module]]:
    """The classes that a transformers model names as the source of ``router_logits``."""
    declared = getattr(type(module), "_can_record_outputs", None)
    recorders = declared.get("router_logits", []) if isinstance(declared, dict) else []
    recorders = recorders if isinstance(recorders, (list, tuple)) else [recorders]
    kinds = [getattr(recorder, "target_class", recorder) for recorder in recorders]
    return [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, nn.Module)]


def choices_of(name: str, module: nn.Module, output: Any) -> torch.Tensor:
    """The expert indices ``[T, k]`` in a router's output: its only integers.

    Raises `ValueError` when there are none.
    """
    parts = output if isinstance(output, tuple) else (output,)
    integers = [p for p in parts if isinstance(p, torch.Tensor) and p.dtype in (torch.int64, torch.int32)]
    if len(integers) == 1 and integers[0].dim() == 2:
        return integers[0]
    raise ValueError(
        f"{name} ({type(module).__name__}) does not return the indices of the experts it chooses ([tokens, k]), so its "
        "choices are not known; router telemetry and router replay do not work with this architecture"
    )


def choice_agreement(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the share of each token's experts in ``a`` that ``b`` chose too, in any order.

    Args:
        a, b: expert indices ``[..., k]``, distinct along the last axis.

    Returns:
        ``[...]``, float32 in [0, 1].

    Raises `ValueError` when the shapes differ.
    """
    if a.shape != b.shape:
        raise ValueError(f"two routings of the same tokens have one shape, got {tuple(a.shape)} and {tuple(b.shape)}")
    return (a.unsqueeze(-1) == b.unsqueeze(-2)).any(dim=-1).float().mean(dim=-1)
