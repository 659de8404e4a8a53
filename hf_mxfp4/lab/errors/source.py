# SPDX-License-Identifier: Apache-2.0
"""Where a checkpoint comes from: a folder, one file, or the Hugging Face Hub, one safetensors file at a time."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...checkpoint import ShardError


INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


class SourceError(ValueError):
    """There is nothing to analyse where the user pointed; the message says what to give instead."""


class DamagedSourceError(SourceError):
    """The index or `config.json` of what the user pointed at cannot be read.

    Attributes:
        file: its name.
    """

    def __init__(self, file: Path, message: str):
        super().__init__(message)
        self.file = file.name


@dataclass(frozen=True)
class Source:
    """A checkpoint as a list of safetensors files.

    Attributes:
        name: last part of the folder's path, the file's stem, or the hub id.
        kind: ``"folder"``, ``"file"`` or ``"hub"``.
        config: contents of `config.json`; empty when there is none.
        shards: file names, sorted.
        expected: per file, the names that the index promises in it; empty without an index.
        total_bytes: of a hub model, the size of its tensors as far as its index gives it.
    """

    name: str
    kind: str
    config: dict[str, Any]
    shards: tuple[str, ...]
    expected: dict[str, tuple[str, ...]] = field(default_factory=dict)
    total_bytes: int | None = None
    locate: Callable[[str], Path] = field(kw_only=True, repr=False)

    def path(self, shard: str) -> Path:
        """The file on this machine; a hub file is downloaded now. Raises [`ShardError`] when it cannot be had."""
        path = self.locate(shard)
        if not path.is_file():
            raise ShardError(f"{shard} is missing")
        return path

    def identity(self, path: Path) -> list:
        """What changes when the contents of a file may have: its size and the time of its last change."""
        stat = path.stat()
        return [stat.st_size, stat.st_mtime_ns]


def open_source(model: str, download: Callable[[str, str], str] | None = None) -> Source:
    """The checkpoint that a user means by ``model``: a folder, a .safetensors file, or a hub id.

    Args:
        download: ``(repo_id, filename) -> path`` for hub files, `huggingface_hub.hf_hub_download` by default.

    Raises [`SourceError`] when there is no such thing or it holds no safetensors.
    """
    path = Path(model).expanduser()
    if path.is_file():
        if path.suffix != ".safetensors":
            raise SourceError(f"{model} is not a .safetensors file; give one, a checkpoint's folder or a hub id")
        config = _read_json(path.parent / "config.json")
        return Source(path.stem, "file", config, (path.name,), locate=path.parent.joinpath)
    if path.is_dir():
        return _folder(path)
    if path.is_absolute() or model.startswith((".", "~")) or not _HUB_ID.fullmatch(model):
        raise SourceError(f"{model} does not exist; give a checkpoint's folder, a .safetensors file or a hub id")
    return _hub(model, download or _hub_download)


def _folder(path: Path) -> Source:
    config = _read_json(path / "config.json")
    name = path.resolve().name
    found = sorted(file.name for file in path.glob("*.safetensors"))
    if (path / INDEX).is_file():
        expected = _shards_of(_read_json(path / INDEX), path / INDEX)
        return Source(name, "folder", config, tuple(sorted(expected)), expected, locate=path.joinpath)
    if not found:
        other = sorted({file.suffix for file in path.iterdir() if file.suffix in (".bin", ".pt", ".pth", ".gguf")})
        hint = f"; it has {', '.join(other)} files: convert them to safetensors first" if other else ""
        raise SourceError(f"{path} holds no .safetensors file{hint}")
    if (path / "adapter_config.json").is_file() and not config:
        raise SourceError(f"{path} holds an adapter, not a model; merge it into its base model first")
    found = [SINGLE] if SINGLE in found else found
    return Source(name, "folder", config, tuple(found), locate=path.joinpath)


def _hub(repo: str, download: Callable[[str, str], str]) -> Source:
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    def fetch(file: str) -> Path:
        try:
            return Path(download(repo, file))
        except EntryNotFoundError as error:
            # Offline, "not in the cache" is an EntryNotFoundError too, and says nothing about the repository.
            if isinstance(error, LocalEntryNotFoundError):
                raise ShardError(
                    f"{file} of {repo} is not in the local cache, and the hub cannot be reached"
                ) from error
            raise ShardError(f"{repo} has no {file}") from error
        except (HfHubHTTPError, HFValidationError, OSError) as error:
            raise ShardError(f"{file} of {repo} cannot be downloaded: {str(error).splitlines()[0]}") from error

    try:
        config_path = fetch("config.json")
    except ShardError as error:
        raise SourceError(f"{repo} is neither a local path nor a readable model on the hub: {error}") from error
    config = _read_json(config_path)
    try:
        index_path = fetch(INDEX)
    except ShardError:
        return Source(repo, "hub", config, (SINGLE,), locate=fetch)
    index = _read_json(index_path)
    expected = _shards_of(index, index_path)
    metadata = index.get("metadata")
    size = metadata.get("total_size") if isinstance(metadata, dict) else None
    return Source(repo, "hub", config, tuple(sorted(expected)), expected, size, locate=fetch)


def _hub_download(repo: str, file: str) -> str:
    from huggingface_hub import hf_hub_download

    return hf_hub_download(repo, file)


def _shards_of(index: dict, path: Path) -> dict[str, tuple[str, ...]]:
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        raise DamagedSourceError(path, f"{path} has no usable weight_map; is it complete?")
    if outside := [shard for shard in weight_map.values() if Path(shard).name != shard]:
        raise DamagedSourceError(path, f"{path} points outside of its folder: {outside[0]!r}")
    shards: dict[str, list[str]] = {}
    for name, shard in weight_map.items():
        shards.setdefault(shard, []).append(name)
    return {shard: tuple(names) for shard, names in shards.items()}


def _read_json(path: Path) -> dict:
    if not path.is_file():
        return {}
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DamagedSourceError(path, f"{path} cannot be read: {error}") from error
    if not isinstance(contents, dict):
        raise DamagedSourceError(path, f"{path} is not a JSON object")
    return contents
