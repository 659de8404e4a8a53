# SPDX-License-Identifier: Apache-2.0
"""Put a new checkpoint in the place of an old one, file by file, so that a killed process leaves one of them loadable.

The folder may hold more than the checkpoint (tokenizer, optimizer state, subfolders), and others may be writing there,
so it is not replaced as a whole. What decides which checkpoint is loaded is one name: `model.safetensors` where it
exists, else the index of shards. All that a name refers to is in place before the name is.
"""

import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ...files import one_writer, sync_to_disk, write_json
from .manifest import MANIFEST, FileRecord, read_manifest, weight_files, write_manifest
from .reader import ShardError
from .writer import sort_metadata


CONFIG = "config.json"
_STAGING = ".saving-"
_SHARD = re.compile(r"(?P<stem>.*?)(?P<tag>-b)?(?P<count>-\d{5}-of-\d{5})\.safetensors")


@contextmanager
def staged(folder: str | os.PathLike, variant: str | None = None, written: list[str] | None = None) -> Iterator[Path]:
    """A new folder inside ``folder`` to save a checkpoint into; its files move up when the context ends well, with a
    manifest of the weights. Several processes may save into one folder: the last one to finish wins.

    Killed at any moment before the last file has moved, ``folder`` still holds the old checkpoint, or already the new
    one; what a killed process leaves in ``.saving-*`` and in shards that no index names is removed by the next save. If
    `config.json` changes as well, it moves right after the weights.

    After an exception ``folder`` is what it was. Raises `OSError` when it cannot be written.

    Args:
        written: gets the names of the files that moved up.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    staging = folder / f"{_STAGING}{secrets.token_hex(8)}"
    with ExitStack() as stack:
        with one_writer(folder):
            staging.mkdir()
            stack.callback(shutil.rmtree, staging, ignore_errors=True)
            stack.enter_context(one_writer(staging))  # others see that it is in use
        # The folder is not locked while the context lasts: several ranks may have to save together.
        yield staging
        with one_writer(folder):
            names = _move_in(staging, folder, variant)
            for left in folder.glob(f"{_STAGING}*"):
                with one_writer(left, wait=False) as is_unused:
                    if is_unused:
                        shutil.rmtree(left, ignore_errors=True)
        if written is not None:
            written.extend(names)


def is_staging(folder: str | os.PathLike) -> bool:
    """Whether ``folder`` is one that [`staged`] made: what is saved there is a part of a save that is going on."""
    return Path(folder).name.startswith(_STAGING)


def weight_names(variant: str | None) -> tuple[str, str]:
    """Names of the file of all weights and of the index of shards, as transformers has them."""
    infix = "" if variant is None else f".{variant}"
    return f"model{infix}.safetensors", f"model.safetensors.index{infix}.json"


def is_shard(name: str, single: str) -> bool:
    """Whether ``name`` is one of the files that the weights of the file ``single`` are split into."""
    match = _SHARD.fullmatch(name)
    return match is not None and match["stem"] == single.removesuffix(".safetensors")


def _move_in(staging: Path, folder: Path, variant: str | None) -> list[str]:
    """Move the files of a new checkpoint up, and return their names."""
    single, index = weight_names(variant)
    old_shards = shards_of(folder / index)
    if (staging / index).is_file():
        _rename_shards(staging, index, old_shards)
    new_shards = shards_of(staging / index)
    for name in {single, *new_shards}:
        if (staging / name).is_file():
            sort_metadata(staging / name)
    new_weights = (staging / single).is_file() or (staging / index).is_file()
    if new_weights:
        write_manifest(staging, weight_files(staging), _kept_records(staging, folder, variant))
    files = [path.relative_to(staging) for path in staging.rglob("*") if path.is_file()]
    decisive = [Path(name) for name in (single, index, CONFIG, MANIFEST)]
    for file in files:
        sync_to_disk(staging / file)
    if new_weights:
        (folder / MANIFEST).unlink(missing_ok=True)
    for file in files:
        if file not in decisive:
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            os.replace(staging / file, folder / file)
    if Path(single) in files:
        os.replace(staging / single, folder / single)
    elif Path(index) in files:
        os.replace(staging / index, folder / index)
        (folder / single).unlink(missing_ok=True)
    if Path(CONFIG) in files:
        os.replace(staging / CONFIG, folder / CONFIG)
    if new_weights:
        os.replace(staging / MANIFEST, folder / MANIFEST)
    sync_to_disk(folder)
    if Path(single) in files:
        (folder / index).unlink(missing_ok=True)
    if new_weights:
        for path in folder.iterdir():
            if is_shard(path.name, single) and path.name not in new_shards:
                path.unlink()
    return [file.as_posix() for file in files]


def _kept_records(staging: Path, folder: Path, variant: str | None) -> dict[str, FileRecord]:
    """Return what the manifest of a folder records of files that stay."""
    single, index = weight_names(variant)
    try:
        records = read_manifest(folder)
    except ShardError:
        return {}
    return {
        name: record
        for name, record in records.items()
        if name not in (single, index) and not is_shard(name, single) and not (staging / name).exists()
    }


def _rename_shards(staging: Path, index: str, taken: set[str]) -> None:
    """Give the new shards names that the old index does not use; there are two sets of names, and it uses one."""
    shards = shards_of(staging / index)
    if not shards & taken:
        return
    renamed = {name: _SHARD.sub(r"\g<stem>-b\g<count>.safetensors", name) for name in shards}
    content = json.loads((staging / index).read_text(encoding="utf-8"))
    content["weight_map"] = {tensor: renamed[name] for tensor, name in content["weight_map"].items()}
    for name, new in renamed.items():
        os.replace(staging / name, staging / new)
    write_json(staging / index, content, sort_keys=True)


def shards_of(index: Path) -> set[str]:
    """Files that an index names; none for one that is missing or unreadable, which nothing can be loaded through."""
    try:
        return set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return set()
