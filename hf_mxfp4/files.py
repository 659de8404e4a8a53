# SPDX-License-Identifier: Apache-2.0
"""Values as JSON can hold them, files that are replaced in one step, and files of JSON lines."""

import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO


def is_number(value: Any) -> bool:
    """Whether ``value`` is a finite number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def json_clean(value: Any) -> Any:
    """``value`` with null for numbers that JSON has no word for, lists for tuples, and strings for keys."""
    if isinstance(value, dict):
        return {str(key): json_clean(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_clean(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def printable(text: str) -> str:
    """Return ``text`` with control characters as escapes, so that a name from a stranger's file cannot drive a
    terminal."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def replace_file(path: str | Path, content: str | bytes, *, sync: bool = False) -> None:
    """Write a file that appears whole or stays what it was; its folder is made where need be.

    A killed process may leave a draft beside it (see [`draft_of`]). With ``sync`` the file has reached the disk before
    it gets its name, so that a power failure cannot leave an empty one.
    """
    path, draft = Path(path), draft_of(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft.write_bytes(content.encode() if isinstance(content, str) else content)
    if sync:
        sync_to_disk(draft)
    os.replace(draft, path)


def draft_of(path: str | Path) -> Path:
    """Return where [`replace_file`] writes what will be ``path``."""
    return Path(path).with_name(f"{Path(path).name}.part")


def write_json(path: str | Path, value: Any, *, indent: int = 2, sync: bool = False, **options: Any) -> None:
    """[`replace_file`] with a value as indented JSON and a line break at its end; ``options`` are those of
    `json.dumps`."""
    replace_file(path, json.dumps(value, indent=indent, **options) + "\n", sync=sync)


def append_lines(path: str | Path, entries: Iterable[Any], **options: Any) -> None:
    """Append each entry as a line of JSON, after ending a line that a killed process left half written; ``options`` are
    those of `json.dumps`."""
    with open(path, "a+b") as file:
        if file.tell() and not _ends_with_newline(file):
            file.write(b"\n")
        file.write("".join(json.dumps(entry, **options) + "\n" for entry in entries).encode())


def sync_to_disk(path: Path) -> None:
    """Have what was written to a file, or the names in a folder, reach the disk."""
    if os.name == "nt" and path.is_dir():  # folders cannot be opened there
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _ends_with_newline(file: BinaryIO) -> bool:
    file.seek(-1, os.SEEK_END)
    return file.read(1) == b"\n"
