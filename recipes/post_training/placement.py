# SPDX-License-Identifier: Apache-2.0
"""Where a model is evaluated that training has not placed yet: FSDP and DeepSpeed leave it whole, and on the CPU, until
training begins."""

import contextlib
from collections.abc import Iterator

import torch
from accelerate.utils import gather_object
from torch import nn


#: Of the weights: for what is computed with them, such as keys and values.
_MARGIN = 1.25


def why_not_on(device: torch.device, model: nn.Module, *, copies: bool) -> str | None:
    """Why a model cannot be evaluated on ``device`` before training, in words; `None` when it can. All processes call
    it together, and get the same answer: none may evaluate alone.

    Args:
        copies: whether quantized copies of weights are kept, which take as much memory again at the most.
    """
    reasons = gather_object([_reason(device, model, copies)])
    return next((reason for reason in reasons if reason is not None), None)


def _reason(device: torch.device, model: nn.Module, copies: bool) -> str | None:
    if any(parameter.is_meta for parameter in model.parameters()):
        return "its weights are read when training begins"
    if not _waits(model, device):
        return None
    weights = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    needed = _MARGIN * weights * (2 if copies else 1)
    free = torch.accelerator.get_memory_info(device)[0]
    if needed <= free:
        return None
    return (
        f"the whole model takes about {needed / 1e9:.0f} GB, {free / 1e9:.0f} GB are free on {device}, and it is "
        "sharded only when training begins"
    )


def _waits(model: nn.Module, device: torch.device) -> bool:
    """Whether the model is on the CPU, whole, until training takes it to ``device``. Weights that DeepSpeed or FSDP
    have sharded already stay where they are."""
    parameters = list(model.parameters())
    sharded = any(hasattr(p, "ds_id") or hasattr(p, "full_tensor") for p in parameters)
    return device.type != "cpu" and not sharded and all(p.device.type == "cpu" for p in parameters)


@contextlib.contextmanager
def placed(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Within this context a model that waits on the CPU is on ``device``. After it, it is on the CPU again: what shards
    it expects it there, and needs the memory."""
    if not _waits(model, device):
        yield
        return
    try:
        model.to(device)
        yield
    finally:
        model.to("cpu")
        torch.accelerator.empty_cache()
