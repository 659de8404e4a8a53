# SPDX-License-Identifier: Apache-2.0
"""Everything that is damaged in a checkpoint: files, the index, and a `config.json` that describes other weights."""

import contextlib
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..files import one_writer
from ..registration import QUANT_METHOD
from .atomic import CONFIG, weight_names
from .folder import CheckpointError, RemoteCodeError, open_checkpoint, read_index
from .manifest import (
    MANIFEST,
    FileRecord,
    OnBytes,
    file_damage,
    ignore_bytes,
    read_manifest,
    weight_files,
    write_manifest,
)
from .tensors import INDEX, ShardError, is_safetensors, read_header


@dataclass(frozen=True)
class Problem:
    """``where``: the file. ``reason``: a sentence that names the file."""

    where: str
    reason: str


@dataclass
class Verification:
    """What was compared, and what was wrong.

    Attributes:
        checked: names of the files that were compared with their checksums.
        unchecked: names of the files without one.
        n_tensors, n_bytes: how much was compared.
        problems: everything that is damaged.
        notes: what could not be compared, in sentences.
    """

    checked: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    n_tensors: int = 0
    n_bytes: int = 0
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def lacking(self) -> list[str]:
        """Files of the model without checksums; all files if none has one."""
        return [name for name in self.unchecked if not self.checked or name.startswith("model")]

    def to_dict(self) -> dict[str, Any]:
        """Return what `hf-mxfp4 verify --json` prints."""
        return {
            "checked": self.checked,
            "unchecked": self.unchecked,
            "tensors": self.n_tensors,
            "bytes": self.n_bytes,
            "problems": [asdict(problem) for problem in self.problems],
            "notes": self.notes,
        }

    def check_file(self, file: Path, record: FileRecord | None, on_bytes: OnBytes = ignore_bytes) -> None:
        """Compare a file with its record in the manifest."""
        try:
            n_tensors = len(read_header(file).tensors) if is_safetensors(file) else 0
            damage = None if record is None else file_damage(file, record, on_bytes)
        except ShardError as error:
            self.add(file.name, str(error))
            return
        if record is None or record.xxh3_128 is None:
            self.unchecked.append(file.name)
        else:
            self.checked.append(file.name)
            self.n_tensors += n_tensors
            self.n_bytes += file.stat().st_size if file.is_file() else 0
        if damage is not None:
            self.add(file.name, damage)

    def check_folder(self, folder: Path) -> None:
        """Compare the files with the index and with `config.json`, if they have no other problem."""
        from .sources import open_own, own_config

        if self.problems or not (folder / CONFIG).is_file():
            return
        try:
            opened = open_checkpoint(folder)
            if opened.quantization.get("quant_method") == QUANT_METHOD:
                own = own_config(opened)
                if own.mode == "packed" or not own.packing_unsupported_reason:
                    open_own(opened)
        except RemoteCodeError as error:
            self.notes.append(f"the tensors were not compared with the model that {CONFIG} describes: {error}")
        except ShardError as error:
            self.add(INDEX, str(error))
        except CheckpointError as error:
            self.add(CONFIG, str(error))

    def manifest_of(self, folder: Path) -> dict[str, FileRecord]:
        """Return the manifest of a folder; a damaged one is a problem, and counts as empty."""
        try:
            return read_manifest(folder)
        except ShardError as error:
            self.add(MANIFEST, str(error))
            return {}

    def add(self, where: str, reason: str) -> None:
        self.problems.append(Problem(where, reason))


def verify_folder(folder: str | os.PathLike, on_bytes: OnBytes = ignore_bytes) -> Verification:
    """Check every file of a folder that has a checksum, all safetensors files, the index, and that `config.json`
    describes them.

    Raises [`CheckpointError`] for what is no folder, or holds no weights.
    """
    folder, found = Path(folder).expanduser(), Verification()
    manifest = found.manifest_of(folder)
    for name in _names(folder, manifest):
        found.check_file(folder / name, manifest.get(name), on_bytes)
    found.check_folder(folder)
    return found


def add_to_folder(folder: str | os.PathLike, on_bytes: OnBytes = ignore_bytes) -> list[str]:
    """Record checksums of those weight files of a folder that have none, as they are now; return their names. The files
    do not change; one process at a time does this in a folder, and the others wait.

    Raises as [`verify_folder`], `ShardError` for a file that cannot be read, and `OSError` if the manifest cannot be
    written.
    """
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder; give that of a checkpoint")
    with one_writer(folder):
        manifest = read_manifest(folder)
        known = {name for name, record in manifest.items() if record.xxh3_128 is not None}
        names = [name for name in _names(folder, manifest) if name not in known]
        if names:
            write_manifest(folder, names, manifest, on_bytes)
    return names


def _names(folder: Path, manifest: Iterable[str]) -> list[str]:
    """Return the names of all weight files of a folder, and of those that its index or manifest names."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder; give that of a checkpoint")
    names, (single, index) = {*weight_files(folder), *manifest}, weight_names()
    if (folder / index).is_file() and not (folder / single).is_file():
        with contextlib.suppress(ShardError):  # reported when the index is checked
            names |= set(read_index(folder / index).values())
    if not any(name.endswith((".safetensors", ".gguf")) for name in names):
        raise CheckpointError(f"{folder} holds no .safetensors or .gguf file")
    return sorted(names)
