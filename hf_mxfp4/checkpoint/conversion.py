# SPDX-License-Identifier: Apache-2.0
"""The way from a source to a new checkpoint folder that packing, export and import share: one layer in memory."""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ..config import MXFP4RLConfig
from ..ops.packed import packed_shapes
from .atomic import FolderError, atomic_folder
from .costs import ConversionReport, LayerCost
from .folder import write_json
from .formats import LayerShape
from .sources import LayerSource, packed_names
from .stream import StoredTensor, read_rows
from .writer import MAX_SHARD_SIZE, ShardWriter, TensorSpec


#: Told of bytes that are done, with the name of the layer or tensor they belong to.
OnBytes = Callable[[int, str], None]
Parts = Iterator[torch.Tensor]

_CAST_ELEMENTS = 1 << 22


class LayerWriter(ABC):
    """What one layer's weight becomes."""

    #: Tensors that are written for it.
    specs: dict[str, TensorSpec]

    @abstractmethod
    def write(self, writer: ShardWriter) -> LayerCost:
        """Write the tensors of [`specs`]."""


class KeptLayer(LayerWriter):
    """Our own packed tensors, as a source has them."""

    def __init__(self, source: LayerSource, layer: str):
        self.source, self.layer = source, layer
        self.specs = packed_specs(layer, source.shapes[layer], source.config)

    def write(self, writer: ShardWriter) -> LayerCost:
        for field, tensor in self.source.read(self.layer).items():
            writer.write(f"{self.layer}.{field}", tensor)
        return LayerCost(self.layer, "kept")


def packed_specs(layer: str, shape: LayerShape, config: MXFP4RLConfig) -> dict[str, TensorSpec]:
    """The tensors of a layer in our own packed checkpoints."""
    shapes = packed_shapes(shape.out_features, shape.in_features, config.weight_scheme)
    return {name: TensorSpec(torch.uint8, shapes[field]) for field, name in packed_names(layer, config).items()}


def convert(
    source: LayerSource,
    out: str | os.PathLike,
    layers: dict[str, LayerWriter],
    config: dict[str, Any],
    report: ConversionReport,
    *,
    cast: torch.dtype | None = None,
    overwrite: bool = False,
    max_shard_size: int | str = MAX_SHARD_SIZE,
    on_bytes: OnBytes = lambda count, name: None,
    report_file: str | None = None,
    metadata: Mapping[str, str] | None = None,
    final_metadata: Callable[[], Mapping[str, str]] | None = None,
) -> ConversionReport:
    """Write a checkpoint: every layer as ``layers`` says, all other tensors as they are, ``config`` as `config.json`.

    Args:
        cast: other tensors of this dtype are converted to bfloat16.
        report: gets the layers' costs, and is returned.
        report_file: name of a file in the new folder that the report is written to.
        metadata: for the headers of the files.
        final_metadata: takes its place when all is written; it must not be longer.

    Raises `FolderError` when ``out`` cannot be written, and `ShardError` when the source cannot be read.
    """
    target = Path(out).expanduser().resolve()
    origin = source.folder.path.resolve()
    if target == origin or origin in target.parents or target in origin.parents:
        raise FolderError(f"{target} and the checkpoint {origin} must be folders apart")
    with atomic_folder(target, overwrite=overwrite) as folder:
        with ShardWriter(folder, _ordered_specs(source, layers, cast), max_shard_size, metadata) as writer:
            for layer, layer_writer in layers.items():
                report.layers.append(layer_writer.write(writer))
                on_bytes(source.bytes_of(layer), layer)
            for name, tensor in source.rest.items():
                dtype = _target_dtype(tensor, cast)
                if dtype == tensor.dtype:
                    writer.copy(name, tensor)
                else:
                    writer.write_parts(name, _cast_parts(tensor, dtype))
                on_bytes(tensor.nbytes, name)
            if final_metadata is not None:
                writer.metadata = dict(final_metadata())
        write_json(folder / "config.json", config)
        source.folder.copy_side_files(folder)
        if report_file is not None:
            write_json(folder / report_file, report.to_dict())
    return report


def _ordered_specs(
    source: LayerSource, layers: dict[str, LayerWriter], cast: torch.dtype | None
) -> dict[str, TensorSpec]:
    """By name, layers as numbers, as `save_pretrained` splits shards."""
    specs = {name: TensorSpec(_target_dtype(tensor, cast), tensor.shape) for name, tensor in source.rest.items()}
    for layer in layers.values():
        specs.update(layer.specs)
    return {name: specs[name] for name in sorted(specs, key=_natural_order)}


def _natural_order(name: str) -> list[tuple[int, int, str]]:
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in name.split(".")]


def _target_dtype(tensor: StoredTensor, cast: torch.dtype | None) -> torch.dtype:
    return torch.bfloat16 if tensor.dtype == cast else tensor.dtype


def _cast_parts(tensor: StoredTensor, dtype: torch.dtype) -> Parts:
    count = tensor.nbytes // tensor.dtype.itemsize
    flat = StoredTensor(tensor.name, tensor.file, tensor.dtype, (count,), tensor.offset)
    for start in range(0, count, _CAST_ELEMENTS):
        yield read_rows(flat, start, min(start + _CAST_ELEMENTS, count)).to(dtype)
