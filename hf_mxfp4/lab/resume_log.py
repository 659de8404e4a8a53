# SPDX-License-Identifier: Apache-2.0
"""A log of JSON lines that makes a long command resumable; its first line says what the others are results of."""

import json
import os
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import IO, Any

from ..files import break_links, lock


class ProgressMismatch(ValueError):
    """The log belongs to another checkpoint, other options or another version, or is damaged."""


class ResumeLog:
    """Keep results on disk as soon as they are known. Use as a context manager.

    Args:
        path: the log; made with its folder if need be.
        header: what the results are of; kept in the first line.
        key: what a line is the result of.
        overwrite: start over whatever the log holds.

    Attributes:
        done: the lines by their keys.

    Raises [`ProgressMismatch`] when the log was written for something else, or another process is writing it.
    """

    def __init__(
        self,
        path: Path,
        header: Mapping[str, Any],
        key: Callable[[Mapping[str, Any]], Hashable],
        *,
        overwrite: bool = False,
    ):
        self.path = path
        self._header = dict(header)
        self._key = key
        self.done: dict[Any, dict] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.is_symlink():  # those are refused
            break_links(path)
        self._stream: IO[bytes] = open(path, "r+b", opener=_open_or_make)
        try:
            if not lock(self._stream.fileno(), wait=False):
                raise ProgressMismatch(f"another process is writing {path}; wait for it, or give another folder")
            kept = 0 if overwrite else self._load()
            self._stream.truncate(kept)
            self._stream.seek(kept)
            if not kept:
                self._write(self._header)
        except BaseException:
            self._stream.close()
            raise

    def __enter__(self):
        return self

    def __exit__(self, *exception) -> None:
        os.fsync(self._stream.fileno())
        self._stream.close()

    def __len__(self) -> int:
        return len(self.done)

    def add(self, line: dict) -> None:
        """Append a result."""
        self.done[self._key(line)] = line
        self._write(line)

    def _write(self, line: dict) -> None:
        self._stream.write(json.dumps(line, separators=(",", ":"), allow_nan=False).encode() + b"\n")
        self._stream.flush()

    def _load(self) -> int:
        """Read the log, and return how many of its bytes to keep. A last line that a killed process left half written
        is dropped."""
        content = self._stream.read()
        lines = content.split(b"\n")
        torn = lines.pop()  # empty when the file ends as it should
        parsed: list[dict] = []
        for number, text in enumerate(lines, 1):
            try:
                line = json.loads(text)
                if not isinstance(line, dict):
                    raise ValueError("not a JSON object")
                if parsed:
                    self.done[self._key(line)] = line
                parsed.append(line)
            except (ValueError, LookupError, TypeError):
                raise ProgressMismatch(
                    f"line {number} of {self.path} is damaged; start over with --overwrite, or give another folder"
                ) from None
        if len(parsed) < 2:
            return 0  # no result yet: nothing that could be mixed
        self._check_header(parsed[0])
        return len(content) - len(torn)

    def _check_header(self, header: dict) -> None:
        for key, now in self._header.items():
            before = header.get(key)
            if before == now:
                continue
            held = f"{key} {_words(before)}, not {_words(now)}"
            if key == "files":  # names and checksums of them, which say little
                held = "other files of the model than there are now: they were changed, or it is another model"
            raise ProgressMismatch(
                f"{self.path} holds results for {held}; start over with --overwrite, or give another folder"
            )


def _open_or_make(path: str, flags: int) -> int:
    """Open a file that one process may write at a time; not through a link, which may be a stranger's."""
    return os.open(path, flags | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)


def _words(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return str(value)
