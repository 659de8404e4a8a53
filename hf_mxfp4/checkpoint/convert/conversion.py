# SPDX-License-Identifier: Apache-2.0
"""The way from a source to a new checkpoint folder that packing, export and import share: one layer in memory."""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...files import write_json
from ..io.atomic import FolderError, atomic_folder
from ..io.manifest import refuse_damage, weight_files, write_manifest
from ..io.writer import MAX_SHARD_SIZE, OtherTensor, ShardWriter, TensorSpec, TensorStream
from .costs import ConversionReport, LayerCost
from .sources import LayerSource
from .stored_weights import packed_names, packed_specs


#: Told of bytes that are done, with the name of the layer or tensor they belong to.
OnBytes = Callable[[int, str], None]


class LayerWriter(ABC):
    """What one layer's weight becomes."""

    #: Tensors that are written for it.
    specs: dict[str, TensorSpec]

    @abstractmethod
    def write(self, writer: TensorStream) -> LayerCost:
        """Write the tensors of [`specs`]."""


class KeptLayer(LayerWriter):
    """Our own packed tensors, as a source has them."""

    def __init__(self, source: LayerSource, layer: str):
        self.source, self.layer = source, layer
        self._name = source.in_packed_files(layer)
        self.specs = packed_specs(self._name, source.shapes[layer], source.config)

    def write(self, writer: TensorStream) -> LayerCost:
        shape = self.source.shapes[self.layer]
        names = packed_names(self._name, shape, self.source.config)
        for expert in shape.matrices:
            for field, tensor in self.source.read(self.layer, expert).items():
                writer.append(names[field], tensor)
        return LayerCost(self.layer, "kept", matrices=shape.n_matrices)


def convert(
    source: LayerSource,
    out: str | os.PathLike,
    layers: dict[str, LayerWriter],
    others: Sequence[OtherTensor],
    config: dict[str, Any],
    report: ConversionReport,
    *,
    open_writer: Callable[..., TensorStream] = ShardWriter,
    overwrite: bool = False,
    max_shard_size: int | str = MAX_SHARD_SIZE,
    on_bytes: OnBytes = lambda count, name: None,
    report_file: str | None = None,
    metadata: Mapping[str, str] | None = None,
    final_metadata: Callable[[], Mapping[str, str]] | None = None,
    finish: Callable[[Path], None] | None = None,
) -> ConversionReport:
    """Write a checkpoint: every layer as ``layers`` says, ``others`` beside them, ``config`` as `config.json`.

    Args:
        others: all other tensors, as they are to be written.
        open_writer: makes what writes the files, from the arguments of [`ShardWriter`].
        report: gets the layers' costs and sizes, and is returned.
        report_file: name of a file in the new folder that the report is written to.
        metadata: for the headers of the files.
        final_metadata: takes its place when all is written; it must not be longer.
        finish: called with the new folder before it gets its name, to write more files into it.

    Raises `FolderError` when ``out`` cannot be written, and `ShardError` when the source cannot be read or differs from
    its checksums.
    """
    target = Path(out).expanduser().resolve()
    origin = source.folder.origin
    if target == origin or origin in target.parents or target in origin.parents:
        raise FolderError(f"{target} and the checkpoint {origin} must be apart, neither inside of the other")
    refuse_damage(sorted({tensor.file for tensor in source.folder.tensors.values()}))
    with atomic_folder(target, overwrite=overwrite) as folder:
        specs = _ordered_specs(layers, others)
        report.notes += source.notes_on_rest()
        report.bytes_before = source.total_bytes
        report.bytes_after = sum(spec.nbytes for spec in specs.values())
        with open_writer(folder, specs, max_shard_size, metadata) as writer:
            for layer, layer_writer in layers.items():
                cost = layer_writer.write(writer)
                cost.n_weights = source.shapes[layer].n_weights
                cost.bytes_before = source.bytes_of(layer)
                cost.bytes_after = sum(spec.nbytes for spec in layer_writer.specs.values())
                report.layers.append(cost)
                on_bytes(cost.bytes_before, layer)
            for tensor in others:
                writer.write_parts(tensor.name, tensor.parts())
                on_bytes(tensor.nbytes, tensor.name)
            if final_metadata is not None:
                writer.metadata = dict(final_metadata())
        write_json(folder / "config.json", config, sort_keys=True)
        source.folder.copy_side_files(folder)
        if report_file is not None:
            report.file = report_file
            write_json(folder / report_file, report.to_dict(), sort_keys=True)
        if finish is not None:
            finish(folder)
        write_manifest(folder, weight_files(folder))
    return report


def _ordered_specs(layers: dict[str, LayerWriter], others: Sequence[OtherTensor]) -> dict[str, TensorSpec]:
    """By name, layers as numbers, as `save_pretrained` splits shards."""
    specs = {tensor.name: TensorSpec(tensor.dtype, tensor.shape) for tensor in others}
    for layer in layers.values():
        specs.update(layer.specs)
    return {name: specs[name] for name in sorted(specs, key=_natural_order)}


def _natural_order(name: str) -> list[tuple[int, int, str]]:
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in name.split(".")]
