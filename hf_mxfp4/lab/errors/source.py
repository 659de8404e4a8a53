# SPDX-License-Identifier: Apache-2.0
"""Find the checkpoint that a user names: a folder, one file, or a model on the Hugging Face Hub."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...checkpoint import Problem, ShardError, StoredTensor, read_header
from ...checkpoint.folder import model_inside, read_index, read_json, weights_name
from ...config import QUANT_METHOD, MXFP4RLConfig
from ...numerics import QuantScheme


_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


class SourceError(ValueError):
    """There is nothing to work on where the user pointed; the message says what to give instead."""


@dataclass(frozen=True)
class Source:
    """A checkpoint as a list of safetensors files.

    Attributes:
        name: last part of the folder's path, the file's stem, or the hub id.
        kind: ``"folder"``, ``"file"`` or ``"hub"``.
        folder: where the files are.
        config: contents of `config.json`; empty when there is none.
        expected: names of the files, sorted, and the tensors that the index promises in each; none without an index.
    """

    name: str
    kind: str
    folder: Path
    config: dict[str, Any]
    expected: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def scheme(self) -> MXFP4RLConfig | None:
        """The scheme that the checkpoint was trained under; `None` for one that is not quantized.

        Raises [`SourceError`] when the weights are stored quantized: their error cannot be measured any more.
        """
        options = self.config.get("quantization_config")
        if not options:
            return None
        method = None
        if isinstance(options, dict):
            method = options.get("quant_method")
        if method != QUANT_METHOD or options.get("mode") == "packed":
            what = repr(method)
            if method == QUANT_METHOD:
                what = f"{QUANT_METHOD!r}, mode='packed'"
            raise SourceError(
                f"{self.name} stores quantized weights already (quant_method {what} in its config.json), so their "
                "original values, and the error, are gone; analyse the full-precision checkpoint they were made from, "
                "or compare the two: hf-mxfp4 compare ORIGINAL PACKED"
            )
        try:
            return MXFP4RLConfig.from_dict(options)
        except (TypeError, ValueError) as error:
            raise SourceError(f"the quantization_config of {self.name} cannot be read: {error}") from error

    @property
    def weight_scheme(self) -> QuantScheme | None:
        """How [`scheme`] quantizes weights; `None` without one. Raises [`SourceError`] for rotations and the like."""
        scheme = self.scheme
        if scheme is None:
            return None
        if reason := scheme.weights_alone_unsupported_reason:
            raise SourceError(
                f"weights alone do not show the error of {self.name}: {reason}; use eval, or give --scheme"
            )
        return scheme.weight_scheme

    @property
    def n_bytes(self) -> int:
        """Bytes of the files that are there."""
        paths = [self.folder / shard for shard in self.expected]
        return sum(path.stat().st_size for path in paths if path.is_file())

    def path(self, shard: str) -> Path:
        """Return the path of a file. Raises [`ShardError`] when it is missing."""
        path = self.folder / shard
        if not path.is_file():
            raise ShardError(f"{shard} is missing")
        return path

    def shards(self, problems: list[Problem]) -> Iterator[tuple[str, list[StoredTensor]]]:
        """Yield name and tensors of every file that can be read; the others are added to ``problems``, as are tensors
        that the index promises and a file lacks."""
        for shard, expected in self.expected.items():
            try:
                tensors = read_header(self.path(shard)).tensors
            except ShardError as error:
                lost = ""
                if expected:
                    lost = f" ({len(expected)} tensors)"
                problems.append(Problem(shard, f"{error}{lost}"))
                continue
            present = {tensor.name for tensor in tensors}
            for name in expected:
                if name not in present:
                    problems.append(Problem(name, f"{shard} lacks it, though the index says otherwise"))
            yield shard, tensors

    def tensor_names(self) -> list[str]:
        """Return all tensor names that the index or, without one, the readable headers give."""
        promised = [name for names in self.expected.values() for name in names]
        if promised:
            return promised
        return [tensor.name for _, tensors in self.shards([]) for tensor in tensors]

    def describe(self) -> dict[str, Any]:
        """Return for reports the kind of source, architecture, and number of files."""
        architectures = self.config.get("architectures")
        architecture = None
        if isinstance(architectures, list) and architectures:
            architecture = architectures[0]
        return {"kind": self.kind, "architecture": architecture, "files": len(self.expected)}


def local_path(model: str, patterns: Sequence[str] = ("*.safetensors", "*.json")) -> tuple[Path, str]:
    """Return where the files of a model are, and what it is: a ``"folder"``, a ``"file"``, or on the ``"hub"``, whose
    files that match ``patterns`` are downloaded into the usual cache.

    Raises [`SourceError`] when there is no such thing.
    """
    path = Path(model).expanduser()
    if path.is_file():
        if path.suffix != ".safetensors":
            raise SourceError(f"{model} is not a .safetensors file; give one, a checkpoint's folder or a hub id")
        return path, "file"
    if path.is_dir():
        return path, "folder"
    check_hub_id(model)
    return _download(model, list(patterns)), "hub"


def check_hub_id(model: str) -> None:
    """Raise [`SourceError`] for a model that is no local path and cannot be on the Hub."""
    if Path(model).is_absolute() or model.startswith((".", "~")) or not _HUB_ID.fullmatch(model):
        raise SourceError(f"{model} does not exist; give a checkpoint's folder, a .safetensors file or a hub id")


def open_source(model: str) -> Source:
    """Open the checkpoint at [`local_path`].

    Raises [`SourceError`] when it holds no safetensors, and another `ValueError` for a damaged index or config.
    """
    path, kind = local_path(model)
    folder = path
    name = model
    if kind == "file":
        folder = path.parent
        name = path.stem
    elif kind == "folder":
        name = path.resolve().name
    config: dict[str, Any] = {}
    if (folder / "config.json").is_file():
        config = read_json(folder / "config.json")
    weights: str | None = path.name
    if kind != "file":
        weights = weights_name(folder, config)
    if weights is not None and weights.endswith(".json"):
        shards: dict[str, tuple[str, ...]] = {}
        for tensor, shard in sorted(read_index(path / weights).items(), key=lambda item: item[1]):
            shards[shard] = (*shards.get(shard, ()), tensor)
        return Source(name, kind, path, config, shards)
    # Without an index: the one file, or whatever there is.
    if weights:
        files = [weights]
    else:
        files = sorted(file.name for file in path.glob("*.safetensors"))
    if not files:
        other = sorted({file.suffix for file in path.iterdir() if file.suffix in (".bin", ".pt", ".pth", ".gguf")})
        inside = model_inside(path)
        hint = ""
        if other:
            hint = f"; it has {', '.join(other)} files: convert them to safetensors first"
        elif inside:
            hint = f"; give {inside}"
        raise SourceError(f"{model} holds no .safetensors file{hint}")
    if (folder / "adapter_config.json").is_file() and not config:
        raise SourceError(f"{model} holds an adapter, not a model; merge it into its base model first")
    return Source(name, kind, folder, config, dict.fromkeys(files, ()))


def _download(repo: str, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        folder = snapshot_download(repo, allow_patterns=patterns, ignore_patterns=["*/*", "consolidated*"])
        if nested := [pattern for pattern in patterns if "/" in pattern]:
            snapshot_download(repo, allow_patterns=nested)
        return Path(folder)
    except LocalEntryNotFoundError as error:
        reason = "it is not in the local cache, and the Hub cannot be reached"
        raise SourceError(f"{repo} is neither a local path nor a readable model on the Hub: {reason}") from error
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise SourceError(f"{repo} is neither a local path nor a readable model on the Hub: {reason}") from error
