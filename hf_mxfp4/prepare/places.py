# SPDX-License-Identifier: Apache-2.0
"""Where a decoder lets scales move from activations into weights: behind its norms, between the value and the output
projection of attention, and between the up and the down projection of gated MLPs and experts.

What reads a norm is found by running the model: modules whose input is the very tensor that the norm gave. So routers,
shared experts and parallel blocks are found in any family. The others are found by what their layers are called.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..layers import TRAINABLE, MXFP4Experts
from ..model.plain_layers import experts_adapter, is_linear, is_plain_linear, linear_size, linear_weight
from ..model.structure import experts_layout, experts_unsupported_reason, projections


#: The kinds of places.
NORM = "norms"
VALUES = "values"
PRODUCTS = "products"
#: Names of the layer that reads the values of attention.
_OUTPUTS = ("o_proj", "out_proj", "dense")


@dataclass(frozen=True, eq=False)
class Place:
    """Activations between the tensors that write their channels and those that read them.

    Tensors are views of parameters with the channels last, ``[G, rows, channels]``. ``G`` is the number of experts
    whose channels have scales of their own, otherwise 1; tensors that all experts share have 1.

    Attributes:
        name: of the first layer that reads.
        kind: `NORM`, `VALUES` or `PRODUCTS` (of a gate and an up projection).
        layer: that layer; the experts, where their down projections are what reads.
        source: the module that writes, `None` where experts write and read.
        writers: what is divided by the scales: the first one's ``1 + w`` if ``adds_one``, as Gemma's norms have it.
        readers: what is multiplied.
        weights: those of the readers that are quantized, or would be.
        heads: for values of attention, how many the readers have, and how often one of the writer is repeated.
    """

    name: str
    kind: str
    layer: nn.Module
    source: nn.Module | None
    writers: tuple[torch.Tensor, ...]
    readers: tuple[torch.Tensor, ...]
    weights: tuple[torch.Tensor, ...]
    heads: tuple[int, int] = (1, 1)
    adds_one: bool = False

    @property
    def groups(self) -> int:
        """How many sets of scales there are: one, or one for each expert."""
        return self.writers[0].shape[0]

    @property
    def n_read(self) -> int:
        """How many channels readers have."""
        return self.readers[0].shape[-1]

    def written(self, per_reader: torch.Tensor) -> torch.Tensor:
        """Return means ``[G, channels]`` for the writers' channels of numbers for those of the readers."""
        heads, repeats = self.heads
        groups = per_reader.shape[0]
        return per_reader.view(groups, heads // repeats, repeats, -1).mean(2).flatten(1)

    def read(self, per_writer: torch.Tensor) -> torch.Tensor:
        """Return numbers of the writers' channels for each channel of the readers."""
        heads, repeats = self.heads
        groups = per_writer.shape[0]
        return per_writer.view(groups, heads // repeats, 1, -1).expand(-1, -1, repeats, -1).flatten(1)


def find_places(model: nn.Module, decoder: nn.Module, ids: torch.Tensor) -> list[Place]:
    """Return the places of a decoder, by kind, without those whose parameters are shared with other modules.

    Args:
        model: in full precision; of one with quantized layers, only places that one of them reads are returned.
        decoder: the part of ``model`` that takes token ids.
        ids: token ids ``[1, tokens]`` to run it on.
    """
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    names = {}
    for name, module in model.named_modules():
        if all(uses[id(parameter)] == 1 for parameter in module.parameters(recurse=False)):
            names[module] = name
    places = [
        *_behind_norms(names, _readers_of_norms(decoder, ids)),
        *_of_values(names, decoder),
        *_of_products(names, decoder),
    ]
    if any(isinstance(module, TRAINABLE) for module in names):
        return [place for place in places if isinstance(place.layer, TRAINABLE)]
    return places


# ---- norms ----------------------------------------------------------------------------------------------------------


def _readers_of_norms(decoder: nn.Module, ids: torch.Tensor) -> dict[nn.Module, list[nn.Module]]:
    """Run a decoder, and return the modules with weights of their own that read the output of each norm."""
    outputs: dict[int, tuple[nn.Module, torch.Tensor]] = {}  # which stay, so that no other tensor gets their address
    readers: dict[nn.Module, list[nn.Module]] = {}

    def note_output(norm: nn.Module, arguments: tuple, output: Any) -> None:
        if isinstance(output, torch.Tensor):
            outputs[output.data_ptr()] = norm, output

    def note_input(module: nn.Module, arguments: tuple, options: dict[str, Any]) -> None:
        tensors = [value for value in (*arguments, *options.values()) if isinstance(value, torch.Tensor)]
        if not tensors or tensors[0].data_ptr() not in outputs:
            return
        norm, output = outputs[tensors[0].data_ptr()]
        if output.numel() == tensors[0].numel():
            readers.setdefault(norm, []).append(module)

    handles = []
    for module in decoder.modules():
        if _norm_offset(module) is not None:
            handles.append(module.register_forward_hook(note_output))
        if _is_reader(module):
            handles.append(module.register_forward_pre_hook(note_input, with_kwargs=True))
    try:
        decoder(input_ids=ids, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return readers


def _is_reader(module: nn.Module) -> bool:
    """Return whether a module multiplies its input with a weight of its own, as far as its structure tells."""
    n_own = len(list(module.parameters(recurse=False)))
    return n_own > 0 and n_own == len(list(module.parameters()))


def _norm_offset(module: nn.Module) -> int | None:
    """Return what a norm adds to its weight before it multiplies with it, 0 or 1; `None` for any other module. Its
    outputs say which."""
    parameters = dict(module.named_parameters(recurse=False))
    weight = parameters.get("weight")
    if weight is None or weight.dim() != 1 or not parameters.keys() <= {"weight", "bias"} or any(module.children()):
        return None
    x = torch.linspace(-1, 2, len(weight), dtype=weight.dtype, device=weight.device)[None]
    zeros = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}

    def output(value: float) -> torch.Tensor:
        return torch.func.functional_call(module, {**zeros, "weight": torch.full_like(weight, value)}, x)

    try:
        once = output(1.0)
    except Exception:  # A module that needs more than one tensor, such as the gated norms of Qwen3-Next.
        return None
    for offset in (0, 1):
        # The factor is 1 + offset before, and now twice as large.
        if torch.equal(output(2.0 + offset), 2 * once):
            return offset
    return None


def _behind_norms(names: dict[nn.Module, str], readers: dict[nn.Module, list[nn.Module]]) -> Iterator[Place]:
    """Yield the places between norms and the modules that read them."""
    for norm, modules in readers.items():
        width = len(norm.weight)
        tensors = {module: _read_weight(module, width) for module in modules}
        layers = [module for module in tensors if _is_layer(module)]
        layers = [layer for layer in layers if isinstance(layer, TRAINABLE)] or layers
        is_known = all(tensor is not None for tensor in tensors.values()) and names.keys() >= {norm, *tensors}
        if not layers or not is_known:
            continue
        weights = tuple(tensors[layer] for layer in layers)
        writers = tuple(parameter.detach()[None, None] for parameter in norm.parameters(recurse=False))
        adds_one = _norm_offset(norm) == 1
        first = layers[0]
        yield Place(names[first], NORM, first, norm, writers, tuple(tensors.values()), weights, adds_one=adds_one)


def _read_weight(module: nn.Module, width: int) -> torch.Tensor | None:
    """Return the weight that a module multiplies ``width`` channels with, channels last; `None` without one."""
    if _is_experts(module):
        weight = _rows_first(module, projections(module)[0])
        return weight if weight.shape[-1] == width else None
    weight = linear_weight(module) if is_linear(module) else module._parameters.get("weight")
    # Of square ones of other classes the first axis could be that of the input.
    is_known = is_linear(module) or (weight is not None and weight.shape[0] != width)
    return weight.detach()[None] if is_known and weight.dim() == 2 and weight.shape[1] == width else None


# ---- values and products --------------------------------------------------------------------------------------------


def _of_values(names: dict[nn.Module, str], decoder: nn.Module) -> Iterator[Place]:
    """Yield the places between value and output projections of attention."""
    for module in decoder.modules():
        width = getattr(module, "head_dim", None)
        outputs = (_linear(module, name) for name in _OUTPUTS)
        output = next((layer for layer in outputs if layer is not None), None)
        if output is None or not isinstance(width, int):
            continue
        n_read = linear_size(output)[1]
        values = _linear(module, "v_proj")
        fused = _linear(module, "qkv_proj")
        if values is not None:
            n_written = linear_size(values)[0]
        elif fused is not None:  # queries, keys and values, one after the other
            values = fused
            n_written = (linear_size(fused)[0] - n_read) // 2
        else:
            continue
        heads = n_read // width
        kept = n_written // width
        if kept <= 0 or heads * width != n_read or kept * width != n_written or heads % kept:
            continue
        writers = _written_rows(values, slice(linear_size(values)[0] - n_written, None))
        if names.keys() >= {output, values}:
            yield _between(names, VALUES, output, values, writers, (heads, heads // kept))


def _of_products(names: dict[nn.Module, str], decoder: nn.Module) -> Iterator[Place]:
    """Yield the places between up and down projections of gated MLPs and experts."""
    for module in decoder.modules():
        if _is_experts(module):
            if module in names and experts_layout(module).has_gate and _is_linear_in_up(module):
                weight = (_rows_first(module, "down_proj"),)
                name = f"{names[module]}.down_proj"
                yield Place(name, PRODUCTS, module, None, _expert_writers(module), weight, weight)
            continue
        down = _linear(module, "down_proj")
        gate = _linear(module, "gate_proj")
        up = _linear(module, "up_proj")
        fused = _linear(module, "gate_up_proj")
        if down is None:
            continue
        if gate is not None and up is not None and linear_size(up)[0] == linear_size(down)[1]:
            source = up
            writers = _written_rows(up)
        elif fused is not None and linear_size(fused)[0] == 2 * linear_size(down)[1]:
            source = fused
            writers = _written_rows(fused, slice(linear_size(down)[1], None))
        else:
            continue
        if names.keys() >= {down, source}:
            yield _between(names, PRODUCTS, down, source, writers)


def _between(
    names: dict[nn.Module, str],
    kind: str,
    reader: nn.Linear,
    source: nn.Linear,
    writers: tuple[torch.Tensor, ...],
    heads: tuple[int, int] = (1, 1),
) -> Place:
    """Return the place between rows of one linear layer and another one."""
    weight = (linear_weight(reader).detach()[None],)
    return Place(names[reader], kind, reader, source, writers, weight, weight, heads)


def _linear(module: nn.Module, name: str) -> nn.Linear | None:
    layer = getattr(module, name, None)
    return layer if _is_layer(layer) and is_linear(layer) else None


def _is_layer(module: Any) -> bool:
    """Return whether a module is a plain or trainable linear layer, or fused experts."""
    if not isinstance(module, nn.Module):
        return False
    return is_plain_linear(module) or isinstance(module, TRAINABLE) or _is_experts(module)


def _written_rows(layer: nn.Linear, rows: slice = slice(None)) -> tuple[torch.Tensor, ...]:
    weight = linear_weight(layer).detach()[rows].T[None]
    return (weight,) if layer.bias is None else (weight, layer.bias.detach()[rows][None, None])


# ---- experts --------------------------------------------------------------------------------------------------------


def _is_experts(module: nn.Module) -> bool:
    """Return whether a module is fused experts that can be quantized, plain or trainable."""
    if isinstance(module, MXFP4Experts):
        return True
    return experts_adapter(module) is not None and experts_unsupported_reason(module) is None


def _rows_first(experts: nn.Module, projection: str) -> torch.Tensor:
    """Return a weight as ``[experts, N, K]``, the same memory."""
    weight = getattr(experts, projection).detach()
    return weight.transpose(1, 2) if experts_layout(experts).is_transposed else weight


def _up_rows(experts: nn.Module) -> slice:
    size = _rows_first(experts, "down_proj").shape[-1]
    return slice(size, None) if experts_layout(experts).is_concatenated else slice(1, None, 2)


def _expert_writers(experts: nn.Module) -> tuple[torch.Tensor, ...]:
    """Return the rows of up projections, and their biases, that write what down projections read."""
    rows = _up_rows(experts)
    weight = _rows_first(experts, "gate_up_proj")[:, rows].transpose(1, 2)
    return (
        (weight, experts.gate_up_proj_bias.detach()[:, None, rows]) if experts_layout(experts).has_bias else (weight,)
    )


def _is_linear_in_up(experts: nn.Module) -> bool:
    """Return whether doubled outputs of the up projection double the product, whatever their size: not so in gpt-oss,
    which cuts them and adds 1."""
    weight = experts.down_proj
    size = _rows_first(experts, "down_proj").shape[-1]
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(4, 2 * size, generator=generator) * 64).to(weight.device, weight.dtype)
    doubled = x.clone()
    doubled[:, _up_rows(experts)] *= 2
    adapter = experts_adapter(experts)
    return torch.equal(adapter.activate(experts, doubled), 2 * adapter.activate(experts, x))
