# SPDX-License-Identifier: Apache-2.0
"""What a conversion does not quantize: tensors on their way into new files, under other names if need be."""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from ...experts_layout import unsupported_reason
from ..formats import LayerShape
from ..io.folder import CheckpointFolder
from ..io.reader import StoredTensor, read_rows
from ..io.tensor_names import FileNames, unknown_layout
from ..io.writer import OtherTensor
from .sources import LayerSource
from .stored_weights import join_pieces, layer_shapes


_PORTION = 1 << 22


def packed_model_tensors(source: LayerSource) -> list[OtherTensor]:
    """Everything but the quantized weights, by the names that `save_pretrained` of the packed model gives. Experts that
    are not quantized are one tensor."""
    return model_tensors(source) if source.has_experts else _stored(source)


def plain_model_tensors(source: LayerSource) -> list[OtherTensor]:
    """The same by the names of a plain model's files. Experts that are not quantized are as many tensors as there."""
    return _renamed(source, to_files=True) if source.has_experts else _stored(source)


def model_tensors(source: LayerSource) -> list[OtherTensor]:
    """The same by the names that the model has in memory."""
    return _renamed(source, to_files=False)


def _stored(source: LayerSource) -> list[OtherTensor]:
    return [_copied(name, tensor) for name, tensor in source.rest.items()]


def _renamed(source: LayerSource, to_files: bool) -> list[OtherTensor]:
    names, rest, renamed = source.names, dict(source.rest), []
    for name, shape in _unquantized(source.model, names, source.shapes.keys()).items():
        if (stored := names.stored.get(name, name)) in rest:
            tensor = rest.pop(stored)
            renamed += _split(tensor, shape) if to_files else [_copied(name, tensor)]
        elif all(piece.name in rest for piece in shape.pieces):
            pieces = [rest.pop(piece.name) for piece in shape.pieces]
            as_is = [_copied(piece.name, piece) for piece in pieces]
            renamed += as_is if to_files else [_joined(name, pieces[0].dtype, shape, source.folder)]
    for stored, tensor in rest.items():
        if not to_files and stored in names.converted:
            raise unknown_layout(source.model, names.converted[stored])
        name = names.places.get(stored, stored)
        renamed.append(_copied(names.whole.get(name, stored) if to_files else name, tensor))
    return renamed


def _unquantized(model: nn.Module, names: FileNames, quantized: set[str]) -> dict[str, LayerShape]:
    """The fused weights of experts that are several tensors in files and are not quantized."""
    owners = {name.rpartition(".")[0] for name in names.pieces.keys() - quantized}
    layers = {name: model.get_submodule(name) for name in sorted(owners)}
    return layer_shapes({name: layer for name, layer in layers.items() if unsupported_reason(layer) is None}, names)


def _copied(name: str, tensor: StoredTensor) -> OtherTensor:
    def parts() -> Iterator[torch.Tensor]:
        if not tensor.shape:
            yield read_rows(replace(tensor, shape=(1,)), 0, 1)[0]
            return
        step = max(1, _PORTION // max(1, math.prod(tensor.shape[1:])))
        for start in range(0, tensor.shape[0], step):
            yield tensor.rows(start, min(start + step, tensor.shape[0]))

    return OtherTensor(name, tensor.dtype, tensor.shape, tensor.nbytes, parts)


def _split(tensor: StoredTensor, shape: LayerShape) -> list[OtherTensor]:
    def part(expert: int, rows: slice) -> Iterator[torch.Tensor]:
        yield read_rows(tensor, expert, expert + 1)[0][rows]

    tensors = []
    for piece in shape.pieces:
        size = (shape.n_rows(piece), shape.in_features)
        nbytes = math.prod(size) * tensor.dtype.itemsize
        tensors.append(OtherTensor(piece.name, tensor.dtype, size, nbytes, partial(part, piece.expert, piece.rows)))
    return tensors


def _joined(name: str, dtype: torch.dtype, shape: LayerShape, folder: CheckpointFolder) -> OtherTensor:
    def parts() -> Iterator[torch.Tensor]:
        return (join_pieces(folder, shape, expert)[None] for expert in shape.matrices)

    size = shape.full_shape()
    return OtherTensor(name, dtype, size, math.prod(size) * dtype.itemsize, parts)
