# SPDX-License-Identifier: Apache-2.0
"""The predictions of a policy on given token sequences, and a model put into evaluation mode and back."""

import contextlib
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn


#: Label of a token that does not count, as in transformers and `torch.nn.functional.cross_entropy`.
IGNORED = -100


@contextlib.contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Dropout and checkpointing off within the context; afterwards every module is in the mode that it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def next_tokens(
    input_ids: torch.Tensor, labels: torch.Tensor | None = None, attention_mask: torch.Tensor | None = None
) -> torch.Tensor:
    """The token that each position but the last is to predict, or -100 where it does not count.

    Args:
        input_ids: ``[batch, length]``.
        labels: the same shape; -100 marks tokens that do not count. Default: all count.
        attention_mask: the same shape; 0 marks padding, which never counts, neither as a token nor as a context.

    Returns:
        ``[batch, length - 1]``, int64.

    Raises `ValueError` for other shapes, and when no token counts.
    """
    if input_ids.dim() != 2:
        raise ValueError(f"input_ids must be [batch, length], got {tuple(input_ids.shape)}")
    for name, tensor in (("labels", labels), ("attention_mask", attention_mask)):
        if tensor is not None and tensor.shape != input_ids.shape:
            raise ValueError(f"{name} is {tuple(tensor.shape)} but input_ids is {tuple(input_ids.shape)}")
    targets = (input_ids if labels is None else labels)[:, 1:]
    if attention_mask is not None:
        seen = attention_mask.bool()
        targets = targets.masked_fill(~(seen[:, 1:] & seen[:, :-1]), IGNORED)
    if not (targets != IGNORED).any():
        raise ValueError("no token counts: sequences need two tokens or more, and labels other than -100 after them")
    return targets


def policy_logits(
    model: nn.Module,
    input_ids: torch.Tensor,
    labels: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Float32 logits ``[tokens, vocabulary]`` at the positions that predict a token that counts, in evaluation mode.
    No others are computed.

    Arguments, and errors, as of [`next_tokens`]; the tensors are moved to the model's device. Padding is best on the
    right: without position ids, a model counts positions from the first token, padding or not.
    """
    device = next(model.parameters()).device
    counted = (next_tokens(input_ids, labels, attention_mask) != IGNORED).to(device)
    with torch.no_grad(), evaluation_mode(model):
        return forward_logits(model, input_ids, attention_mask, counted).float()


def forward_logits(
    model: nn.Module, input_ids: torch.Tensor, attention_mask: torch.Tensor | None, counted: torch.Tensor
) -> torch.Tensor:
    """Logits ``[tokens, vocabulary]`` of one forward pass without a cache, in the model's dtype and mode.

    The model's head is given the hidden states of the counted positions alone, where the model tells which module it
    is: the logits of all positions would be the largest tensor by far. What the model does to logits after the head is
    done to these.

    Args:
        input_ids, attention_mask: ``[batch, length]``.
        counted: bool ``[batch, length - 1]``.
    """
    device = next(model.parameters()).device
    mask = None if attention_mask is None else attention_mask.to(device)
    positions, narrowed = F.pad(counted, (0, 1)), []

    def narrow(module: nn.Module, args: tuple) -> tuple | None:
        if not args or args[0].shape[:2] != positions.shape:
            return None
        narrowed.append(True)
        return args[0][positions.to(args[0].device)].unsqueeze(0), *args[1:]

    # Not every model has a head of its own, and compiled code calls no hook.
    head = getattr(model, "get_output_embeddings", lambda: None)()
    handle = None if head is None else head.register_forward_pre_hook(narrow)
    try:
        logits = model(input_ids=input_ids.to(device), attention_mask=mask, use_cache=False).logits
    finally:
        if handle is not None:
            handle.remove()
    return logits.squeeze(0) if narrowed else logits[positions.to(logits.device)]
