# SPDX-License-Identifier: Apache-2.0
"""Convert weights on their way into vLLM, from disk or pushed by a trainer, into what their layer keeps: packed layers
codes and scales, dense ones values.

A weight is converted whole, before vLLM splits it by columns or joins it with others. vLLM's loaders know 16-bit
experts only, so packed tensors of experts are written here, in place.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ...config import MXFP4RLConfig
from ...numerics import BLOCK_SIZE, QuantScheme
from ...ops import (
    PACKED_FIELDS,
    PACKED_SUFFIXES,
    check_packed,
    dequantize,
    packed_shapes,
    packed_tensor,
    quantize_weight,
)
from .settings import EngineSettings


Weights = Iterable[tuple[str, torch.Tensor]]

_LINEAR = re.compile(rf"(.*)\.({'|'.join(PACKED_FIELDS)})$")
_ADAPTER = re.compile(r"(.*)\.lora_[AB]\.weight$")
#: A tensor of fused experts: whose, which projection, and which part of the packed weight.
_FUSED_EXPERTS = re.compile(rf"(.*experts)\.(gate_up_proj|down_proj)({'|'.join(PACKED_SUFFIXES)})$")
#: The full-precision weight of one expert: whose, its number, and what vLLM calls its projection.
_ONE_EXPERT = re.compile(r"(.*experts)\.(\d+)\.(\w+)\.weight$")

#: An attribute of tensors that were made here: models hand weights on to their parts through another converter.
_DONE = "mxfp4_is_converted"
#: What vLLM calls the weights of a projection.
VLLM_NAMES = {"gate_up_proj": "w13", "down_proj": "w2"}


@dataclass
class ExpertsTarget:
    """Experts that vLLM has made, for what converts their weights.

    Attributes:
        sizes: ``(N, K)`` of one expert's weight, the whole one, by projection.
        n_experts, experts: how many the model has, and the numbers of those in this process, in their order.
        rank, size: which of how many shares of each expert this process has.
        is_interleaved: whether rows of gate and up alternate; otherwise all of gate come first.
        layer: whose packed parameters are filled; `None` when dequantized weights go on to vLLM's own loaders.
        parts: packed tensors of a projection that wait for the rest, to be dequantized.
        halves: gate and up of single experts that wait for each other: rows are quantized together.
        loaded: which tensors came, by projection, or experts of it, by number.
    """

    name: str
    scheme: QuantScheme
    sizes: dict[str, tuple[int, int]]
    n_experts: int
    experts: tuple[int, ...]
    rank: int = 0
    size: int = 1
    is_interleaved: bool = False
    layer: nn.Module | None = None
    parts: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    halves: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    loaded: dict[str, set[str | int]] = field(default_factory=lambda: {name: set() for name in VLLM_NAMES})

    @property
    def is_packed(self) -> bool:
        return self.layer is not None

    def shapes(self, projection: str) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the packed tensors of all experts of the model, by [`PACKED_FIELDS`]."""
        shapes = packed_shapes(*self.sizes[projection], self.scheme)
        return {name: (self.n_experts, *shape) for name, shape in shapes.items()}

    def own_sizes(self) -> dict[str, tuple[int, int]]:
        """Return ``(N, K)`` of one expert's weight in this process, by projection."""
        up_rows, up_columns = self.sizes["gate_up_proj"]
        down_rows, down_columns = self.sizes["down_proj"]
        return {
            "gate_up_proj": (up_rows // self.size, up_columns),
            "down_proj": (down_rows, down_columns // self.size),
        }

    def store(self, projection: str, part: str, whole: torch.Tensor) -> None:
        """Write one packed tensor ``[experts, N, ...]`` of all experts of the model."""
        if len(self.experts) < self.n_experts:
            whole = whole[list(self.experts)]
        self._copy(projection, part, slice(None), whole)
        self.loaded[projection].add(part)

    def store_expert(self, projection: str, expert: int, parts: dict[str, torch.Tensor]) -> None:
        """Write the packed tensors ``[N, ...]`` of one expert, one of this process's."""
        for part, whole in parts.items():
            self._copy(projection, part, self.experts.index(expert), whole)
        self.loaded[projection].add(expert)

    def _copy(self, projection: str, part: str, places: int | slice, whole: torch.Tensor) -> None:
        """Write this process's share of a packed tensor of one expert, or of all."""
        parameter = getattr(self.layer, parameter_name(projection, part))
        # Its loader, since vLLM's reloading puts another in its place, which waits until it has all of a layer.
        parameter.weight_loader(parameter, self._share(projection, whole), places)

    def _share(self, projection: str, whole: torch.Tensor) -> torch.Tensor:
        """Return this process's share of ``[..., N, columns]``, with two axes for rows of gate and up apart."""
        if self.size == 1:
            return whole
        if projection == "gate_up_proj" and not self.is_interleaved:
            whole = whole.unflatten(-2, (2, -1))
        axis = -1 if projection == "down_proj" else -2
        if axis == -1 and whole.shape[-1] == 1:  # one factor for a row is true of every part of it
            return whole
        length = whole.shape[axis] // self.size
        return whole.narrow(axis, self.rank * length, length)

    def missing(self, projection: str) -> list[str]:
        """Return the names of what is missing of a projection: tensors of all experts, or single experts."""
        loaded = self.loaded[projection]
        absent = [expert for expert in self.experts if expert not in loaded]
        if absent and len(absent) < len(self.experts):
            return [f"{self.name}.{expert}.{projection}" for expert in absent]
        found = loaded | self.parts.get(projection, {}).keys()
        names = [name for name in self.shapes(projection) if absent and name not in found]
        return [f"{self.name}.{projection}{name.removeprefix('weight')}" for name in names]


def write(layer: nn.Module, param: torch.Tensor, loaded_weight: torch.Tensor, places: Any = None, **_: Any) -> None:
    """Load a share of one expert, or of all. Raises `RuntimeError` when vLLM calls it, with other arguments."""
    if places is None:
        raise RuntimeError(
            "vLLM loads a weight of packed experts past the plugin, which cannot read it; use "
            'quantization_config["vllm"] = {"weights": "dense"} in config.json'
        )
    param.data[places].view(loaded_weight.shape).copy_(loaded_weight)


def parameter_name(projection: str, part: str) -> str:
    """Return what the layer inside vLLM calls a tensor of a projection, such as one of [`PACKED_FIELDS`]."""
    return f"{VLLM_NAMES[projection]}_{part}"


@dataclass
class ExpectedLayers:
    """Layers that vLLM has made, and what was loaded into them.

    Attributes:
        linears: names of quantized linear layers as in checkpoints, before vLLM joined them.
        experts: quantized experts, by the names that vLLM has for them.
        projection_names: what vLLM calls gate, up and down of one expert.
        is_transposed: whether vLLM reads experts as gpt-oss has them, fused and ``[experts, K, N]``.
        has_old_names: whether vLLM's modules are called ``block_sparse_moe``, which transformers calls ``mlp``.
        pending: tensors of packed weights of which others are still to come, by the weight's name.
        loaded: the packed tensors of ``linears`` that came, or were made of what came.
        is_loaded: whether the checkpoint was read, so that what comes now is pushed by a trainer.
    """

    settings: EngineSettings = EngineSettings()
    linears: set[str] = field(default_factory=set)
    experts: dict[str, ExpertsTarget] = field(default_factory=dict)
    projection_names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    is_transposed: bool = False
    has_old_names: bool = False
    device: torch.device | None = None
    dtype: torch.dtype | None = None
    pending: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    loaded: set[str] = field(default_factory=set)
    is_loaded: bool = False

    @property
    def is_packed(self) -> bool:
        """Return whether codes and scales are kept."""
        return self.settings.weights == "packed"

    def linear(self, name: str) -> str | None:
        """Return the one of ``linears`` that ``name`` stands for; `None` for none, and for more than one."""
        return _called(name, self.linears)

    def experts_called(self, name: str) -> ExpertsTarget | None:
        """Return the experts that ``name`` stands for."""
        return self.experts.get(_called(name, self.experts))

    def check_linear(self, parts: list[str], scheme: QuantScheme) -> None:
        """Raise `ValueError` unless the checkpoint that vLLM has read had all tensors of the layers ``parts``."""
        self.is_loaded = True
        names = [f"{part}.{name}" for part in parts for name in packed_shapes(1, BLOCK_SIZE, scheme)]
        check_complete([name for name in names if name not in self.loaded])


def check_complete(missing: list[str]) -> None:
    """Raise `ValueError` for tensors that were not loaded."""
    if missing:
        raise ValueError(
            f"{', '.join(missing)}: in no file of the checkpoint, where the scheme in config.json needs it, or vLLM "
            "loads this model's weights past the plugin; then export it with hf-mxfp4 export --format bf16"
        )


def _called(name: str, names: Iterable[str]) -> str | None:
    """Return the same name, or the only longer or shorter one: models give weights to their parts by shorter names."""
    if name in names:
        return name
    matches = [known for known in names if known.endswith(f".{name}") or name.endswith(f".{known}")]
    if len(matches) == 1:
        return matches[0]
    return None


class WeightConverter:
    """Converts what a checkpoint of ``scheme`` stores into what vLLM's layers compute with. Raises `ValueError` for
    packed tensors of other shapes than the scheme's, and for adapters without room."""

    def __init__(self, scheme: MXFP4RLConfig, expected: ExpectedLayers):
        self.scheme = scheme
        self.expected = expected

    def __call__(self, weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            if self.expected.has_old_names:
                name = name.replace(".mlp.", ".block_sparse_moe.")
            converted = None
            if not getattr(tensor, _DONE, False):
                converted = self._convert(name, tensor)
            if converted is None:
                yield name, tensor
            else:
                yield from converted

    def _convert(self, name: str, tensor: torch.Tensor) -> Weights | None:
        """Return what to load in the place of ``tensor``, maybe nothing yet; `None` for what goes on as it is."""
        if adapter := _ADAPTER.match(name):
            is_quantized = self.expected.linear(adapter[1]) is not None
            if is_quantized and not self.expected.settings.adapter_rank:
                raise ValueError(
                    f"{name} was pushed, and vLLM has no room for adapters; set adapter_rank in the vllm settings of "
                    "the checkpoint, or push merged weights"
                )
            return None
        if fused := _FUSED_EXPERTS.match(name):
            owner, projection, suffix = fused.groups()
            return self._fused_experts(owner, projection, suffix, tensor)
        if expert := _ONE_EXPERT.match(name):
            owner, number, projection = expert.groups()
            target = self.expected.experts_called(owner)
            if target is not None:
                if not self._quantizes:
                    return None
                return self._one_expert(target, owner, int(number), projection, tensor)
        if linear := _LINEAR.match(name):
            name, part = linear.groups()
            checkpoint_name = self.expected.linear(name)
            if checkpoint_name is not None and tensor.dim() == 2:
                return self._linear(checkpoint_name, name, part, tensor)
        return None

    @property
    def _quantizes(self) -> bool:
        """Return whether full-precision weights that come now are quantized here. Those that a trainer pushes into
        dense layers are quantized already."""
        if self.expected.is_packed:
            return True
        return self.scheme.mode == "qat" and not self.expected.is_loaded

    def _pack(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the packed tensors of a full-precision weight ``[N, K]``."""
        scheme = self.scheme
        weight = self._on_device(weight.detach()).contiguous()
        return quantize_weight(weight, scheme.weight_scheme, scheme.backend, scheme.weight_rotation)

    def _values(self, packed: dict[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """Return the values ``[N, K]`` of a packed weight, rotated where the scheme rotates."""
        packed = {name: self._on_device(part) for name, part in packed.items()}
        n_columns = 2 * packed["weight"].shape[1]
        tensor = packed_tensor(packed, n_columns, self.scheme.weight_scheme, dtype)
        return dequantize(tensor, dtype, self.scheme.backend)

    def _on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor on the device of vLLM's model, if one is known."""
        if self.expected.device is None:
            return tensor
        return tensor.to(self.expected.device)

    @property
    def _dtype(self) -> torch.dtype:
        """The dtype of vLLM's model."""
        return self.expected.dtype or torch.get_default_dtype()

    # ---- linear layers ----------------------------------------------------------------------------------------------

    def _linear(self, owner: str, name: str, part: str, tensor: torch.Tensor) -> Weights | None:
        """Convert a tensor of a linear layer, which checkpoints call ``owner`` and vLLM's model here ``name``."""
        if tensor.dtype == torch.uint8:
            self.expected.loaded.add(f"{owner}.{part}")
            if self.expected.is_packed:
                return None
            return self._dequantized(owner, name, part, tensor)
        if part != "weight" or not tensor.is_floating_point() or not self._quantizes:
            return None
        packed = self._pack(tensor)
        self.expected.loaded.update(f"{owner}.{part}" for part in packed)
        if not self.expected.is_packed:
            packed = {"weight": self._values(packed, tensor.dtype)}
        return [(f"{name}.{part}", _done(value)) for part, value in packed.items()]

    def _dequantized(self, owner: str, name: str, part: str, tensor: torch.Tensor) -> Weights:
        """Return the values of a linear layer's weight when its last packed tensor comes; nothing before."""
        parts = self.expected.pending.setdefault(owner, {})
        scheme = self.scheme.weight_scheme
        parts[part] = tensor
        if not parts.keys() >= packed_shapes(1, BLOCK_SIZE, scheme).keys():
            return []
        del self.expected.pending[owner]
        shapes = packed_shapes(parts["weight"].shape[0], 2 * parts["weight"].shape[1], scheme)
        check_packed(name, {field: parts.get(field) for field in PACKED_FIELDS}, shapes, scheme)
        return [(f"{name}.weight", _done(self._values(parts, self._dtype)))]

    # ---- experts ----------------------------------------------------------------------------------------------------

    def _fused_experts(self, owner: str, projection: str, suffix: str, tensor: torch.Tensor) -> Weights | None:
        """Convert a tensor of all experts: a packed one, or a full-precision weight."""
        target = self.expected.experts_called(owner)
        is_transposed = self.expected.is_transposed
        if target is not None and tensor.dtype == torch.uint8:
            return self._codes(target, owner, projection, f"weight{suffix}", tensor)
        if tensor.dim() != 3 or not tensor.is_floating_point():
            return None
        if target is None or not self._quantizes:
            if is_transposed:
                return None
            return self._by_expert(owner, projection, tensor)
        weights = tensor.transpose(1, 2) if is_transposed else tensor  # each [N, K]
        if target.is_packed:
            for expert in target.experts:
                target.store_expert(projection, expert, self._pack(weights[expert]))
            return ()
        target.loaded[projection].update(target.experts)
        # One expert at a time: the values of all may not fit in memory.
        values = (self._values(self._pack(weight), weight.dtype) for weight in weights)
        return self._by_expert(owner, projection, values)

    def _codes(self, target: ExpertsTarget, owner: str, projection: str, part: str, tensor: torch.Tensor) -> Weights:
        """Convert a packed tensor of all experts; as values they go on when the last one has come."""
        check_packed(f"{target.name}.{projection}", {part: tensor}, target.shapes(projection), target.scheme)
        if target.is_packed:
            target.store(projection, part, tensor)
            return ()
        parts = target.parts.setdefault(projection, {})
        parts[part] = tensor
        if parts.keys() < target.shapes(projection).keys():
            return ()
        del target.parts[projection]
        target.loaded[projection].update(target.experts)

        def values() -> Iterator[torch.Tensor]:
            for expert in range(target.n_experts):
                packed = {name: part[expert] for name, part in parts.items()}
                yield self._values(packed, self._dtype)

        return self._by_expert(owner, projection, values())

    def _one_expert(self, target: ExpertsTarget, owner: str, expert: int, name: str, tensor: torch.Tensor) -> Weights:
        """Convert gate, up or down of an expert. Gate and up are quantized as the one weight that the policy has."""
        gate, up, down = self.expected.projection_names
        if target.is_packed and expert not in target.experts:
            return ()
        projection = "down_proj" if name == down else "gate_up_proj"
        if projection == "gate_up_proj":
            halves = target.halves.setdefault(expert, {})
            halves[name] = tensor
            if len(halves) < 2:
                return ()
            tensor = torch.cat([halves[gate], halves[up]])
            del target.halves[expert]
        packed = self._pack(tensor)
        if target.is_packed:
            target.store_expert(projection, expert, packed)
            return ()
        target.loaded[projection].add(expert)
        return self._of_one(owner, projection, expert, self._values(packed, tensor.dtype))

    def _by_expert(self, owner: str, projection: str, weights: Iterable[torch.Tensor]) -> Weights:
        """Name the values of all experts, each ``[N, K]``, as vLLM's own loaders read them."""
        if self.expected.is_transposed:
            yield f"{owner}.{projection}", _done(torch.stack([weight.t() for weight in weights]))
            return
        for expert, weight in enumerate(weights):
            yield from self._of_one(owner, projection, expert, weight)

    def _of_one(self, owner: str, projection: str, expert: int, weight: torch.Tensor) -> Weights:
        """Name the values of one expert; those of gate and up are two weights in vLLM."""
        gate, up, down = self.expected.projection_names
        if projection == "down_proj":
            return [(f"{owner}.{expert}.{down}.weight", _done(weight))]
        halves = zip((gate, up), weight.chunk(2), strict=True)
        return [(f"{owner}.{expert}.{name}.weight", _done(half)) for name, half in halves]


def _done(tensor: torch.Tensor) -> torch.Tensor:
    """Mark a tensor as converted, and return it."""
    setattr(tensor, _DONE, True)
    return tensor
