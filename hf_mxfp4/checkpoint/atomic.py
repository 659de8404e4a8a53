# SPDX-License-Identifier: Apache-2.0
"""Folders and checkpoints that are replaced whole or not at all, whenever the process is killed."""

import contextlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from ..files import one_writer, sync_to_disk, write_json
from .folder import CONFIG, read_index
from .manifest import MANIFEST, read_manifest, weight_files, write_manifest
from .tensors import ShardError, read_header, write_metadata


_STAGING = ".saving-"
_SHARD = re.compile(r"(?P<stem>.*?)(?P<tag>-b)?(?P<count>-\d{5}-of-\d{5})\.safetensors")


class FolderError(ValueError):
    """A folder cannot be written where the user asked; the message says what to do instead."""


@contextlib.contextmanager
def atomic_folder(path: str | os.PathLike, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield a new folder next to ``path`` to write into, which replaces ``path`` when the context ends without error.

    Its files are on the disk (fsync) before it gets its name. After an exception ``path`` is unchanged. A killed
    process leaves ``.<name>.partial-<random>``, or what it was replacing as ``.<name>.replaced-<random>``.

    Raises [`FolderError`] when ``path`` is a file, or a folder that is not empty and may not be replaced: without
    ``overwrite``, or when it holds subfolders or no `config.json` and so is not just a checkpoint.
    """
    target = Path(path).expanduser().resolve()  # a link stays, and what it points to is replaced
    _check_replaceable(target, overwrite)
    target.parent.mkdir(parents=True, exist_ok=True)
    mark = secrets.token_hex(8)
    partial = target.with_name(f".{target.name}.partial-{mark}")
    old = target.with_name(f".{target.name}.replaced-{mark}")
    partial.mkdir()
    try:
        yield partial
        for file in (*partial.iterdir(), partial):
            sync_to_disk(file)
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
    if target.is_file():
        raise FolderError(f"{target} is a file; give a folder")
    entries = list(target.iterdir()) if target.is_dir() else []
    if not entries:
        return
    if not overwrite:
        raise FolderError(f"{target} is not empty; give a new folder, or overwrite=True (--overwrite)")
    if subfolders := sorted(entry.name for entry in entries if entry.is_dir()):
        raise FolderError(f"{target} is not replaced because it holds the folder {subfolders[0]}; give a new one")
    if not (target / CONFIG).is_file():
        raise FolderError(f"{target} is not replaced because it has no config.json, so it is no checkpoint")


@contextlib.contextmanager
def staged(folder: str | os.PathLike, variant: str | None = None) -> Iterator[Path]:
    """Yield a new folder inside ``folder`` to save a checkpoint into; when the context ends without error its files
    move up, with a manifest of the weights.

    ``folder`` may hold other files, so it is not replaced as a whole. One name decides which checkpoint is loaded:
    `model.safetensors` if it exists, else the index of shards. All that a name refers to is in place before the name
    is, so a process killed at any moment leaves the old checkpoint or the new one; what else it leaves (``.saving-*``,
    shards that no index names) is removed by the next save. After an exception ``folder`` is unchanged.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    staging = folder / f"{_STAGING}{secrets.token_hex(8)}"
    with contextlib.ExitStack() as stack:
        with one_writer(folder):
            staging.mkdir()
            stack.callback(shutil.rmtree, staging, ignore_errors=True)
            stack.enter_context(one_writer(staging))  # others see that it is in use
        # The folder is not locked while the context lasts: several ranks may have to save together.
        yield staging
        with one_writer(folder):
            _move_in(staging, folder, variant)
            for left in folder.glob(f"{_STAGING}*"):
                with one_writer(left, wait=False) as is_unused:
                    if is_unused:
                        shutil.rmtree(left, ignore_errors=True)


def is_staging(folder: str | os.PathLike) -> bool:
    """Return whether ``folder`` was made by [`staged`], for a save in progress."""
    return Path(folder).name.startswith(_STAGING)


def weight_names(variant: str | None = None) -> tuple[str, str]:
    """Return the names that transformers has for the file of all weights and for the index of shards."""
    infix = "" if variant is None else f".{variant}"
    return f"model{infix}.safetensors", f"model.safetensors.index{infix}.json"


def _weights_in(folder: Path, variant: str | None) -> set[str]:
    """Return the names in a folder of all weights of a variant: the file, the index, and shards old and new."""
    names = weight_names(variant)
    stem = names[0].removesuffix(".safetensors")
    found = {path.name: _SHARD.fullmatch(path.name) for path in folder.iterdir()}
    return {name for name, match in found.items() if name in names or match is not None and match["stem"] == stem}


def _move_in(staging: Path, folder: Path, variant: str | None) -> None:
    """Move the files of a new checkpoint up."""
    single, index = weight_names(variant)
    if (staging / index).is_file():
        _rename_shards(staging, index, _shards_of(folder / index))
    new, old = _weights_in(staging, variant), _weights_in(folder, variant)
    for file in staging.glob("*.safetensors"):
        if metadata := read_header(file).metadata:
            write_metadata(file, metadata)
    if new:
        kept = {}
        with contextlib.suppress(ShardError):
            kept = read_manifest(folder)
        kept = {name: kept[name] for name in kept.keys() - old if not (staging / name).exists()}
        write_manifest(staging, weight_files(staging), kept)
        (folder / MANIFEST).unlink(missing_ok=True)
    files = [path.relative_to(staging).as_posix() for path in staging.rglob("*") if path.is_file()]
    # The names that decide what is loaded come last.
    decisive = [name for name in (single, index, CONFIG, MANIFEST) if name in files]
    for file in files:
        sync_to_disk(staging / file)
    for file in [*(name for name in files if name not in decisive), *decisive]:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        os.replace(staging / file, folder / file)
        if file == index:
            (folder / single).unlink(missing_ok=True)
    sync_to_disk(folder)
    for name in sorted(old - new, key=lambda name: name != index) if new else ():  # what names shards goes first
        (folder / name).unlink(missing_ok=True)


def _rename_shards(staging: Path, index: str, taken: set[str]) -> None:
    """Give the new shards names that the old index does not use; there are two sets of names, and it uses one."""
    shards = _shards_of(staging / index)
    if not shards & taken:
        return
    renamed = {name: _SHARD.sub(r"\g<stem>-b\g<count>.safetensors", name) for name in shards}
    content = json.loads((staging / index).read_text(encoding="utf-8"))
    content["weight_map"] = {tensor: renamed[name] for tensor, name in content["weight_map"].items()}
    for name, new in renamed.items():
        os.replace(staging / name, staging / new)
    write_json(staging / index, content, sort_keys=True)


def _shards_of(index: Path) -> set[str]:
    """Return the files that an index names; none for one that is missing or damaged."""
    with contextlib.suppress(ShardError):
        return set(read_index(index).values())
    return set()
