# SPDX-License-Identifier: Apache-2.0
"""The weights of a model that are quantized, and the tensors of files that they are in."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import nn

from ..config import MXFP4RLConfig
from ..gemm import PACKED_FIELDS, packed_shapes
from ..model_structure import projections, weight_size
from ..module_names import find_layers
from ..numerics import QuantScheme
from .folder import CheckpointError
from .tensor_names import FileNames, Piece
from .tensors import NewTensor


@dataclass(frozen=True)
class LayerShape:
    """The logical weight ``[out_features, in_features]`` of a linear layer, or those of as many experts.

    Attributes:
        experts: how many there are in a fused weight; `None` for a linear layer.
        transposed: the model has ``[experts, in_features, out_features]``.
        pieces: the tensors that plain checkpoints have in place of a fused weight; empty if it is one tensor there too.
    """

    out_features: int
    in_features: int
    experts: int | None = None
    transposed: bool = False
    pieces: tuple[Piece, ...] = ()

    @property
    def matrices(self) -> Iterable[int | None]:
        """The experts, or `None` for the one matrix of a linear layer."""
        return (None,) if self.experts is None else range(self.experts)

    @property
    def n_matrices(self) -> int:
        return 1 if self.experts is None else self.experts

    @property
    def n_weights(self) -> int:
        """The number of elements of all matrices."""
        return self.n_matrices * self.out_features * self.in_features

    @property
    def leading(self) -> tuple[int, ...]:
        """The axes before those of a matrix."""
        return () if self.experts is None else (self.experts,)

    @cached_property
    def _pieces_by_expert(self) -> dict[int, list[Piece]]:
        found: dict[int, list[Piece]] = {}
        for piece in self.pieces:
            found.setdefault(piece.expert, []).append(piece)
        return found

    def pieces_of(self, expert: int) -> list[Piece]:
        return self._pieces_by_expert.get(expert, [])

    def full_shape(self) -> tuple[int, ...]:
        """Return the shape of the weight in the model."""
        matrix = (self.out_features, self.in_features)
        return (*self.leading, *(matrix[::-1] if self.transposed else matrix))

    def meta(self, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Return the weight ``[N, K]`` or ``[experts, N, K]`` on the meta device."""
        return torch.empty(*self.leading, self.out_features, self.in_features, dtype=dtype, device="meta")

    def meta_packed(self, scheme: QuantScheme) -> dict[str, torch.Tensor]:
        """Return the packed fields of the weight on the meta device."""
        shapes = packed_shapes(self.out_features, self.in_features, scheme)
        return {
            field: torch.empty(*self.leading, *shape, dtype=torch.uint8, device="meta")
            for field, shape in shapes.items()
        }


class NewLayer:
    """The tensors that the weight of one layer becomes in new files.

    Args:
        specs: the tensors on the meta device, by name.
        make: makes all of them. Called when the first is written.
    """

    def __init__(self, specs: Mapping[str, torch.Tensor], make: Callable[[], Mapping[str, torch.Tensor]]):
        self._make = make
        self._made: dict[str, torch.Tensor] = {}
        self.tensors = [
            NewTensor(name, spec.dtype, tuple(spec.shape), partial(self._take, name)) for name, spec in specs.items()
        ]

    def _take(self, name: str) -> torch.Tensor:
        self._made = self._made or dict(self._make())
        return self._made.pop(name)


def quantizable_layers(model: nn.Module, config: MXFP4RLConfig) -> dict[str, nn.Module]:
    """Return linear layers and experts to be quantized; one that is in several places under its first name.

    Raises [`CheckpointError`] as [`find_layers`] raises `ValueError`.
    """
    try:
        layers = find_layers(model, config.modules_to_not_convert or ())[0]
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    first: dict[int, str] = {}
    return {name: layer for name, layer in layers.items() if first.setdefault(id(layer), name) == name}


def layer_shapes(layers: Mapping[str, nn.Module], names: FileNames) -> dict[str, LayerShape]:
    """Return the weights of linear layers by the layers' names, the fused ones of experts by their own."""
    shapes: dict[str, LayerShape] = {}
    for name, layer in layers.items():
        if isinstance(layer, nn.Linear):
            shapes[name] = LayerShape(layer.out_features, layer.in_features)
            continue
        for projection in projections(layer):
            experts, rows, columns = weight_size(layer, projection)
            weight = f"{name}.{projection}"
            shapes[weight] = LayerShape(rows, columns, experts, layer.is_transposed, names.pieces.get(weight, ()))
    return shapes


def plain_tensors(name: str, shape: LayerShape, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the tensors that plain files have for a weight ``[N, K]`` or ``[experts, N, K]`` called ``name`` there."""
    if shape.experts is None:
        return {f"{name}.weight": weight}
    if shape.pieces:
        return {piece.name: weight[piece.expert, piece.rows] for piece in shape.pieces}
    return {name: weight.mT if shape.transposed else weight}


def packed_tensors(name: str, shape: LayerShape, packed: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors that our own packed files have for the packed fields of a weight."""
    base = f"{name}.weight" if shape.experts is None else name
    return {f"{base}{field.removeprefix('weight')}": packed[field] for field in PACKED_FIELDS if field in packed}


def stack_packed(shape: LayerShape, packed: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return the packed fields of a weight from those of its matrices."""
    if shape.experts is None:
        return dict(packed[0])
    return {field: torch.stack([part[field] for part in packed]) for field in packed[0]}
