# SPDX-License-Identifier: Apache-2.0
"""Tensors of safetensors files: read one at a time, and written shard by shard."""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from os import PathLike
from pathlib import Path

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError, safe_open
from safetensors.torch import _TYPES, save_file

from ..files import write_json


SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
#: Conversions hold one shard in memory.
MAX_SHARD_SIZE = "5GB"
_DTYPES = {**_TYPES, "F8_E8M0": torch.float8_e8m0fnu}


class ShardError(ValueError):
    """A weight file that cannot be read: missing, truncated or damaged. The message names the file."""


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a weight file."""

    name: str
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]

    @cached_property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self, start: int | None = None, stop: int | None = None) -> torch.Tensor:
        """Return all values, or slices ``start`` to ``stop`` of the first axis. Raises [`ShardError`]."""
        try:
            with safe_open(self.file, "pt") as opened:
                return opened.get_tensor(self.name) if start is None else opened.get_slice(self.name)[start:stop]
        except (OSError, SafetensorError) as error:
            raise _unreadable(self.file, error) from error


@dataclass(frozen=True)
class FileHeader:
    """The header of a safetensors file: its tensors in the order of their bytes, and its metadata."""

    file: Path
    tensors: list[StoredTensor]
    metadata: dict[str, str]


@dataclass(frozen=True)
class NewTensor:
    """A tensor of a file to be written, whose values are made when they are needed."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    make: Callable[[], torch.Tensor]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def to(self, dtype: torch.dtype) -> "NewTensor":
        return replace(self, dtype=dtype, make=lambda: self.make().to(dtype))


def new_tensors(specs: Mapping[str, torch.Tensor], make: Callable[[], Mapping[str, torch.Tensor]]) -> list[NewTensor]:
    """Return tensors like ``specs`` that ``make`` makes all at once, when the first is written."""
    made: dict[str, torch.Tensor] = {}

    def take(name: str) -> torch.Tensor:
        if not made:
            made.update(make())
        return made.pop(name)

    return [NewTensor(name, spec.dtype, tuple(spec.shape), partial(take, name)) for name, spec in specs.items()]


def read_header(file: str | PathLike) -> FileHeader:
    """Raise [`ShardError`] for a file that is missing, truncated, or whose header contradicts itself or the file."""
    file = Path(file)
    try:
        with safe_open(file, "pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.offset_keys()}
            metadata = dict(opened.metadata() or {})
    except (OSError, SafetensorError) as error:
        raise _unreadable(file, error) from error
    kinds = {name: (found.get_dtype(), tuple(found.get_shape())) for name, found in slices.items()}
    if unknown := [name for name, (dtype, _) in kinds.items() if dtype not in _DTYPES]:
        raise ShardError(f"{file.name}: {unknown[0]} has the unknown dtype {kinds[unknown[0]][0]}")
    tensors = [StoredTensor(name, file, _DTYPES[dtype], shape) for name, (dtype, shape) in kinds.items()]
    return FileHeader(file, tensors, metadata)


def read_headers(files: Iterable[str | PathLike]) -> list[FileHeader | str | PathLike]:
    """Return the headers of safetensors files; files of other formats stay as they are. Raises [`ShardError`]."""
    return [read_header(file) if str(file).endswith(".safetensors") else file for file in files]


def tensors_by_name(headers: Iterable[FileHeader]) -> dict[str, StoredTensor]:
    """Return all tensors of a checkpoint. Raises [`ShardError`] for one that two files have."""
    found: dict[str, StoredTensor] = {}
    for header in headers:
        for tensor in header.tensors:
            if tensor.name in found:
                raise ShardError(f"{tensor.name} is both in {found[tensor.name].file.name} and in {header.file.name}")
            found[tensor.name] = tensor
    return found


def write_shards(
    folder: Path, tensors: Sequence[NewTensor], max_shard_size: int | str, metadata: Mapping[str, str]
) -> list[Path]:
    """Write safetensors files, and an index if there are several, as `save_pretrained` does; return the files."""
    by_name = {tensor.name: tensor for tensor in tensors}
    split = split_state_dict_into_shards_factory(
        by_name,
        get_storage_size=lambda tensor: tensor.nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_size,
    )
    shards = {folder / file: names for file, names in split.filename_to_tensors.items() if names}
    for file, names in shards.items():
        values = {name: by_name[name].make().contiguous() for name in names}
        save_file(values, file, {"format": "pt", **metadata})
        del values
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        write_json(folder / INDEX, index, sort_keys=True)
    return list(shards)


def write_metadata(file: Path, metadata: Mapping[str, str]) -> None:
    """Replace the metadata in a header by others that are no longer, sorted: the same model gives the same bytes."""
    with open(file, "r+b") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(length))
        header = {**header, "__metadata__": dict(sorted(metadata.items()))}
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode().ljust(length)
        if len(text) != length:
            raise ValueError(f"the header of {file.name} has {length} bytes, and needs {len(text)}")
        stream.seek(8)
        stream.write(text)


def _unreadable(file: Path, error: Exception) -> ShardError:
    if isinstance(error, FileNotFoundError):
        return ShardError(f"{file.name} is missing")
    if isinstance(error, OSError) and error.strerror:
        return ShardError(f"{file.name} cannot be read: {error.strerror}")
    return ShardError(f"{file.name} is damaged, truncated or not a safetensors file: {error}")
