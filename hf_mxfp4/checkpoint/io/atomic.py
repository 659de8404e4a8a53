# SPDX-License-Identifier: Apache-2.0
"""Folders that appear whole or not at all."""

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from ...files import sync_to_disk


class FolderError(ValueError):
    """A folder cannot be written where the user asked; the message says what to do instead."""


@contextlib.contextmanager
def atomic_folder(path: str | os.PathLike, *, overwrite: bool = False) -> Iterator[Path]:
    """A new folder beside ``path`` to write into, which takes the place of ``path`` when the context ends well.

    Its files are on the disk (fsync) before it gets its name. After an exception it is removed and ``path`` is what it
    was before. A killed process leaves it behind as ``.<name>.partial-<random>``, which can be deleted.

    An existing checkpoint is replaced only with ``overwrite``, as a whole: it is set aside, the new folder takes its
    name, then the old one is deleted. A process killed between the first two leaves both complete, the old one as
    ``.<name>.replaced-<random>``.

    Raises [`FolderError`] when ``path`` is a file, or a folder that is not empty and may not be replaced: without
    ``overwrite``, or when it holds subfolders or no `config.json`, so that it is more or other than a checkpoint.
    """
    # A link stays, and what it points to is replaced.
    target = Path(path).expanduser().resolve()
    _check_replaceable(target, overwrite)
    target.parent.mkdir(parents=True, exist_ok=True)
    mark = secrets.token_hex(8)
    partial = target.with_name(f".{target.name}.partial-{mark}")
    old = target.with_name(f".{target.name}.replaced-{mark}")
    partial.mkdir()
    try:
        yield partial
        for file in partial.iterdir():
            if file.is_file():
                sync_to_disk(file)
        sync_to_disk(partial)
        _check_replaceable(target, overwrite)
        if target.exists():
            target.rename(old)
        partial.rename(target)
        sync_to_disk(target.parent)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        if old.exists() and not target.exists():  # an error, or Ctrl-C, between the two
            old.rename(target)
        shutil.rmtree(partial, ignore_errors=True)


def _check_replaceable(target: Path, overwrite: bool) -> None:
    if not target.exists():
        return
    if not target.is_dir():
        raise FolderError(f"{target} is a file; give a folder")
    entries = list(target.iterdir())
    if not entries:
        return
    if not overwrite:
        raise FolderError(f"{target} is not empty; give a new folder, or overwrite=True (--overwrite)")
    if subfolders := sorted(entry.name for entry in entries if entry.is_dir()):
        raise FolderError(f"{target} is not replaced because it holds the folder {subfolders[0]}; give a new one")
    if not (target / "config.json").is_file():
        raise FolderError(f"{target} is not replaced because it has no config.json, so it is no checkpoint")
