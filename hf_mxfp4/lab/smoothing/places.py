# SPDX-License-Identifier: Apache-2.0
"""Where a decoder's activations can be scaled by channel without changing what it computes: what writes them can be
divided by the scales, and all that reads them are linear layers, which can be multiplied by them."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Place:
    """Activations between what writes their channels and the linear layers that read them.

    Attributes:
        name: of the first layer that reads them.
        writers: tensors whose first axis is the channels, as they are written: a norm's weight, or weight and bias of a
            linear layer.
        readers: the linear layers.
        heads: of values of attention, how many heads there are, and how many of them one head of the writer is
            repeated for; ``(1, 1)`` elsewhere.
    """

    name: str
    writers: tuple[nn.Parameter, ...]
    readers: tuple[nn.Linear, ...]
    heads: tuple[int, int] = (1, 1)

    def written(self, per_reader: torch.Tensor) -> torch.Tensor:
        """What belongs to the channels of the readers ``[K]``, as the geometric mean for each channel of the writers.
        Numbers are positive."""
        heads, repeats = self.heads
        return per_reader.log().view(heads // repeats, repeats, -1).mean(1).exp().flatten()

    def read(self, per_writer: torch.Tensor) -> torch.Tensor:
        """What belongs to the channels of the writers, for each channel of the readers."""
        heads, repeats = self.heads
        return per_writer.view(heads // repeats, 1, -1).expand(-1, repeats, -1).flatten()


def find_places(model: nn.Module) -> Iterator[Place]:
    """The places of a decoder in the layout of Llama (Qwen2, Qwen3, Mistral, SmolLM and others): inputs of attention
    and of dense MLPs behind their norms, values of attention before the output projection, and inputs of the down
    projection. Layers of another layout are passed over."""
    for name, layer in model.named_modules():
        attention, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
        if isinstance(attention, nn.Module):
            yield from _of_attention(f"{name}.self_attn", layer, attention)
        if isinstance(mlp, nn.Module):
            yield from _of_mlp(f"{name}.mlp", layer, mlp)


def _of_attention(name: str, layer: nn.Module, attention: nn.Module) -> Iterator[Place]:
    inputs, norm = _linears(attention, "q_proj", "k_proj", "v_proj"), _weight(layer, "input_layernorm")
    if inputs is None:
        return
    if norm is not None:
        yield Place(f"{name}.q_proj", norm, inputs)
    output, width = _linears(attention, "o_proj"), getattr(attention, "head_dim", None)
    if output is None or not isinstance(width, int):
        return
    (output,), values = output, inputs[2]
    heads, kept = output.in_features // width, values.out_features // width
    if kept and heads * width == output.in_features and kept * width == values.out_features and heads % kept == 0:
        yield Place(f"{name}.o_proj", _writers(values), (output,), (heads, heads // kept))


def _of_mlp(name: str, layer: nn.Module, mlp: nn.Module) -> Iterator[Place]:
    inputs, norm = _linears(mlp, "gate_proj", "up_proj"), _weight(layer, "post_attention_layernorm")
    if inputs is None:
        return
    # Where another norm lies behind attention, this one writes nothing that the MLP reads.
    if norm is not None and _weight(layer, "pre_feedforward_layernorm") is None:
        yield Place(f"{name}.gate_proj", norm, inputs)
    down = _linears(mlp, "down_proj")
    if down is not None and down[0].in_features == inputs[1].out_features:
        yield Place(f"{name}.down_proj", _writers(inputs[1]), down)


def _linears(module: nn.Module, *names: str) -> tuple[nn.Linear, ...] | None:
    found = [getattr(module, name, None) for name in names]
    return tuple(found) if all(type(layer) is nn.Linear for layer in found) else None


def _weight(layer: nn.Module, name: str) -> tuple[nn.Parameter] | None:
    """The weight of a norm, where that is what its output is multiplied by: Gemma adds 1 to it first."""
    norm = getattr(layer, name, None)
    weight = getattr(norm, "weight", None)
    if not isinstance(weight, nn.Parameter):
        return None
    x = torch.linspace(-1, 2, len(weight), dtype=weight.dtype, device=weight.device)
    with torch.no_grad():
        once = norm(x)
        weight.mul_(2)
        twice = norm(x)
        weight.div_(2)
    return (weight,) if torch.equal(twice, 2 * once) else None


def _writers(layer: nn.Linear) -> tuple[nn.Parameter, ...]:
    return (layer.weight,) if layer.bias is None else (layer.weight, layer.bias)
