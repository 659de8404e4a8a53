# SPDX-License-Identifier: Apache-2.0
"""Checksums of the files of a checkpoint, in `mxfp4_manifest.json` next to them.

They are written when a checkpoint is saved, and compared by `hf-mxfp4 verify`, before a conversion and before a run is
resumed. A checksum finds damage; it does not say who wrote a file.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from xxhash import xxh3_64, xxh3_128

from ...files import write_json
from .reader import FileHeader, ShardError, StoredTensor, is_safetensors, read_file_header


MANIFEST = "mxfp4_manifest.json"
#: Where files of hf_mxfp4 before manifests have checksums, in the metadata of their headers.
_OLD, _OLD_HEADER = "mxfp4_rl_checksums", "mxfp4_rl_header_checksum"
_READ = 1 << 20
_ADVICE = f"If it was changed on purpose, delete {MANIFEST} and run hf-mxfp4 verify --add"

#: Called with a number of bytes that were read, and the name of what they belong to.
OnBytes = Callable[[int, str], None]


def ignore_bytes(count: int, name: str) -> None:
    """Do nothing, as an [`OnBytes`]."""


@dataclass(frozen=True)
class FileRecord:
    """Size in bytes and XXH3-128 of a file, 32 hexadecimal digits; `None` in manifests that have sizes only."""

    size: int
    xxh3_128: str | None = None


#: Files by their paths relative to the folder of the manifest.
Manifest = Mapping[str, FileRecord]


def read_manifest(folder: Path) -> dict[str, FileRecord]:
    """Return what the manifest of a folder records, nothing where there is none. Raises [`ShardError`]."""
    try:
        files = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        records = {
            name: FileRecord(entry) if isinstance(entry, int) else FileRecord(entry["size"], entry["xxh3_128"])
            for name, entry in files.items()
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ShardError(f"{MANIFEST} is damaged: {type(error).__name__}: {error}") from error
    for name in records:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts or "\0" in name:
            raise ShardError(f"{MANIFEST} is damaged: it names {name!r}, which is outside of the folder")
    return records


def write_manifest(
    folder: Path, names: Iterable[str], kept: Manifest | None = None, on_bytes: OnBytes = ignore_bytes
) -> int:
    """Record the files ``names`` of a folder, in addition to what is ``kept`` of another manifest; return how many."""
    records = {name: record_of(folder / name, on_bytes) for name in names}
    merged = {name: asdict(record) for name, record in sorted({**(kept or {}), **records}.items())}
    write_json(folder / MANIFEST, {"files": merged})
    return len(records)


def weight_files(folder: Path) -> list[str]:
    """Return the names of the files in a folder that hold weights or say where they are."""
    patterns = ("*.safetensors", "*.safetensors.index*.json", "*.gguf")
    return sorted({path.name for pattern in patterns for path in folder.glob(pattern) if path.is_file()})


def record_of(file: Path, on_bytes: OnBytes = ignore_bytes) -> FileRecord:
    """Read a file and return its record. Raises [`ShardError`] when it cannot be read or changes meanwhile."""
    checksum = xxh3_128()
    try:
        with open(file, "rb", buffering=0) as stream:
            before = os.fstat(stream.fileno())
            for portion in _portions(stream, before.st_size):
                checksum.update(portion)
                on_bytes(len(portion), file.name)
        after = os.stat(file)
    except OSError as error:
        raise ShardError(f"{file.name} cannot be read: {error.strerror or error}") from error
    if any(getattr(before, field) != getattr(after, field) for field in ("st_ino", "st_size", "st_mtime_ns")):
        raise ShardError(f"{file.name} was written to while it was read; wait for the other process, then try again")
    return FileRecord(before.st_size, checksum.hexdigest())


def file_damage(file: Path, record: FileRecord | None, on_bytes: OnBytes = ignore_bytes) -> list[str] | None:
    """Compare a file with what was recorded when it was saved: in a manifest, or in the header of an older file.

    Returns what is damaged, in sentences; `None` when no checksum of the file is known. Raises [`ShardError`] when it
    cannot be read.
    """
    if record is not None and (problem := size_problem(file, record)) is not None:
        return [f"{file.name} is damaged: {problem}. {_ADVICE}"]
    if record is not None and record.xxh3_128 is not None:
        found = record_of(file, on_bytes).xxh3_128
        if found == record.xxh3_128:
            return []
        return [f"{file.name} is damaged: its checksum is {found}, and was {record.xxh3_128} when saved. {_ADVICE}"]
    return _old_damage(read_file_header(file), on_bytes) if is_safetensors(file) else None


def size_problem(file: Path, record: FileRecord) -> str | None:
    """Return what a look at a file without reading it finds wrong; `None` for nothing."""
    if not file.is_file():
        return "it is missing"
    size = file.stat().st_size
    return None if size == record.size else f"it has {size} bytes instead of {record.size}"


def refuse_damage(files: Iterable[Path]) -> None:
    """Raise [`ShardError`] for the first of some weight files that differs from its checksum."""
    manifests: dict[Path, Manifest] = {}
    for file in files:
        if file.parent not in manifests:
            manifests[file.parent] = read_manifest(file.parent)
        for problem in file_damage(file, manifests[file.parent].get(file.name)) or []:
            raise ShardError(problem)


def has_checksum(file: Path, manifest: Manifest) -> bool:
    """Return whether a checksum of a file is known. Raises [`ShardError`] for a file that cannot be read."""
    record = manifest.get(file.name)
    if record is not None and record.xxh3_128 is not None:
        return True
    return is_safetensors(file) and not read_file_header(file).metadata.keys().isdisjoint((_OLD, _OLD_HEADER))


def _old_damage(header: FileHeader, on_bytes: OnBytes) -> list[str] | None:
    """Compare tensors and header with the checksums that older files have in their metadata."""
    name, metadata = header.file.name, header.metadata
    if metadata.keys().isdisjoint((_OLD, _OLD_HEADER)):
        return None
    if metadata.get(_OLD_HEADER) != _old_header_checksum(header.tensors, metadata):
        return [f"{name} is damaged: its header does not have the checksum that was written into it"]
    try:
        expected: Any = json.loads(metadata[_OLD])
        wrong = []
        with open(header.file, "rb", buffering=0) as stream:
            for tensor in header.tensors:
                checksum = xxh3_64()
                stream.seek(tensor.offset)
                for portion in _portions(stream, tensor.nbytes):
                    checksum.update(portion)
                    on_bytes(len(portion), name)
                if checksum.hexdigest() != expected[tensor.name]:
                    wrong.append(f"{name} is damaged: the data of {tensor.name} does not have its checksum")
    except OSError as error:
        raise ShardError(f"{name} cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError) as error:
        return [f"{name} is damaged: the checksums in its header cannot be read ({error})"]
    return wrong


def _old_header_checksum(tensors: list[StoredTensor], metadata: Mapping[str, str]) -> str:
    entries = {tensor.name: [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in tensors}
    others = {key: value for key, value in metadata.items() if key != _OLD_HEADER}
    text = json.dumps({"metadata": others, "tensors": entries}, sort_keys=True, separators=(",", ":"))
    return xxh3_64(text.encode()).hexdigest()


def _portions(stream: BinaryIO, size: int) -> Iterator[memoryview]:
    """Yield the next ``size`` bytes of a file, or those before its end."""
    buffer = memoryview(bytearray(min(_READ, max(size, 1))))
    while size:
        count = stream.readinto(buffer[: min(len(buffer), size)])
        if not count:
            return
        yield buffer[:count]
        size -= count
