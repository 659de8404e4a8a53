# SPDX-License-Identifier: Apache-2.0
"""From a source to a new checkpoint folder: what packing, export and import share."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..files import write_json
from .atomic import FolderError, atomic_folder
from .layers import NewLayer
from .manifest import OnBytes, ignore_bytes, weight_files, write_manifest
from .report import ConversionReport, LayerCost
from .sources import LayerSource
from .tensors import MAX_SHARD_SIZE, NewTensor, write_metadata, write_shards


def convert(
    source: LayerSource,
    out: str | os.PathLike,
    layers: Mapping[str, tuple[NewLayer, LayerCost]],
    others: Sequence[NewTensor],
    config: dict[str, Any],
    report: ConversionReport,
    *,
    write: Callable[..., list[Path]] = write_shards,
    overwrite: bool = False,
    max_shard_size: int | str = MAX_SHARD_SIZE,
    on_bytes: OnBytes = ignore_bytes,
    metadata: Mapping[str, str] | None = None,
    final_metadata: Callable[[], Mapping[str, str]] | None = None,
    finish: Callable[[Path], None] | None = None,
) -> ConversionReport:
    """Write a checkpoint from the tensors of ``layers`` and ``others``, with ``config`` as `config.json`.

    One shard is in memory at a time, and the layer that is converted.

    Args:
        layers: the new tensors of each layer, and its entry in the report, which is filled as they are made.
        write: writes the files, as [`write_shards`] does.
        report: gets the layers' costs and sizes, is written to ``report.file``, and is returned.
        metadata: for the headers of the files.
        final_metadata: replaces it when all is written; it must not be longer.
        finish: called with the new folder before it gets its name, to write more files into it.

    Raises `FolderError` when ``out`` cannot be written, and `ShardError` when the source cannot be read.
    """
    target = Path(out).expanduser().resolve()
    origin = source.folder.path.resolve()
    if target == origin or origin in target.parents or target in origin.parents:
        raise FolderError(f"{target} and the checkpoint {origin} must be apart, neither inside of the other")
    tensors = [_counted(tensor, on_bytes, tensor.nbytes) for tensor in others]
    for name, (layer, cost) in layers.items():
        cost.matrices, cost.n_weights = source.shapes[name].n_matrices, source.shapes[name].n_weights
        cost.bytes_before = source.bytes_of(name)
        cost.bytes_after = sum(tensor.nbytes for tensor in layer.tensors)
        report.layers.append(cost)
        first, *rest = layer.tensors
        tensors += [_counted(first, on_bytes, cost.bytes_before), *rest]
    tensors.sort(key=lambda tensor: _natural_order(tensor.name))  # as `save_pretrained` splits shards
    report.notes += source.notes_on_rest()
    report.bytes_before = source.total_bytes
    report.bytes_after = sum(tensor.nbytes for tensor in tensors)
    with atomic_folder(target, overwrite=overwrite) as folder:
        files = write(folder, tensors, max_shard_size, metadata or {})
        if final_metadata is not None:
            for file in files:
                write_metadata(file, {"format": "pt", **final_metadata()})
        write_json(folder / "config.json", config, sort_keys=True)
        source.folder.copy_side_files(folder)
        if report.file is not None:
            write_json(folder / report.file, report.to_dict(), sort_keys=True)
        if finish is not None:
            finish(folder)
        write_manifest(folder, weight_files(folder))
    return report


def _counted(tensor: NewTensor, on_bytes: OnBytes, n_bytes: int) -> NewTensor:
    def make():
        made = tensor.make()
        on_bytes(n_bytes, tensor.name)
        return made

    return replace(tensor, make=make)


def _natural_order(name: str) -> list[tuple[int, int, str]]:
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in name.split(".")]
