# SPDX-License-Identifier: Apache-2.0
"""What a section records: entries with a name and a digest, the tensors behind them, and texts without what differs
between runs."""

import contextlib
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file


class Record:
    """Entries of a section, which [`save`] writes into ``folder``; in texts the path ``workplace`` is replaced."""

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
        """Record the bytes of a file; of texts those that [`text`] keeps. Of safetensors each tensor, and the header
        sorted, since the order of its metadata changes from process to process."""
        raw = path.read_bytes()
        if path.suffix == ".safetensors":
            end = 8 + int.from_bytes(raw[:8], "little")
            header = json.dumps(json.loads(raw[8:end]), sort_keys=True).encode()
            self._add(name, header + raw[end:], {"kind": "file", "bytes": len(raw)})
            for key, tensor in load_file(path).items():
                self.tensor(f"{name}/{key}", tensor)
            return
        try:
            self.text(name, raw.decode())
        except UnicodeDecodeError:
            self._add(name, raw, {"kind": "file", "bytes": len(raw)})

    def folder_of_files(self, name: str, folder: Path) -> None:
        """Record all files of a folder, and their names."""
        paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
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


#: What differs between runs and versions without a difference in behaviour, and what stands in its place.
_MASKS = (
    # Lines of progress, which are written every ten seconds.
    (re.compile(r"^.* MB (of .* MB )?\(\d+ ?%\).*\n?", re.MULTILINE), ""),
    (re.compile(r'("transformers_version": )"[^"]*"'), r'\1"VERSION"'),
    (re.compile(r"\b20\d\d-\d\d-\d\d([ T]\d\d:\d\d(:\d\d)?)?"), "DATE"),
    (re.compile(r"\b\d+(\.\d+)? ?(ms|s|seconds?|min|minutes?|h|hours?)\b"), "TIME"),
    (re.compile(r"\b\d+(\.\d+)? [kMG]?B/s"), "SPEED"),
)


def masked(text: str) -> str:
    """``text`` with words for dates, durations, speeds and the version of transformers, without lines of progress."""
    for pattern, replacement in _MASKS:
        text = pattern.sub(replacement, text)
    return text


def without_names(ptx: str) -> str:
    """PTX with numbers for the names of kernels and parameters, without comments and locations in sources."""
    ptx = re.sub(r"//.*", "", ptx)
    ptx = re.sub(r"^\s*\.(loc|file|section|b\d+)\b.*$", "", ptx, flags=re.MULTILINE)
    names = dict.fromkeys(re.findall(r"\.(?:entry|func)(?:\s*\([^)]*\))?\s+([\w$]+)", ptx))
    for number, name in enumerate(sorted(names, key=len, reverse=True)):
        ptx = re.sub(rf"\b{re.escape(name)}(?=\b|_param_\d)", f"function{number}", ptx)
    return "\n".join(line.rstrip() for line in ptx.splitlines() if line.strip())


def visible_text(html: str) -> str:
    """The text of a page, one line per piece, without scripts and styles."""
    html = re.sub(r"(?s)<(script|style)\b.*?</\1>|<!.*?>", "", html)
    pieces = (" ".join(unescape(piece).split()) for piece in re.split(r"<[^>]+>", html))
    return "\n".join(piece for piece in pieces if piece)
