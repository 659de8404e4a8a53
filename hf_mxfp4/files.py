# SPDX-License-Identifier: Apache-2.0
"""Values as JSON can hold them, files that are replaced in one step, and files of JSON lines."""

import contextlib
import errno
import fcntl
import json
import math
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO


#: What the names of drafts begin with.
_DRAFT = ".draft-"


def json_clean(value: Any) -> Any:
    """``value`` with null for numbers that JSON has no word for, lists for tuples, and strings for keys."""
    if isinstance(value, dict):
        return {str(key): json_clean(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_clean(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def printable(text: str) -> str:
    """Return ``text`` with control characters as escapes: a stranger's names cannot drive a terminal."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


@contextlib.contextmanager
def replacing(path: str | Path) -> Iterator[BinaryIO]:
    """Open a new file that takes the place of ``path`` in one step when the context ends well, with its permissions.

    It is a draft of a name that nobody can foresee, in the same folder (made if it is missing), and on the disk before
    it gets the name ``path``. After an exception it is removed; a killed process may leave it, see [`is_draft`].
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{_DRAFT}{secrets.token_hex(8)}")
    try:
        with open(draft, "x+b") as file:  # fails for a name that exists, a link included
            yield file
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            shutil.copymode(path, draft)
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def replace_file(path: str | Path, content: str | bytes) -> None:
    """Write a file through [`replacing`]. Text is UTF-8; what cannot be encoded is written with backslashes."""
    with replacing(path) as file:
        file.write(content.encode(errors="backslashreplace") if isinstance(content, str) else content)


def break_links(path: str | Path) -> None:
    """Make ``path`` a file of its own if it is a link, symbolic or hard, before it is written in place: a folder may be
    a copy made of links, or a stranger's."""
    path = Path(path)
    if path.is_symlink() or (path.is_file() and path.stat().st_nlink > 1):
        replace_file(path, path.read_bytes() if path.is_file() else b"")


def regular_file(path: Path) -> Path:
    """Return ``path``. Raises `OSError` for a pipe or a device, which might never end."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return path


def is_draft(name: str) -> bool:
    """Whether a file was left behind by a process that was killed in [`replacing`]."""
    return name.startswith(_DRAFT)


def lock(descriptor: int, *, wait: bool = True) -> bool:
    """Lock an open file or folder until it is closed. Without ``wait``, return whether that was possible; file
    systems without locks count as possible."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


@contextlib.contextmanager
def one_writer(folder: str | Path, *, wait: bool = True) -> Iterator[bool]:
    """Let one process at a time into this context for a folder. The others wait, or without ``wait`` get `False`."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        yield lock(descriptor, wait=wait)
    finally:
        os.close(descriptor)


def write_json(path: str | Path, value: Any, *, indent: int = 2, **options: Any) -> None:
    """[`replace_file`] with a value as indented JSON; ``options`` are those of `json.dumps`."""
    replace_file(path, json.dumps(value, indent=indent, **options) + "\n")


def append_lines(path: str | Path, entries: Iterable[Any], **options: Any) -> None:
    """Append each entry as a line of JSON, after ending a line that a killed process left half written."""
    break_links(path)
    with open(path, "a+b") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write("".join(json.dumps(entry, **options) + "\n" for entry in entries).encode())


def sync_to_disk(path: Path) -> None:
    """Have what was written to a file, or the names in a folder, reach the disk."""
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
