# SPDX-License-Identifier: Apache-2.0
"""What a section records: entries with a name and a digest, and the tensors behind them."""

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from .texts import masked


class Record:
    """The entries of one section.

    Args:
        folder: where [`save`] writes.
        section: their common name.
        workplace: a folder whose path is replaced in texts.
    """

    def __init__(self, folder: Path, section: str, workplace: Path):
        self.folder, self.section, self.workplace = folder, section, workplace
        self.entries: dict[str, dict[str, Any]] = {}
        self.tensors: dict[str, torch.Tensor] = {}

    def tensor(self, name: str, tensor: torch.Tensor | None) -> None:
        """Record a tensor, or that there is none."""
        if tensor is None:
            return self.value(name, None)
        tensor = tensor.detach().cpu().contiguous().clone()
        raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        entry = {"kind": "tensor", "shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
        if tensor.numel():
            numbers = tensor.double()[tensor.double().isfinite()]
            entry |= {"mean": float(numbers.mean()), "largest": float(numbers.abs().max())} if numbers.numel() else {}
        self._add(name, raw, entry)
        self.tensors[name] = tensor
        return None

    def text(self, name: str, text: str) -> None:
        """Record a text, without paths of this run, dates, durations and versions of libraries."""
        text = masked(text.replace(str(self.workplace), "FOLDER"))
        self._add(name, text.encode(), {"kind": "text", "text": text})

    def value(self, name: str, value: object) -> None:
        """Record what JSON can hold, numbers by their shortest exact text, paths of this run apart."""
        text = json.dumps(value, sort_keys=True, default=str).replace(str(self.workplace), "FOLDER")
        self._add(name, text.encode(), {"kind": "value", "text": text})

    def file(self, name: str, path: Path) -> None:
        """Record the bytes of a file; of texts those that [`text`] keeps. Of safetensors, whose header has its metadata
        in an order that changes from process to process, with a sorted header, and each tensor too."""
        raw = path.read_bytes()
        if path.suffix == ".safetensors":
            self._add(name, _with_sorted_header(raw), {"kind": "file", "bytes": len(raw)})
            for key, tensor in load_file(path).items():
                self.tensor(f"{name}/{key}", tensor)
            return
        try:
            self.text(name, raw.decode())
        except UnicodeDecodeError:
            self._add(name, raw, {"kind": "file", "bytes": len(raw)})

    def folder_of_files(self, name: str, folder: Path, leave_out: tuple[str, ...] = ()) -> None:
        """Record all files of a folder but those that match a pattern, and their names."""
        paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        paths = [path for path in paths if not any(path.match(pattern) for pattern in leave_out)]
        self.value(f"{name}/names", [str(path.relative_to(folder)) for path in paths])
        for path in paths:
            self.file(f"{name}/{path.relative_to(folder)}", path)

    @contextlib.contextmanager
    def errors(self, name: str) -> Iterator[None]:
        """Record an exception raised within as a text, ``name/error``."""
        try:
            yield
        except Exception as error:
            self.text(f"{name}/error", f"{type(error).__name__}: {error}")

    def _add(self, name: str, raw: bytes, entry: dict[str, Any]) -> None:
        if name in self.entries:
            raise ValueError(f"{self.section}/{name} is recorded twice")
        self.entries[name] = {"sha256": hashlib.sha256(raw).hexdigest(), **entry}

    def save(self) -> None:
        """Write ``SECTION.json`` and ``SECTION.safetensors``."""
        self.folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.entries, indent=1, sort_keys=True)
        (self.folder / f"{self.section}.json").write_text(text + "\n", encoding="utf-8")
        save_file(self.tensors, self.folder / f"{self.section}.safetensors")


def _with_sorted_header(raw: bytes) -> bytes:
    """The bytes of a safetensors file with the keys of its header in order."""
    end = 8 + int.from_bytes(raw[:8], "little")
    return json.dumps(json.loads(raw[8:end]), sort_keys=True).encode() + raw[end:]


@contextlib.contextmanager
def open_record(folder: Path, section: str) -> Iterator[Record]:
    """A record that is saved on leaving, with an empty workplace that is the current folder until then."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="behaviour-") as workplace:
        record = Record(folder.resolve(), section, Path(workplace).resolve())
        os.chdir(workplace)
        try:
            yield record
        finally:
            os.chdir(before)
    record.save()
