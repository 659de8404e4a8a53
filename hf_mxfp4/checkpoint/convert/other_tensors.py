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
from ..io.tensor_names import FileNames
from ..io.writer import OtherTensor
from .sources import LayerSource
from .stored_weights import join_pieces, layer_shapes


_PORTION = 1 << 22


def stored_tensors(source: LayerSource) -> list[OtherTensor]:
    """Everything beside the quantized weights, as the files have it."""
    return [_copied(name, tensor) for name, tensor in source.rest.items()]


def model_tensors(source: LayerSource) -> list[OtherTensor]:
    """The same by the names of the model, as a model with packed experts is saved: experts that are not quantized are
    one tensor again."""
    return _renamed(source, source.names, to_files=False)


def all_model_tensors(source: LayerSource) -> list[OtherTensor]:
    """The same where no experts are quantized, too."""
    return _renamed(source, source.names or FileNames(source.model), to_files=False)


def file_tensors(source: LayerSource) -> list[OtherTensor]:
    """The same by the names that files of a plain model have: experts that are not quantized are one tensor each."""
    return _renamed(source, source.names, to_files=True)


def _renamed(source: LayerSource, names: FileNames | None, to_files: bool) -> list[OtherTensor]:
    if names is None:  # no experts are quantized: the names are those of a plain model already
        return stored_tensors(source)
    rest, renamed = dict(source.rest), []
    for name, other in names.whole.items():
        for found in {name, other} & rest.keys():
            renamed.append(_copied(other if to_files else name, rest.pop(found)))
    for name, shape in _unquantized(source.model, names, source.shapes.keys()).items():
        if name in rest:
            tensor = rest.pop(name)
            renamed += _split(tensor, shape) if to_files else [_copied(name, tensor)]
        elif all(piece.name in rest for piece in shape.pieces):
            pieces = [rest.pop(piece.name) for piece in shape.pieces]
            as_is = [_copied(piece.name, piece) for piece in pieces]
            renamed += as_is if to_files else [_joined(name, pieces[0].dtype, shape, source.folder)]
    return renamed + [_copied(name, tensor) for name, tensor in rest.items()]


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
