# SPDX-License-Identifier: Apache-2.0
"""Sizes and checksums of a checkpoint's files in `mxfp4_manifest.json`, and which training checkpoints are complete.

The manifest is written when a checkpoint is saved. `hf-mxfp4 verify` compares the checksums, resuming a run the sizes.
A checksum finds damage; it does not say who wrote a file.

A Trainer writes into the final `checkpoint-<step>` folder, `trainer_state.json` last, and resumes from the largest
step: after a kill, the half-written one. Here a checkpoint counts only when its `trainer_state.json` can be read and
all files of the manifest have their sizes.
"""

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath

from xxhash import xxh3_128

from .._logging import get_logger
from ..files import is_draft, write_json
from .tensors import ShardError


MANIFEST = "mxfp4_manifest.json"
TRAINER_STATE = "trainer_state.json"
_READ = 1 << 20
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")

#: Called with a number of bytes that were read, and the name of what they belong to.
OnBytes = Callable[[int, str], None]


def ignore_bytes(count: int, name: str) -> None:
    """Do nothing, as an [`OnBytes`]."""


@dataclass(frozen=True)
class FileRecord:
    """Size in bytes and XXH3-128 of a file, 32 hexadecimal digits; `None` in manifests that have sizes only."""

    size: int
    xxh3_128: str | None = None


def read_manifest(folder: Path) -> dict[str, FileRecord]:
    """Return what the manifest of a folder records, nothing if there is none. Raises [`ShardError`]."""
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
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise ShardError(f"{MANIFEST} is damaged: it names {name!r}, which is outside of the folder")
    return records


def write_manifest(
    folder: Path,
    names: Iterable[str],
    kept: Mapping[str, FileRecord] | None = None,
    on_bytes: OnBytes = ignore_bytes,
) -> int:
    """Record the files ``names`` of a folder, in addition to ``kept`` of another manifest; return how many."""
    records = {name: record_of(folder / name, on_bytes) for name in names}
    merged = {name: asdict(record) for name, record in sorted({**(kept or {}), **records}.items())}
    write_json(folder / MANIFEST, {"files": merged})
    return len(records)


def write_whole_manifest(folder: str | os.PathLike) -> int:
    """Record all files under ``folder``, when all processes have written theirs; return their number. The model card is
    left out because people edit it."""
    folder = Path(folder)
    left_out = {MANIFEST, TRAINER_STATE, "README.md"}
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    return write_manifest(folder, [name for name in names if name not in left_out and not is_draft(Path(name).name)])


def weight_files(folder: Path) -> list[str]:
    """Return the names of the files in a folder that hold weights or say where they are."""
    patterns = ("*.safetensors", "*.safetensors.index*.json", "*.gguf")
    return sorted({path.name for pattern in patterns for path in folder.glob(pattern) if path.is_file()})


def record_of(file: Path, on_bytes: OnBytes = ignore_bytes) -> FileRecord:
    """Read a file and return its record. Raises [`ShardError`] when it cannot be read."""
    checksum, size = xxh3_128(), 0
    try:
        with open(file, "rb") as stream:
            while portion := stream.read(_READ):
                checksum.update(portion)
                size += len(portion)
                on_bytes(len(portion), file.name)
    except OSError as error:
        raise ShardError(f"{file.name} cannot be read: {error.strerror or error}") from error
    return FileRecord(size, checksum.hexdigest())


def file_damage(file: Path, record: FileRecord, on_bytes: OnBytes = ignore_bytes) -> str | None:
    """Compare a file with its record and return what is damaged, in a sentence; `None` for nothing.

    Raises [`ShardError`] when it cannot be read.
    """
    problem = size_problem(file, record)
    if problem is None and record.xxh3_128 is not None:
        found = record_of(file, on_bytes).xxh3_128
        if found != record.xxh3_128:
            problem = f"its checksum is {found}, and was {record.xxh3_128} when saved"
    if problem is None:
        return None
    return (
        f"{file.name} is damaged: {problem}. If it was changed on purpose, delete {MANIFEST} and run hf-mxfp4 verify "
        "--add"
    )


def size_problem(file: Path, record: FileRecord) -> str | None:
    """Return what is wrong with a file without reading it; `None` for nothing."""
    if not file.is_file():
        return "it is missing"
    size = file.stat().st_size
    return None if size == record.size else f"it has {size} bytes instead of {record.size}"


def checkpoint_step(folder: str | os.PathLike) -> int | None:
    """Return the step in the name of a checkpoint folder; `None` for any other name."""
    match = _CHECKPOINT.fullmatch(Path(folder).name)
    return int(match[1]) if match else None


def invalidate(folder: str | os.PathLike) -> None:
    """Make an older checkpoint in ``folder`` count as incomplete, before another one is written over it."""
    for name in (TRAINER_STATE, MANIFEST):
        Path(folder, name).unlink(missing_ok=True)


def why_incomplete(folder: str | os.PathLike) -> str | None:
    """Return why a checkpoint cannot be resumed from, without reading its large files; `None` when nothing is known to
    be wrong with it. Of a checkpoint without a manifest, only `trainer_state.json` is checked."""
    folder = Path(folder)
    if not folder.is_dir():
        return "there is no such folder"
    try:
        state = json.loads((folder / TRAINER_STATE).read_text(encoding="utf-8"))
        state["global_step"]
    except FileNotFoundError:
        return f"it has no {TRAINER_STATE}: saving it was not finished"
    except (OSError, ValueError, KeyError, TypeError):
        return f"its {TRAINER_STATE} is cut short"
    try:
        records = read_manifest(folder)
    except ShardError as error:
        return str(error)
    problems = ((name, size_problem(folder / name, record)) for name, record in records.items())
    return next((f"{name}: {problem}" for name, problem in problems if problem), None)


def last_complete_checkpoint(output_dir: str | os.PathLike) -> str | None:
    """Return the complete checkpoint folder in ``output_dir`` with the largest step, or `None`. A warning names each
    newer one that is not complete."""
    output_dir = Path(output_dir)
    entries = output_dir.iterdir() if output_dir.is_dir() else ()
    folders = [path for path in entries if checkpoint_step(path) is not None and path.is_dir()]
    for folder in sorted(folders, key=checkpoint_step, reverse=True):
        reason = why_incomplete(folder)
        if reason is None:
            return str(folder)
        get_logger().warning("%s is not resumed from: %s", folder, reason)
    return None
