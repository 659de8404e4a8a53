# SPDX-License-Identifier: Apache-2.0
"""How many bits the operands of a model take under a scheme, with some of its layers left in full precision."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from ...experts_layout import projections, weight_size
from ...module_names import find_layers
from .schemes import ModelScheme


#: Bits of an element that is not quantized, whatever dtype the model is measured in: policies are served in 16.
FULL_BITS = 16.0


@dataclass(frozen=True)
class Operands:
    """The elements that the products of a linear layer, or of a module of experts, take.

    Attributes:
        weights: of its weights, those of all experts.
        inputs: what enters its products for the tokens that were counted: rows times input features; of experts a row
            for each projection of each expert that a token is sent to.
    """

    weights: int
    inputs: int


def count_operands(model: nn.Module, ids: torch.Tensor) -> dict[str, Operands]:
    """By name, the operands of every layer that can be quantized, each layer once; inputs are those of the tokens
    ``ids``, ``[1, tokens]``.

    Args:
        model: in full precision, not quantized.

    Raises `ValueError` where no layer can be quantized.
    """
    layers: dict[int, tuple[str, nn.Module]] = {}
    for name, layer in find_layers(model)[0].items():
        layers.setdefault(id(layer), (name, layer))
    entered = dict.fromkeys(layers, 0)

    def count(layer: nn.Module, args: tuple, options: dict) -> None:
        entered[id(layer)] += _entering(layer, args, options)

    handles = [layer.register_forward_pre_hook(count, with_kwargs=True) for _, layer in layers.values()]
    try:
        with torch.no_grad():
            model(input_ids=ids.to(next(model.parameters()).device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return {name: Operands(_weights(layer), entered[key]) for key, (name, layer) in layers.items()}


def average_bits(scheme: ModelScheme, operands: Mapping[str, Operands], left: Collection[str] = ()) -> float:
    """Bits of an operand on average over a model: the mean over its elements of weights, and where the scheme
    quantizes activations the mean of that and of the mean over the elements that enter layers.

    Args:
        operands: of all layers, see [`count_operands`].
        left: names of those in full precision, whose elements of both kinds have [`FULL_BITS`].
    """
    means = []
    for bits, kind in ((scheme.weight_bits, "weights"), (scheme.activation_bits, "inputs")):
        if bits is not None:
            total = sum(getattr(own, kind) for own in operands.values())
            full = sum(getattr(operands[name], kind) for name in left)
            means.append(bits + (FULL_BITS - bits) * full / total)
    return sum(means) / len(means)


def averaged(scheme: ModelScheme, model: nn.Module, operands: Mapping[str, Operands]) -> ModelScheme:
    """``scheme`` with its average over ``model``, in full precision, whose layers it may leave alone in part."""
    quantized = find_layers(model, scheme.config.modules_to_not_convert or ())[0]
    left = [name for name in operands if name not in quantized]
    return replace(scheme, average=average_bits(scheme, operands, left)) if left else scheme


def _weights(layer: nn.Module) -> int:
    if isinstance(layer, nn.Linear):
        return layer.weight.numel()
    return sum(getattr(layer, name).numel() for name in projections(layer))


def _entering(layer: nn.Module, args: tuple, options: dict) -> int:
    if isinstance(layer, nn.Linear):
        return (args[0] if args else options["input"]).numel()
    rows = (args[1] if len(args) > 1 else options["top_k_index"]).numel()
    return rows * sum(weight_size(layer, name)[2] for name in projections(layer))
