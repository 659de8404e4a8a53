# SPDX-License-Identifier: Apache-2.0
"""Read the tensors of a safetensors file in slices, by plain file reads: memory use is that of one slice.

Memory-mapped pages count as memory in use and are given back late; here only the slice asked for is ever held. The
header is checked strictly before anything is read, so that a truncated or damaged file is told apart from data.
"""

import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch


_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_FIELDS = {"dtype", "shape", "data_offsets"}
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit


class ShardError(ValueError):
    """A safetensors file that cannot be read: missing, truncated or damaged. The message says which and why."""


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a safetensors file: ``shape`` and ``dtype``, and where its bytes lie in the file."""

    name: str
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @cached_property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Return [`read_rows`] of this tensor."""
        return read_rows(self, start, stop)


@dataclass(frozen=True)
class FileHeader:
    """What the header of a safetensors file says.

    Attributes:
        file: the file.
        tensors: in the order of their bytes.
        metadata: what stands in ``__metadata__``; empty where there is none.
    """

    file: Path
    tensors: list[StoredTensor]
    metadata: dict[str, str]


#: A file, or its header where that has been read already.
AnyFile = str | os.PathLike | FileHeader


def read_header(file: Path) -> list[StoredTensor]:
    """The tensors of a safetensors file, in the order of their bytes.

    Raises [`ShardError`] for a file that is missing, truncated, or whose header contradicts itself or the file.
    """
    return read_file_header(file).tensors


def read_headers(files: Sequence[AnyFile]) -> list[AnyFile]:
    """Files of a checkpoint, each that is a safetensors file as its header, so that several checks read it once. What
    has been read already, and files of other formats, stay as they are. Raises as [`read_header`]."""
    unread = [not isinstance(file, FileHeader) and is_safetensors(file) for file in files]
    return [read_file_header(Path(file)) if new else file for file, new in zip(files, unread, strict=True)]


def tensors_by_name(headers: Iterable[FileHeader]) -> dict[str, StoredTensor]:
    """All tensors of a checkpoint. Raises [`ShardError`] for one that two files have."""
    found: dict[str, StoredTensor] = {}
    for header in headers:
        for tensor in header.tensors:
            if tensor.name in found:
                raise ShardError(f"{tensor.name} is both in {found[tensor.name].file.name} and in {header.file.name}")
            found[tensor.name] = tensor
    return found


def is_safetensors(file: AnyFile) -> bool:
    """Whether it is a safetensors file, by its name."""
    return name_of(file).endswith(".safetensors")


def name_of(file: AnyFile) -> str:
    """The name of a file, without its folder."""
    return Path(file.file if isinstance(file, FileHeader) else file).name


def read_file_header(file: Path) -> FileHeader:
    """[`read_header`], with what the header says besides."""
    header, start, size = load_header(file)
    metadata = header.pop("__metadata__", None)
    metadata = {} if metadata is None else metadata
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ShardError(f"{file.name} is damaged: the metadata in its header are not strings by name")
    tensors = [_entry(file, name, entry, start) for name, entry in header.items()]
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.nbytes))
    end = start
    for tensor in tensors:
        if tensor.offset != end:
            raise ShardError(f"{file.name} is damaged: the bytes of {tensor.name} overlap others or leave a hole")
        end += tensor.nbytes
    if end > size:
        raise ShardError(f"{file.name} is truncated: its tensors end at byte {end}, the file has {size}")
    if end < size:
        raise ShardError(f"{file.name} is damaged: {size - end} bytes after its last tensor")
    return FileHeader(file, tensors, metadata)


def load_header(file: Path) -> tuple[dict[str, Any], int, int]:
    """The header as it stands, where the data begin, and the size of the file, both in bytes. Raises [`ShardError`]."""
    try:
        with open(file, "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
                raise ShardError(
                    f"{file.name} is truncated or not a safetensors file: its header would take {length} bytes, the "
                    f"file has {size}"
                )
            text = stream.read(length)
    except (OSError, ValueError) as error:  # ValueError: NUL in the name
        if isinstance(error, ShardError):
            raise
        raise ShardError(f"{file.name!r} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ShardError(f"{file.name} is damaged: its header is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise ShardError(f"{file.name} is damaged: its header is not a JSON object")
    return header, 8 + length, size


def read_rows(tensor: StoredTensor, start: int, stop: int) -> torch.Tensor:
    """Rows ``start`` to ``stop`` of the first axis of a tensor with at least one axis.

    Raises [`ShardError`] when the file ends before them or cannot be read.
    """
    row_bytes = math.prod(tensor.shape[1:]) * tensor.dtype.itemsize
    shape = (stop - start, *tensor.shape[1:])
    buffer = bytearray(row_bytes * (stop - start))
    if not buffer:
        return torch.empty(shape, dtype=tensor.dtype)
    try:
        with open(tensor.file, "rb", buffering=0) as stream:
            stream.seek(tensor.offset + start * row_bytes)
            view, got = memoryview(buffer), 0
            while got < len(buffer):
                n = stream.readinto(view[got:])
                if not n:
                    raise ShardError(f"{tensor.file.name} ended inside {tensor.name}; was it written to meanwhile?")
                got += n
    except OSError as error:
        raise ShardError(f"{tensor.file.name} cannot be read: {error.strerror or error}") from error
    return torch.frombuffer(buffer, dtype=tensor.dtype).view(shape)


def slices(tensor: StoredTensor, max_elements: int, multiple_of: int = 1) -> Iterator[torch.Tensor]:
    """A tensor with two or three axes as matrices ``[rows, columns]``, in order, each within one matrix of the tensor
    and of at most about ``max_elements``; all but the last of a matrix have a multiple of ``multiple_of`` rows.

    Matrices of a three-axis tensor that are small are not joined. Raises as [`read_rows`].
    """
    matrices, (rows, columns) = (tensor.shape[:-2], tensor.shape[-2:])
    step = max(1, max_elements // max(1, columns) // multiple_of) * multiple_of
    flat = StoredTensor(tensor.name, tensor.file, tensor.dtype, (math.prod(matrices) * rows, columns), tensor.offset)
    for first in range(0, flat.shape[0], max(1, rows)):
        for start in range(first, first + rows, step):
            yield read_rows(flat, start, min(start + step, first + rows))


def _entry(file: Path, name: str, entry: object, start: int) -> StoredTensor:
    if any("\ud800" <= letter <= "\udfff" for letter in name):
        raise ShardError(f"{_problem(file, name)} has a name that is not Unicode text")
    if not isinstance(entry, dict) or entry.keys() != _FIELDS:
        raise ShardError(f"{_problem(file, name)} has not exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise ShardError(f"{_problem(file, name)} has the unknown dtype {dtype!r}")
    for numbers in (shape, offsets):
        if not isinstance(numbers, list) or not all(type(n) is int and n >= 0 for n in numbers):
            raise ShardError(f"{_problem(file, name)} has {numbers!r} where sizes belong")
    tensor = StoredTensor(name, file, _DTYPES[dtype], tuple(shape), start + offsets[0] if offsets else -1)
    if len(offsets) != 2 or offsets[1] - offsets[0] != tensor.nbytes:
        raise ShardError(f"{_problem(file, name)} gives bytes {offsets} to {tensor.nbytes} bytes of {dtype} {shape}")
    return tensor


def _problem(file: Path, name: str) -> str:
    return f"{file.name} is damaged: its header's entry for {name!r}"
