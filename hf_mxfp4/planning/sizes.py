# SPDX-License-Identifier: Apache-2.0
"""Sizes of a model without memory: its parameters, and what a forward pass of it keeps."""

import contextlib
from dataclasses import dataclass

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.modeling_layers import GradientCheckpointingLayer

from ..layers import MXFP4Linear, MXFP4PackedLinear
from .counters import SavedTensors, state_bytes, unique_bytes
from .meta_model import PlannedExperts


#: Tokens of the pass that the size of the key-value cache is read off.
_CACHE_TOKENS = 32


@dataclass(frozen=True)
class ModelSizes:
    """Parameters of a model.

    Attributes:
        weights: bytes of parameters and buffers.
        elements: of parameters in floating point.
        trained, trained_elements: bytes and elements of those that have gradients.
        factors: rows and columns of the trained matrices, elements of the other trained tensors: what a factored
            optimizer (Adafactor) has numbers for.
        layer, layer_elements: bytes and elements of the largest decoder layer.
        outside, outside_elements: of what is in no decoder layer: embeddings, the head, the last norm.
        quantized_elements: of all quantized weights.
        cached_elements: of those whose copies `cached_weights` keeps.
        largest_copy: of the largest copy that exists while it is used.
        vocabulary, hidden, widest: rows and columns of the head; the most features that a quantized layer puts out.
        head_trained: whether the head has a gradient.
    """

    weights: int
    elements: int
    trained: int
    trained_elements: int
    factors: int
    layer: int
    layer_elements: int
    outside: int
    outside_elements: int
    quantized_elements: int
    cached_elements: int
    largest_copy: int
    vocabulary: int
    hidden: int
    widest: int
    head_trained: bool


def model_sizes(model: nn.Module) -> ModelSizes:
    """Count the parameters of a model that [`hf_mxfp4.planning.meta_model.build`] made."""
    parameters = list(model.parameters())
    trained = [p for p in parameters if p.requires_grad]
    layers = [list(m.parameters()) for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    inside = {id(p) for layer in layers for p in layer}
    outside = [p for p in parameters if id(p) not in inside]
    largest = max(layers, key=unique_bytes, default=[])
    linears = [m for m in model.modules() if isinstance(m, (MXFP4Linear, MXFP4PackedLinear))]
    experts = [m for m in model.modules() if isinstance(m, PlannedExperts)]
    sizes = [m.in_features * m.out_features for m in linears]
    head = model.get_output_embeddings().weight
    return ModelSizes(
        weights=state_bytes(model)["weights"],
        elements=_elements(parameters),
        trained=unique_bytes(trained),
        trained_elements=_elements(trained),
        factors=sum(p.shape[-1] + p.numel() // p.shape[-1] if p.dim() > 1 else p.numel() for p in trained),
        layer=unique_bytes(largest),
        layer_elements=_elements(largest),
        outside=unique_bytes(outside),
        outside_elements=_elements(outside),
        quantized_elements=sum(sizes) + sum(m.quantized_elements for m in experts),
        cached_elements=sum(sizes) + sum(m.cached_elements for m in experts),
        largest_copy=max([*sizes, *(m.largest_copy for m in experts)], default=0),
        vocabulary=head.shape[0],
        hidden=head.shape[1],
        widest=max((m.out_features for m in model.modules() if _is_inner_linear(m, head)), default=0),
        head_trained=head.requires_grad,
    )


def _is_inner_linear(module: nn.Module, head: nn.Parameter) -> bool:
    return isinstance(module, nn.Linear) and module.weight is not head


def _elements(parameters: list[nn.Parameter]) -> int:
    return sum(p.numel() for p in parameters if p.is_floating_point())


@dataclass(frozen=True)
class Activations:
    """Bytes that a forward pass keeps for the backward pass, as a function of the number of sequences: ``fixed``, such
    as weights that autocast has converted, and ``per_sequence``.

    Attributes:
        held: without gradient checkpointing.
        checkpointed: with it.
        largest_layer: what is computed again at one time with it.
    """

    held: tuple[int, int]
    checkpointed: tuple[int, int]
    largest_layer: tuple[int, int]

    def bytes(self, sequences: int, checkpointing: bool) -> int:
        """Return what is held when the backward pass is in the first layer that it comes to."""
        parts = (self.checkpointed, self.largest_layer) if checkpointing else (self.held,)
        return sum(fixed + sequences * each for fixed, each in parts)


def activations(
    model: nn.Module, mode: FakeTensorMode, length: int, autocast: torch.dtype | None, logits: bool
) -> Activations:
    """Run a model without memory forward on one and on two sequences of ``length`` tokens.

    Args:
        autocast: the dtype of products under autocast; `None` without it.
        logits: whether the loss of transformers is computed, with the logits of all tokens; otherwise those of one.
    """
    counts = []
    for sequences in (1, 2):
        with mode, SavedTensors(model) as saved, _autocast(autocast):
            ids = torch.zeros(sequences, length, dtype=torch.long)
            options = {"labels": ids} if logits else {"logits_to_keep": 1}
            model(input_ids=ids, use_cache=False, **options)
        counts.append((saved.held, saved.held_checkpointed, saved.largest_layer))
    return Activations(*((2 * one - two, two - one) for one, two in zip(*counts, strict=True)))


def cache_bytes_per_token(model: nn.Module, mode: FakeTensorMode, autocast: torch.dtype | None) -> float:
    """Bytes of keys and values that one token of one sequence leaves, in all layers."""
    with mode, torch.no_grad(), _autocast(autocast):
        output = model(input_ids=torch.zeros(1, _CACHE_TOKENS, dtype=torch.long), use_cache=True, logits_to_keep=1)
        layers = output.past_key_values.layers
        return sum(unique_bytes([getattr(layer, "keys", None), getattr(layer, "values", None)]) for layer in layers) / (
            _CACHE_TOKENS
        )


def _autocast(dtype: torch.dtype | None) -> contextlib.AbstractContextManager:
    return contextlib.nullcontext() if dtype is None else torch.autocast("cpu", dtype)
