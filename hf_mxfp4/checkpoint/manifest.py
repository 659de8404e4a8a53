# SPDX-License-Identifier: Apache-2.0
"""Sizes and checksums of a checkpoint's files in `mxfp4_manifest.json`: what is damaged, and which training checkpoints
are complete.

`hf-mxfp4 verify` and resuming a run compare the checksums. A training checkpoint counts only when its
`trainer_state.json`, which is written last, can be read and all files of the manifest are as they were saved.
"""

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from xxhash import xxh3_128

from .._logging import get_logger
from ..files import is_draft, one_writer, regular_file, write_json
from ..registration import QUANT_METHOD
from .folder import (
    CONFIG,
    INDEX,
    SINGLE,
    CheckpointError,
    RemoteCodeError,
    ShardError,
    checkpoint_step,
    open_checkpoint,
    read_header,
    read_index,
)


MANIFEST = "mxfp4_manifest.json"
#: What a model computes depends on these too, so manifests record them.
_SETTINGS = (CONFIG, "generation_config.json")
#: Names of the weights that `config.json` describes.
_USUAL_NAME = re.compile(r"model(-.*)?\.safetensors(\.index\.json)?")
TRAINER_STATE = "trainer_state.json"

#: Called with a number of bytes that were read, and the name of what they belong to.
OnBytes = Callable[[int, str], None]


def ignore_bytes(count: int, name: str) -> None:
    """Do nothing, as an [`OnBytes`]."""


@dataclass(frozen=True)
class FileRecord:
    """Size in bytes and XXH3-128 of a file, 32 hexadecimal digits."""

    size: int
    xxh3_128: str


def read_manifest(folder: Path) -> dict[str, FileRecord]:
    """Return what the manifest of a folder records, nothing if there is none. Raises [`ShardError`]."""
    try:
        files = json.loads(regular_file(folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        records = {name: FileRecord(entry["size"], entry["xxh3_128"]) for name, entry in files.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ShardError(f"{MANIFEST} is damaged: {type(error).__name__}: {error}") from error
    for name in records:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise ShardError(f"{MANIFEST} is damaged: it names {name!r}, which is outside of the folder")
    return records


def write_manifest(
    folder: Path, names: Iterable[str], kept: Mapping[str, FileRecord] | None = None, on_bytes: OnBytes = ignore_bytes
) -> int:
    """Record the files ``names`` of a folder and its `config.json`, in addition to ``kept`` of another manifest; return
    how many."""
    records = dict(kept or {})
    names = {*names, *(_settings(folder) - records.keys())}
    for name in names:
        records[name] = record_of(folder / name, on_bytes)
    files = {name: asdict(records[name]) for name in sorted(records)}
    write_json(folder / MANIFEST, {"files": files})
    return len(names)


def write_whole_manifest(folder: str | os.PathLike) -> int:
    """Record all files under ``folder`` that its manifest lacks, when all processes have written theirs; return their
    number. The model card is left out because people edit it."""
    folder = Path(folder)
    recorded = read_manifest(folder)
    # The marker of transformers is there until its just-in-time checkpoint is saved.
    left_out = {MANIFEST, "README.md", "checkpoint-is-incomplete.txt", *recorded}
    files = [path for path in folder.rglob("*") if path.is_file() and not is_draft(path.name)]
    names = {file.relative_to(folder).as_posix() for file in files}
    return write_manifest(folder, names - left_out, recorded)


def weight_files(folder: Path) -> list[str]:
    """Return the names of the files in a folder that hold weights or say where they are."""
    patterns = ("*.safetensors", "*.safetensors.index*.json", "*.gguf")
    return sorted({path.name for pattern in patterns for path in folder.glob(pattern) if path.is_file()})


def _settings(folder: Path) -> set[str]:
    """Return the names of a folder's files of settings."""
    return {name for name in _SETTINGS if (folder / name).is_file()}


def record_of(file: Path, on_bytes: OnBytes = ignore_bytes) -> FileRecord:
    """Read a file and return its record. Raises [`ShardError`] when it cannot be read."""
    checksum = xxh3_128()
    size = 0
    try:
        with open(regular_file(file), "rb") as stream:
            while portion := stream.read(1 << 20):
                checksum.update(portion)
                size += len(portion)
                on_bytes(len(portion), file.name)
    except OSError as error:
        raise ShardError(f"{file.name} cannot be read: {error.strerror or error}") from error
    return FileRecord(size, checksum.hexdigest())


def size_problem(file: Path, record: FileRecord) -> str | None:
    """Return what is wrong with a file without reading it; `None` for nothing."""
    if not file.is_file():
        return "it is missing"
    size = file.stat().st_size
    if size != record.size:
        return f"it has {size} bytes instead of {record.size}"
    return None


def invalidate(folder: str | os.PathLike) -> None:
    """Make an older checkpoint in ``folder`` count as incomplete, before another one is written over it."""
    for name in (TRAINER_STATE, MANIFEST):
        Path(folder, name).unlink(missing_ok=True)


def why_incomplete(folder: str | os.PathLike, *, checksums: bool = False) -> str | None:
    """Return why a checkpoint cannot be resumed from; `None` when nothing is known to be wrong with it. Its large files
    are read only to compare ``checksums``. Of a checkpoint without a manifest, only `trainer_state.json` is checked."""
    folder = Path(folder)
    if not folder.is_dir():
        return "there is no such folder"
    try:
        json.loads(regular_file(folder / TRAINER_STATE).read_text(encoding="utf-8"))["global_step"]
        records = read_manifest(folder)
        # All sizes before the first checksum, which takes long.
        for name, record in records.items():
            problem = size_problem(folder / name, record)
            if problem is not None:
                return f"{name}: {problem}"
        for name, record in records.items():
            if checksums and record_of(folder / name) != record:
                return f"{name} was changed since it was saved (if on purpose, delete {MANIFEST})"
    except ShardError as error:
        return str(error)
    except FileNotFoundError:
        return f"it has no {TRAINER_STATE}: saving it was not finished"
    except (OSError, ValueError, KeyError, TypeError):
        return f"its {TRAINER_STATE} is cut short"
    return None


def last_complete_checkpoint(output_dir: str | os.PathLike, *, checksums: bool = False) -> str | None:
    """Return the last checkpoint folder in ``output_dir`` that [`why_incomplete`] has nothing against, or `None`. Warns
    of each newer one."""
    output_dir = Path(output_dir)
    if not output_dir.is_dir():
        return None
    folders = [path for path in output_dir.iterdir() if checkpoint_step(path) is not None and path.is_dir()]
    for folder in sorted(folders, key=checkpoint_step, reverse=True):
        reason = why_incomplete(folder, checksums=checksums)
        if reason is None:
            return str(folder)
        get_logger().warning("%s is not resumed from: %s", folder, reason)
    return None


@dataclass(frozen=True)
class Problem:
    """A file or tensor, and what is wrong with it."""

    where: str
    reason: str


@dataclass
class Verification:
    """What was compared: names of files with a checksum (``checked``) and without one, how much, what was wrong, and in
    sentences (``notes``) what could not be compared."""

    checked: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    n_tensors: int = 0
    n_bytes: int = 0
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return what `hf-mxfp4 verify --json` prints."""
        short = {"n_tensors": "tensors", "n_bytes": "bytes"}
        return {short.get(name, name): value for name, value in asdict(self).items()}

    def check_file(self, file: Path, record: FileRecord | None, on_bytes: OnBytes = ignore_bytes) -> None:
        """Compare a file with its record in the manifest."""
        try:
            n_tensors = 0
            if file.suffix == ".safetensors":
                n_tensors = len(read_header(file).tensors)
            if record is None:
                self.unchecked.append(file.name)
                return
            problem = size_problem(file, record)
            if problem is None:
                checksum = record_of(file, on_bytes).xxh3_128
                if checksum != record.xxh3_128:
                    problem = f"its checksum is {checksum}, and was {record.xxh3_128} when saved"
        except ShardError as error:
            self._add(file.name, error)
            return
        self.checked.append(file.name)
        self.n_tensors += n_tensors
        if file.is_file():
            self.n_bytes += file.stat().st_size
        if problem is not None:
            advice = f"If it was changed on purpose, delete {MANIFEST} and run hf-mxfp4 verify --add"
            self._add(file.name, f"{file.name} is damaged: {problem}. {advice}")

    def check_folder(self, folder: Path) -> None:
        """Compare the files with the index and with `config.json`, if they have no other problem."""
        from .sources import MasterSource, PackedSource, own_config

        # Other names are those of .gguf files and of save_pretrained(variant=...).
        names = [name for name in (*self.checked, *self.unchecked) if _USUAL_NAME.fullmatch(name)]
        if self.problems or not names or not (folder / CONFIG).is_file():
            return
        try:
            opened = open_checkpoint(folder)
            if opened.quantization.get("quant_method") == QUANT_METHOD:
                config = own_config(opened)
                # These raise an error where a tensor is missing or of another shape.
                if config.mode == "packed":
                    PackedSource(opened)
                elif not config.packing_unsupported_reason:
                    MasterSource(opened)
        except RemoteCodeError as error:
            self.notes.append(f"the tensors were not compared with the model that {CONFIG} describes: {error}")
        except ShardError as error:
            self._add(INDEX, error)
        except CheckpointError as error:
            self._add(CONFIG, error)

    def _add(self, where: str, reason: str | Exception) -> None:
        self.problems.append(Problem(where, str(reason)))


def verify_folder(path: str | os.PathLike, on_bytes: OnBytes = ignore_bytes) -> Verification:
    """Check every file of a folder that has a checksum, all safetensors files, the index, and that `config.json`
    describes them; or one file alone.

    Raises [`CheckpointError`] for what is neither, or a folder without weights.
    """
    path = Path(path).expanduser()
    is_file = path.is_file()
    folder = path.parent if is_file else path
    verification = Verification()
    manifest: dict[str, FileRecord] = {}
    try:
        manifest = read_manifest(folder)
    except ShardError as error:
        verification._add(MANIFEST, error)
    if is_file:
        names = [path.name]
    else:
        names = _names(folder, manifest)
    for name in names:
        if name not in _SETTINGS:
            verification.check_file(folder / name, manifest.get(name), on_bytes)
    if not is_file:
        verification.check_folder(folder)
    # What does not fit the weights has been reported, in better words than those of a checksum.
    reported = {problem.where for problem in verification.problems}
    for name in names:
        if name in _SETTINGS and name not in reported:
            verification.check_file(folder / name, manifest.get(name), on_bytes)
    return verification


def add_to_folder(folder: str | os.PathLike, on_bytes: OnBytes = ignore_bytes) -> list[str]:
    """Record checksums of those weight files of a folder that have none, as they are now; return their names.

    Raises as [`verify_folder`], `ShardError` for a file that cannot be read, and `OSError`.
    """
    folder = Path(folder).expanduser()
    with one_writer(folder):
        manifest = read_manifest(folder)
        names = [name for name in _names(folder, manifest) if name not in manifest]
        if names:
            write_manifest(folder, names, manifest, on_bytes)
    return names


def _names(folder: Path, manifest: Iterable[str]) -> list[str]:
    """Return the names of all weight files of a folder, of its settings, and of what its index or manifest names."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder; give that of a checkpoint")
    names = {*weight_files(folder), *_settings(folder), *manifest}
    if (folder / INDEX).is_file() and not (folder / SINGLE).is_file():
        with contextlib.suppress(ShardError):  # reported when the index is checked
            names |= set(read_index(folder / INDEX).values())
    if not any(name.endswith((".safetensors", ".gguf")) for name in names):
        raise CheckpointError(f"{folder} holds no .safetensors or .gguf file")
    return sorted(names)
