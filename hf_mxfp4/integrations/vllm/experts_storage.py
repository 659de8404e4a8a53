# SPDX-License-Identifier: Apache-2.0
"""Experts that vLLM has made: what was loaded for them, and their packed weights, filled in place from whole ones.

vLLM's loaders know 16-bit experts, and those of gpt-oss in an order of their own. So packed tensors do not go through
them: they are written here, the share of this process and no more, into memory that never moves.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ...gemm import PACKED_FIELDS, check_packed, packed_shapes
from ...numerics import QuantScheme


#: What vLLM calls the weights of a projection.
VLLM_NAMES = {"gate_up_proj": "w13", "down_proj": "w2"}


@dataclass
class ExpertsTarget:
    """Experts that vLLM has made, for what converts their weights.

    Attributes:
        name: as vLLM has it.
        scheme: of the weights.
        sizes: ``(N, K)`` of one expert's weight, the whole one, by projection.
        n_experts: how many the model has.
        experts: the numbers of those in this process, in the order of their places.
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

    def _share(self, projection: str, whole: torch.Tensor) -> torch.Tensor:
        """Return the share of a tensor ``[..., N, columns]`` of a projection, ``[..., n, columns]`` or, where gate and
        up are cut by themselves, ``[..., 2, n / 2, columns]``."""
        if self.size == 1:
            return whole
        if projection == "gate_up_proj" and not self.is_interleaved:
            whole = whole.unflatten(-2, (2, -1))
        axis = -1 if projection == "down_proj" else -2
        if axis == -1 and whole.shape[-1] == 1:  # one factor for a row is true of every part of it
            return whole
        length = whole.shape[axis] // self.size
        return whole.narrow(axis, self.rank * length, length)

    @property
    def is_packed(self) -> bool:
        return self.layer is not None

    def shapes(self, projection: str) -> dict[str, tuple[int, int, int]]:
        """Return the shapes of the packed tensors of all experts of the model, the whole ones, by [`PACKED_FIELDS`]."""
        shapes = packed_shapes(*self.sizes[projection], self.scheme)
        return {name: (self.n_experts, *shape) for name, shape in shapes.items()}

    def own_sizes(self) -> dict[str, tuple[int, int]]:
        """Return ``(N, K)`` of one expert's weight in this process, by projection."""
        (up_rows, hidden), (out, columns) = (self.sizes[projection] for projection in VLLM_NAMES)
        return {"gate_up_proj": (up_rows // self.size, hidden), "down_proj": (out, columns // self.size)}

    def check(self, projection: str, parts: dict[str, torch.Tensor]) -> None:
        """Raise `ValueError` unless ``parts``, of all experts, are of the shapes that the scheme says."""
        check_packed(f"{self.name}.{projection}", parts, self.shapes(projection), self.scheme)

    def store(self, projection: str, part: str, whole: torch.Tensor) -> None:
        """Write one packed tensor ``[experts, N, ...]`` of all experts of the model."""
        self.check(projection, {part: whole})
        rows = whole if len(self.experts) == self.n_experts else whole[list(self.experts)]
        self._copy(projection, part, slice(None), rows)
        self.loaded[projection].add(part)

    def store_expert(self, projection: str, expert: int, parts: dict[str, torch.Tensor]) -> None:
        """Write the packed tensors ``[N, ...]`` of one expert, one of this process's."""
        for part, whole in parts.items():
            self._copy(projection, part, self.experts.index(expert), whole)
        self.loaded[projection].add(expert)

    def _copy(self, projection: str, part: str, places: int | slice, whole: torch.Tensor) -> None:
        parameter = getattr(self.layer, parameter_name(projection, part))
        # Its loader, since vLLM's reloading puts another in its place, which waits until it has all of a layer.
        parameter.weight_loader(parameter, self._share(projection, whole), places)

    def missing(self, projection: str) -> list[str]:
        """Return what is missing of a projection, as checkpoints call it: tensors of all experts, or single experts."""
        loaded = self.loaded[projection]
        absent = [expert for expert in self.experts if expert not in loaded]
        if absent and len(absent) < len(self.experts):
            return [f"{self.name}.{expert}.{projection}" for expert in absent]
        found = loaded | self.parts.get(projection, {}).keys()
        names = [name for name in self.shapes(projection) if absent and name not in found]
        return [f"{self.name}.{projection}{name.removeprefix('weight')}" for name in names]


def write(layer: nn.Module, param: torch.Tensor, loaded_weight: torch.Tensor, places: Any = None, **_: Any) -> None:
    """Write this process's share of one expert, or of all, to its place: the loader of packed parameters, a method of
    their layer as vLLM's are. Raises `RuntimeError` when vLLM calls it, with other arguments."""
    if places is None:
        raise RuntimeError(
            "vLLM loads a weight of packed experts past the plugin, which cannot read it; use "
            'quantization_config["vllm"] = {"weights": "dense"} in config.json'
        )
    param.data[places].view(loaded_weight.shape).copy_(loaded_weight)


def parameter_name(projection: str, part: str) -> str:
    """Return what the layer inside vLLM calls a packed tensor, one of [`PACKED_FIELDS`], of a projection."""
    return f"{VLLM_NAMES[projection]}_{part}"


def packed_parameters(layer: nn.Module, projection: str) -> list[torch.Tensor]:
    """Return the packed tensors that the layer has of a projection, in the order of [`PACKED_FIELDS`]."""
    found = (getattr(layer, parameter_name(projection, part), None) for part in PACKED_FIELDS)
    return [parameter for parameter in found if parameter is not None]
