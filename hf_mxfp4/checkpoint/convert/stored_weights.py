# SPDX-License-Identifier: Apache-2.0
"""The weights of a model that are quantized, and the tensors of files that they are in, one matrix at a time."""

from collections.abc import Mapping

import torch
from torch import nn

from ...config import MXFP4RLConfig
from ...experts_layout import projections, weight_size
from ...gemm import PACKED_FIELDS, packed_shapes
from ...module_names import find_layers
from ..formats import LayerShape
from ..io.folder import CheckpointError, CheckpointFolder
from ..io.reader import StoredTensor, read_rows
from ..io.tensor_names import FileNames
from ..io.writer import TensorSpec


def quantizable_layers(model: nn.Module, config: MXFP4RLConfig) -> dict[str, nn.Module]:
    """Linear layers and experts to be quantized; one that stands in several places under the first, as files have it.

    Raises [`CheckpointError`] as [`find_layers`] raises `ValueError`.
    """
    try:
        layers = find_layers(model, config.modules_to_not_convert or ())[0]
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    first: dict[int, str] = {}
    return {name: layer for name, layer in layers.items() if first.setdefault(id(layer), name) == name}


def layer_shapes(layers: Mapping[str, nn.Module], names: FileNames) -> dict[str, LayerShape]:
    """The weights of linear layers by the layers' names, the fused ones of experts by their own."""
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


def read_tensor(tensor: StoredTensor, index: int | None = None) -> torch.Tensor:
    """A stored tensor, or one slice of its first axis. Raises `ShardError`."""
    if index is None:
        return read_rows(tensor, 0, tensor.shape[0])
    return read_rows(tensor, index, index + 1)[0]


def join_pieces(folder: CheckpointFolder, shape: LayerShape, expert: int) -> torch.Tensor:
    """An expert's matrix ``[N, K]`` from the tensors that hold its rows. Raises `ShardError`."""
    pieces = shape.pieces_of(expert)
    dtype = folder.tensors[pieces[0].name].dtype
    whole = torch.empty(shape.out_features, shape.in_features, dtype=dtype)
    for piece in pieces:
        whole[piece.rows] = read_tensor(folder.tensors[piece.name])
    return whole


def packed_names(layer: str, shape: LayerShape, config: MXFP4RLConfig) -> dict[str, str]:
    """The fields that a weight has under a scheme, and their full names, in the order of [`PACKED_FIELDS`]."""
    present = packed_shapes(1, 1, config.weight_scheme)
    base = f"{layer}.weight" if shape.experts is None else layer
    return {field: f"{base}{field.removeprefix('weight')}" for field in PACKED_FIELDS if field in present}


def packed_specs(layer: str, shape: LayerShape, config: MXFP4RLConfig) -> dict[str, TensorSpec]:
    """The tensors of a weight in our own packed checkpoints."""
    shapes = packed_shapes(shape.out_features, shape.in_features, config.weight_scheme)
    first = () if shape.experts is None else (shape.experts,)
    names = packed_names(layer, shape, config)
    return {name: TensorSpec(torch.uint8, (*first, *shapes[field])) for field, name in names.items()}
