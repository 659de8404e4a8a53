# SPDX-License-Identifier: Apache-2.0
"""Everything that is damaged in a checkpoint: data, headers, the index, and a `config.json` that describes others."""

import contextlib
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..registration import QUANT_METHOD
from .io.folder import CheckpointError, RemoteCodeError, open_checkpoint, read_json
from .io.index import read_index
from .io.integrity import FileChecksums, OnBytes, add_checksums, find_damage
from .io.reader import ShardError, StoredTensor, read_file_header
from .io.replace import CONFIG, weight_names


@dataclass(frozen=True)
class Problem:
    """``where``: the tensor, or the file if it is none. ``reason``: a sentence that names the file."""

    where: str
    reason: str


@dataclass
class Verification:
    """What was compared, and what was wrong.

    Attributes:
        checked: names of the files whose data were compared with their checksums.
        unchecked: those of files that carry none.
        n_tensors, n_bytes: how much was compared.
        problems: everything that is damaged.
        lacking: files without checksums whose neighbours in the index carry some.
        notes: what could not be compared, in sentences.
    """

    checked: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    n_tensors: int = 0
    n_bytes: int = 0
    problems: list[Problem] = field(default_factory=list)
    lacking: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    #: By the names of the files that could be read, and of the tensors.
    _tensors: dict[str, dict[str, StoredTensor]] = field(default_factory=dict, repr=False)

    @property
    def all_problems(self) -> list[Problem]:
        return [*self.problems, *self.lacking]

    def to_dict(self) -> dict[str, Any]:
        """What `hf-mxfp4 verify --json` prints."""
        return {
            "checked": self.checked,
            "unchecked": self.unchecked,
            "tensors": self.n_tensors,
            "bytes": self.n_bytes,
            "problems": [asdict(problem) for problem in self.all_problems],
            "notes": self.notes,
        }

    def check_file(self, file: Path, on_bytes: OnBytes = lambda count, name: None) -> None:
        """Compare the header and all data of a safetensors file with its checksums."""
        try:
            found = FileChecksums(read_file_header(file))
            self._tensors[file.name] = {tensor.name: tensor for tensor in found.tensors}
            if found.expected is None:
                self.unchecked.append(file.name)
                return
            self.checked.append(file.name)
            self.n_tensors += len(found.tensors)
            self.n_bytes += found.n_bytes
            for damage in find_damage([found], on_bytes):
                self.add(damage.tensor or damage.file, str(damage))
        except ShardError as error:
            self.add(file.name, str(error))

    def check_folder(self, folder: Path) -> None:
        """Compare what the files have with the index and with `config.json`, when all files have been checked."""
        index = _index_of(folder)
        if index is not None:
            self._check_index(index)
        if not self.problems and (folder / CONFIG).is_file():
            self._check_config(folder)

    def _check_index(self, index: Path) -> None:
        try:
            places = read_index(index)
        except ShardError as error:
            self.add(index.name, str(error))
            return

        def damaged(reason: str) -> None:
            self.add(index.name, f"{index.name} is damaged: {reason}")

        files = sorted(set(places.values()))
        for name, file in places.items():
            if file in self._tensors and name not in self._tensors[file]:
                damaged(f"it places {name} in {file}, which has no such tensor")
        for file in files:
            for name in self._tensors.get(file, {}):
                if places.get(name) != file:
                    damaged(f"it does not say that {name} is in {file}")
        size = read_json(index)["metadata"].get("total_size")
        n_bytes = sum(tensor.nbytes for file in files for tensor in self._tensors.get(file, {}).values())
        if isinstance(size, int) and not self.problems and size != n_bytes:
            damaged(f"it says that the tensors have {size} bytes, and they have {n_bytes}")
        for file in set(files).intersection(self.unchecked) if set(files).intersection(self.checked) else ():
            self.lacking.append(Problem(file, f"{file} carries no checksums, other files do: it was written anew"))

    def _check_config(self, folder: Path) -> None:
        from .convert.sources import PackedSource, check_folder, own_config

        single, _ = weight_names(None)
        if _index_of(folder) is None and not (folder / single).is_file():
            return
        try:
            opened = open_checkpoint(folder)
            if opened.quantization.get("quant_method") != QUANT_METHOD:
                return
            own = own_config(opened)
        except (CheckpointError, ShardError) as error:
            self.add(CONFIG, str(error))
            return
        try:
            model = opened.empty_model()
        except RemoteCodeError as error:
            self.notes.append(f"the tensors were not compared with the model that {CONFIG} describes: {error}")
            return
        except CheckpointError as error:
            self.add(CONFIG, str(error))
            return
        try:
            PackedSource(opened) if own.mode == "packed" else check_folder(opened, model, own)
        except CheckpointError as error:
            self.add(CONFIG, str(error))

    def add(self, where: str, reason: str) -> None:
        self.problems.append(Problem(where, reason))


def verify_folder(folder: str | os.PathLike, on_bytes: OnBytes = lambda count, name: None) -> Verification:
    """Check every safetensors file of a folder, its index, and that `config.json` describes them.

    Raises [`CheckpointError`] for what is no folder, or holds no safetensors files.
    """
    folder = Path(folder).expanduser()
    found = Verification()
    for file in _files(folder):
        found.check_file(file, on_bytes)
    found.check_folder(folder)
    return found


def add_to_folder(folder: str | os.PathLike, on_bytes: OnBytes = lambda count, name: None) -> list[str]:
    """Write checksums into those files of a folder that carry none, one after the other; their names.

    They are of what the files hold now. Raises as [`verify_folder`], `ShardError` for a file that cannot be read, and
    `OSError` for one that cannot be written.
    """
    files = [
        file for file in _files(Path(folder).expanduser()) if FileChecksums(read_file_header(file)).expected is None
    ]
    for file in files:
        add_checksums(file, on_bytes)
    return [file.name for file in files]


def _files(folder: Path) -> Iterable[Path]:
    """All safetensors files of a folder, and those that its index names and that are missing."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder; give that of a checkpoint")
    names, index = {file.name for file in folder.glob("*.safetensors")}, _index_of(folder)
    if index is not None:
        with contextlib.suppress(ShardError):  # told when the index is checked
            names |= set(read_index(index).values())
    if not names:
        raise CheckpointError(f"{folder} holds no .safetensors file")
    return [folder / name for name in sorted(names)]


def _index_of(folder: Path) -> Path | None:
    """The index that transformers reads: none where one file has all weights."""
    single, index = weight_names(None)
    return folder / index if (folder / index).is_file() and not (folder / single).is_file() else None
