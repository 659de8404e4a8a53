# SPDX-License-Identifier: Apache-2.0
"""Write safetensors shards tensor by tensor, in any order: memory use is that of one tensor.

The files are those that `save_pretrained` writes for the same tensors: same split into shards, same order within them,
same header.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import torch
from huggingface_hub import split_state_dict_into_shards_factory

from ...files import write_json
from .reader import load_header


INDEX = "model.safetensors.index.json"
#: As `save_pretrained` has it.
MAX_SHARD_SIZE = "50GB"
_COPY_BYTES = 1 << 24
#: Names of the dtypes, in the order in which safetensors stores those of a file; the tensors of each by name.
_DTYPE_NAMES = {
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_ORDER = list(_DTYPE_NAMES)


@dataclass(frozen=True)
class TensorSpec:
    """What a tensor to be written will be."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class OtherTensor:
    """A tensor that is not quantized, on its way into new files: its name, dtype and shape there, its values in
    consecutive parts (slices of the first axis), and how many bytes are read for them."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int
    parts: Callable[[], Iterator[torch.Tensor]]

    def cast(self, before: torch.dtype | None, after: torch.dtype) -> "OtherTensor":
        """Return this tensor in ``after`` if it is of ``before``."""
        if self.dtype != before:
            return self
        return replace(self, dtype=after, parts=lambda: (part.to(after) for part in self.parts()))


class TensorStream:
    """Tensors that come in consecutive pieces, each to its place in some open file.

    Args:
        specs: every tensor that will be written.
    """

    def __init__(self, specs: Mapping[str, TensorSpec]):
        self._specs = specs
        self._places: dict[str, tuple[BinaryIO, int]] = {}
        self._written: dict[str, int] = {}

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Raises `ValueError` for a tensor that is not the one announced, or that was written already."""
        shape = self._specs[name].shape if name in self._specs else ()
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} has the shape {list(tensor.shape)}, but {list(shape)} was announced")
        self.write_parts(name, [tensor])

    def write_parts(self, name: str, parts: Iterable[torch.Tensor]) -> None:
        """Write a tensor that comes in consecutive pieces. Raises as [`write`], also for too few or many elements."""
        if name not in self._specs or name in self._written:
            raise ValueError(f"{name} was {'written already' if name in self._specs else 'not announced'}")
        for part in parts:
            self.append(name, part)
        written, nbytes = self._written.setdefault(name, 0), self._specs[name].nbytes
        if written != nbytes:
            raise ValueError(f"{name} came as {written} bytes, but {nbytes} were announced")

    def append(self, name: str, part: torch.Tensor) -> None:
        """Write the next consecutive piece of a tensor; pieces of several tensors may take turns. Raises as
        [`write_parts`]."""
        if name not in self._specs:
            raise ValueError(f"{name} was not announced")
        spec, (stream, offset) = self._specs[name], self._places[name]
        if part.dtype != spec.dtype:
            raise ValueError(f"{name} is {part.dtype}, but {spec.dtype} was announced")
        data = part.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().data
        done = self._written.get(name, 0)
        if done + len(data) > spec.nbytes:
            raise ValueError(f"{name} came as {done + len(data)} bytes or more, but {spec.nbytes} were announced")
        self._written[name] = done + len(data)
        stream.seek(offset + done)
        for start in range(0, len(data), _COPY_BYTES):
            stream.write(data[start : start + _COPY_BYTES])

    def _check_complete(self) -> None:
        missing = [name for name, spec in self._specs.items() if self._written.get(name) != spec.nbytes]
        if missing:
            raise ValueError(f"{len(missing)} announced tensors were not written in full, such as {min(missing)}")


class ShardWriter(TensorStream):
    """The safetensors files of one checkpoint in ``folder``. Use as a context manager; an index is written at its end.

    Args:
        specs: every tensor that will be written; their order decides which go together in a shard.
        max_shard_size: as `save_pretrained` takes it.
        metadata: for the header of every file. May be replaced before the context ends by something no longer, if it
            depends on what is written.
    """

    def __init__(
        self,
        folder: Path,
        specs: Mapping[str, TensorSpec],
        max_shard_size: int | str = MAX_SHARD_SIZE,
        metadata: Mapping[str, str] | None = None,
    ):
        split = split_state_dict_into_shards_factory(
            dict(specs),
            get_storage_size=lambda spec: spec.nbytes,
            filename_pattern="model{suffix}.safetensors",
            max_shard_size=max_shard_size,
        )
        super().__init__(specs)
        self._folder = folder
        self.metadata = dict(metadata or {})
        self._shards = {file: names for file, names in split.filename_to_tensors.items() if names}
        self._index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        self._files: dict[str, BinaryIO] = {}
        self._headers: dict[str, bytes] = {}

    def __enter__(self) -> "ShardWriter":
        for file, names in self._shards.items():
            stream = open(self._folder / file, "xb")
            self._files[file] = stream
            header, offsets = self._header(names)
            stream.write(header)
            self._headers[file] = header
            self._places.update({name: (stream, len(header) + offset) for name, offset in offsets.items()})
        return self

    def __exit__(self, kind, *exception) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            for stream in self._files.values():
                stream.close()

    def _finish(self) -> None:
        self._check_complete()
        if len(self._shards) > 1:
            write_json(self._folder / INDEX, self._index, sort_keys=True)
        for file, old in self._headers.items():
            header, _ = self._header(self._shards[file], len(old))
            self._files[file].seek(0)
            self._files[file].write(header)

    def _header(self, names: Iterable[str], size: int = 0) -> tuple[bytes, dict[str, int]]:
        """The bytes before the data of a file, at least ``size``, and where in the data each tensor starts."""
        specs = {name: self._specs[name] for name in names}
        return _header(specs, {"format": "pt", **self.metadata}, size)


def header_bytes(entries: Mapping[str, Any], size: int = 0) -> bytes:
    """What a safetensors file begins with, the length of the header and the header itself; at least ``size`` bytes."""
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * max(-len(text) % 8, size - 8 - len(text))
    return len(text).to_bytes(8, "little") + text


def sort_metadata(file: Path) -> None:
    """Sort the metadata in a header, whose order safetensors leaves to chance: the same model gives the same bytes."""
    header, start, _ = load_header(file)
    metadata = dict(sorted((header.get("__metadata__") or {}).items()))
    ordered = header_bytes({**header, "__metadata__": metadata}, start)
    if metadata and len(ordered) == start:
        with open(file, "r+b") as stream:
            stream.write(ordered)


def _header(specs: Mapping[str, TensorSpec], metadata: Mapping[str, str], size: int) -> tuple[bytes, dict[str, int]]:
    entries: dict[str, dict] = {"__metadata__": dict(sorted(metadata.items()))}
    offsets, end = {}, 0
    for name in sorted(specs, key=lambda name: (_ORDER.index(specs[name].dtype), name.encode())):
        spec = specs[name]
        offsets[name], end = end, end + spec.nbytes
        entries[name] = {
            "dtype": _DTYPE_NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [offsets[name], end],
        }
    header = header_bytes(entries, size)
    if size and len(header) != size:
        raise ValueError(f"the header grew to {len(header)} bytes; {size} were reserved for it")
    return header, offsets
