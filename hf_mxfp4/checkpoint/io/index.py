# SPDX-License-Identifier: Apache-2.0
"""The index of shards: which file has which tensor."""

import json
import os
from pathlib import Path

from .reader import ShardError
from .replace import weight_names


def read_index(index: Path) -> dict[str, str]:
    """The files of the tensors, by the tensors' names, as an index of shards has them.

    Raises [`ShardError`] unless it has all that transformers reads of one.
    """
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
    except OSError as error:
        raise ShardError(f"{index.name} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ShardError(f"{index.name} is damaged: it is not JSON ({error})") from error
    parts = content if isinstance(content, dict) else {}
    places = parts.get("weight_map")
    if not isinstance(places, dict) or not places or not isinstance(parts.get("metadata"), dict):
        raise ShardError(f"{index.name} is damaged: it has no weight_map with the files of tensors, or no metadata")
    for name, file in places.items():
        if not isinstance(file, str) or Path(file).name != file or "\0" in file:
            raise ShardError(f"{index.name} is damaged: it gives {name} the place {file!r}, which names no file beside")
    return places


def check_local_index(name_or_path: str | os.PathLike | None, revision: str | None = None) -> None:
    """Raise as [`read_index`] for the index that transformers will read for a model, if it is on this machine already.

    Args:
        name_or_path: what a user gave to `from_pretrained`: a folder, or the name of a repository.
        revision: the commit of the repository.
    """
    if not name_or_path:
        return
    single, index = weight_names(None)
    if Path(name_or_path).is_dir():
        files = [Path(name_or_path) / name for name in (single, index)]
    else:
        from huggingface_hub import try_to_load_from_cache

        cached = [try_to_load_from_cache(str(name_or_path), name, revision=revision) for name in (single, index)]
        files = [Path(file) if isinstance(file, str) else None for file in cached]
    if files[1] is not None and files[1].is_file() and not (files[0] is not None and files[0].is_file()):
        read_index(files[1])
