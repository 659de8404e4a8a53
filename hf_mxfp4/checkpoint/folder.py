# SPDX-License-Identifier: Apache-2.0
"""A checkpoint folder: its safetensors files, read one tensor at a time and written shard by shard; its `config.json`,
and the structure of the model that it is of."""

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError, safe_open
from safetensors.torch import _TYPES, save_file

from ..files import regular_file, write_json


CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
#: Key of `config.json` under which transformers looks for the name of the weights first.
WEIGHTS_KEY = "transformers_weights"
#: Layers or experts.
_MOST_LAYERS = 10_000
#: Conversions hold one shard in memory.
MAX_SHARD_SIZE = "5GB"
_DTYPES = {**_TYPES, "F8_E8M0": torch.float8_e8m0fnu}


class ShardError(ValueError):
    """A weight file that cannot be read: missing, truncated or damaged. The message names the file."""


@dataclass(frozen=True)
class TensorInfo:
    """Name, dtype and shape of a tensor in a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class StoredTensor(TensorInfo):
    """One tensor of a weight file."""

    file: Path

    def read(self, start: int | None = None, stop: int | None = None) -> torch.Tensor:
        """Return all values, or slices ``start`` to ``stop`` of the first axis. Raises [`ShardError`]."""
        try:
            with safe_open(self.file, "pt") as opened:
                if start is None:
                    return opened.get_tensor(self.name)
                return opened.get_slice(self.name)[start:stop]
        except (OSError, SafetensorError) as error:
            raise _unreadable(self.file, error) from error


@dataclass(frozen=True)
class FileHeader:
    """The header of a safetensors file: its tensors in the order of their bytes, and its metadata."""

    file: Path
    tensors: list[StoredTensor]
    metadata: dict[str, str]


@dataclass(frozen=True)
class NewTensor(TensorInfo):
    """A tensor of a file to be written, whose values are made when they are needed."""

    make: Callable[[], torch.Tensor]

    def to(self, dtype: torch.dtype) -> "NewTensor":
        """Return the tensor in another dtype."""
        return replace(self, dtype=dtype, make=lambda: self.make().to(dtype))


def cast_tensors(tensors: Iterable[NewTensor], cast: Set[str], dtype: torch.dtype) -> list[NewTensor]:
    """Return ``tensors`` with those that ``cast`` names in ``dtype``."""
    result = []
    for tensor in tensors:
        if tensor.name in cast:
            tensor = tensor.to(dtype)
        result.append(tensor)
    return result


def new_tensors(specs: Mapping[str, torch.Tensor], make: Callable[[], Mapping[str, torch.Tensor]]) -> list[NewTensor]:
    """Return tensors like ``specs`` that ``make`` makes all at once, when the first is written."""
    values: dict[str, torch.Tensor] = {}

    def take(name: str) -> torch.Tensor:
        if not values:
            values.update(make())
        return values.pop(name)

    return [NewTensor(name, spec.dtype, tuple(spec.shape), partial(take, name)) for name, spec in specs.items()]


def read_header(file: str | os.PathLike) -> FileHeader:
    """Raise [`ShardError`] for a file that is missing, truncated, or whose header contradicts itself or the file."""
    file = Path(file)
    if file.exists() and not file.is_file():  # reading a pipe would never end
        raise ShardError(f"{file.name} is not a file")
    try:
        str(file).encode()
    except UnicodeEncodeError as error:
        raise ShardError(f"{file.name} cannot be read: safetensors needs a path in UTF-8; rename the folder") from error
    try:
        with safe_open(file, "pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.offset_keys()}
            metadata = dict(opened.metadata() or {})
    except (OSError, SafetensorError) as error:
        raise _unreadable(file, error) from error
    tensors = []
    for name, stored in slices.items():
        dtype = stored.get_dtype()
        if dtype not in _DTYPES:
            raise ShardError(f"{file.name}: {name} has the unknown dtype {dtype}")
        tensors.append(StoredTensor(name, _DTYPES[dtype], tuple(stored.get_shape()), file))
    return FileHeader(file, tensors, metadata)


def tensors_by_name(headers: Iterable[FileHeader]) -> dict[str, StoredTensor]:
    """Return all tensors of a checkpoint. Raises [`ShardError`] for one that two files have."""
    by_name: dict[str, StoredTensor] = {}
    for header in headers:
        for tensor in header.tensors:
            if tensor.name in by_name:
                first = by_name[tensor.name].file.name
                raise ShardError(f"{tensor.name} is both in {first} and in {header.file.name}")
            by_name[tensor.name] = tensor
    return by_name


def write_shards(folder: Path, tensors: Sequence[NewTensor], metadata: Mapping[str, str]) -> list[Path]:
    """Write safetensors files, and an index if there are several, as `save_pretrained` does; return the files."""
    by_name = {tensor.name: tensor for tensor in tensors}
    split = split_state_dict_into_shards_factory(
        by_name,
        get_storage_size=lambda tensor: tensor.nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=MAX_SHARD_SIZE,
    )
    shards = {folder / file: names for file, names in split.filename_to_tensors.items() if names}
    for file, names in shards.items():
        values = {name: by_name[name].make().contiguous() for name in names}
        save_file(values, file, {"format": "pt", **metadata})
        del values  # before those of the next file are made
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        write_json(folder / INDEX, index, sort_keys=True)
    return list(shards)


def write_metadata(file: Path, metadata: Mapping[str, str]) -> None:
    """Replace the metadata in a header by others that are no longer, sorted: the same model gives the same bytes."""
    with open(file, "r+b") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(length))
        header["__metadata__"] = dict(sorted(metadata.items()))
        # The header may end in spaces, so that the tensors stay where they are.
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode().ljust(length)
        if len(text) != length:
            raise ValueError(f"the header of {file.name} has {length} bytes, and needs {len(text)}")
        stream.seek(8)
        stream.write(text)


def _unreadable(file: Path, error: Exception) -> ShardError:
    """Return the error for a file that could not be read, with what is wrong with it."""
    if isinstance(error, FileNotFoundError):
        return ShardError(f"{file.name} is missing")
    if isinstance(error, OSError) and error.strerror:
        return ShardError(f"{file.name} cannot be read: {error.strerror}")
    return ShardError(f"{file.name} is damaged, truncated or not a safetensors file: {error}")


# ---- the folder -----------------------------------------------------------------------------------------------------


class CheckpointError(ValueError):
    """A checkpoint that cannot be read or converted; the message says which part and what to do."""


class RemoteCodeError(CheckpointError):
    """A model that needs code from the Hub, which is never run here."""


@dataclass(frozen=True)
class CheckpointFolder:
    """The contents of `config.json` and the stored tensors by name, in the order of the shards' names."""

    path: Path
    config: dict[str, Any]
    tensors: Mapping[str, StoredTensor]

    @property
    def quantization(self) -> dict[str, Any]:
        """The `quantization_config`; empty for a full-precision checkpoint. Raises [`CheckpointError`]."""
        options = self.config.get("quantization_config") or {}
        if not isinstance(options, dict):
            raise CheckpointError(f"quantization_config in {self.path / CONFIG} is not a JSON object")
        return options

    def empty_model(self) -> torch.nn.Module:
        """Return the model on the meta device; no code of the folder runs. Raises [`CheckpointError`] for a config that
        describes no model of this version of transformers."""
        from transformers import AutoConfig

        file = self.path / CONFIG
        architecture = model_class(self.config, file)
        refuse_kernels(self.config, file)
        try:
            _refuse_counts(self.config, 1024 + len(self.tensors), f"the files hold only {len(self.tensors)} tensors")
            config = AutoConfig.from_pretrained(self.path, trust_remote_code=False)
            with torch.device("meta"):
                return architecture(config)
        except Exception as error:  # whatever the numbers in it make of a model
            raise CheckpointError(f"{file} describes no model ({type(error).__name__}: {first_line(error)})") from error


def model_class(config: Mapping[str, Any], where: Any) -> type[Any]:
    """Return the first of the ``architectures`` in a config. Raises [`RemoteCodeError`] if transformers lacks it."""
    import transformers

    name = None
    names = config.get("architectures")
    if isinstance(names, list) and names:
        name = names[0]
    architecture = getattr(transformers, str(name), None)
    if not isinstance(architecture, type) or not issubclass(architecture, transformers.PreTrainedModel):
        raise RemoteCodeError(
            f"{where} names the architecture {name!r}, which transformers {transformers.__version__} does not have; "
            "models of remote code are not supported"
        )
    return architecture


def refuse_kernels(config: Any, where: Any) -> None:
    """Raise [`RemoteCodeError`] for a config with kernels from the Hub, for attention or experts (`org/kernel`)."""
    if isinstance(config, list):
        config = dict(enumerate(config))
    if not isinstance(config, Mapping):
        return
    for key, value in config.items():
        implementations = [value]
        if isinstance(value, Mapping):  # by part of the model
            implementations = list(value.values())
        if "_implementation" in str(key) and any("/" in str(name) for name in implementations):
            raise RemoteCodeError(
                f"{where} asks for the kernel {value!r} ({key}), which is code from the Hub; remove the entry to use "
                "the model"
            )
        refuse_kernels(value, where)


def _refuse_counts(config: Mapping[str, Any], most: int, reason: str) -> None:
    """Raise `ValueError` for more layers or experts than a model can have: making them takes hours."""
    for key, value in {**config, **(config.get("text_config") or {})}.items():
        if isinstance(value, int) and key.endswith(("layers", "layer", "experts")) and value > most:
            raise ValueError(f"{key}={value}, but {reason}")


def read_model_config(source: str | os.PathLike, stored: Mapping[str, Any] | None = None, **options: Any) -> Any:
    """Return the config of a folder or of a model on the Hub as transformers reads it.

    ``stored`` is its dictionary, where it has been read before, and ``options`` are those of
    `AutoConfig.from_pretrained`. Raises `OSError` without a config, and [`CheckpointError`] for one whose values make
    no sense.
    """
    from transformers import AutoConfig, PreTrainedConfig

    try:
        if stored is None:
            stored, _ = PreTrainedConfig.get_config_dict(source, **options)
        _refuse_counts(stored, _MOST_LAYERS, "no model has as many")
        return AutoConfig.from_pretrained(source, **options)
    except (OSError, ImportError):
        raise
    except Exception as error:  # every class of transformers checks its numbers in its own way
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(f"the config of {source} cannot be used: {type(error).__name__}: {reason}") from error


def first_line(error: Exception) -> str:
    """Return the first line of an error's text, cut to a readable length."""
    return (str(error).strip().splitlines() or [""])[0][:300]


def open_checkpoint(path: str | os.PathLike) -> CheckpointFolder:
    """Read `config.json` and the headers of all safetensors files of a folder.

    Raises [`CheckpointError`] when there is no such folder, config or weight, and [`ShardError`] for a file that is
    missing, truncated or damaged, or an index that contradicts the files.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder; give that of a checkpoint")
    check_holds_model(folder)
    config = read_json(folder / CONFIG)
    name = weights_name(folder, config)
    if name is None:
        raise CheckpointError(f"{folder} has neither {SINGLE} nor {INDEX}; only safetensors checkpoints are read")
    weight_map = {}
    if name.endswith(".json"):
        weight_map = read_index(folder / name)
    files = sorted(set(weight_map.values())) or [name]
    tensors = tensors_by_name(read_header(folder / file) for file in files)
    if not tensors:
        raise ShardError(f"{files[0]} holds no tensors")
    places = {tensor.name: tensor.file.name for tensor in tensors.values()}
    if weight_map and weight_map != places:
        misplaced, _ = min(weight_map.items() ^ places.items())
        place = "in none of the files"
        if misplaced in places:
            place = f"in {places[misplaced]}"
        raise ShardError(f"{name} places {misplaced} in {weight_map.get(misplaced)}, but it is {place}")
    return CheckpointFolder(folder, config, tensors)


def check_holds_model(folder: Path) -> None:
    """Raise [`CheckpointError`] for a folder without `config.json`, with the model inside of it if there is one."""
    if not (folder / CONFIG).is_file():
        inside = model_inside(folder)
        raise CheckpointError(f"{folder / CONFIG} is missing; give {inside or 'the folder of a checkpoint'}")


def check_complete(missing: Set[str], source: str) -> None:
    """Raise [`CheckpointError`] for a model some of whose tensors are ``missing`` in the files of ``source``."""
    if missing:
        raise CheckpointError(
            f"no file of {source} has {min(missing)} ({len(missing)} tensors are missing); complete the files"
        )


def model_inside(folder: Path) -> Path | None:
    """Return the model or adapter that a training run left in its folder, or else the last of its checkpoints."""
    files = [*folder.glob(f"*/{CONFIG}"), *folder.glob("*/adapter_config.json")]
    models = {file.parent for file in files}
    checkpoints = {path for path in models if checkpoint_step(path) is not None}
    if models - checkpoints:
        return min(models - checkpoints)
    return max(checkpoints, key=checkpoint_step, default=None)


def checkpoint_step(folder: str | os.PathLike) -> int | None:
    """Return the step in the name of a training checkpoint's folder; `None` for any other name."""
    match = re.fullmatch(r"checkpoint-(\d+)", Path(folder).name)
    if match is None:
        return None
    return int(match[1])


def weights_name(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Return the name of the file or index by which transformers loads the weights of a folder; `None` without one.
    Raises [`CheckpointError`] where `config.json` names one elsewhere."""
    names = [SINGLE, INDEX]
    named = str(config.get(WEIGHTS_KEY))
    if named.endswith((".safetensors", ".safetensors.index.json")):
        if Path(named).name != named:
            raise CheckpointError(f"{folder / CONFIG} names weights outside of the folder: {named}")
        names = [named]
    return next((name for name in names if (folder / name).is_file()), None)


def read_index(index: Path) -> dict[str, str]:
    """Return the files of tensors by their names. Raises [`ShardError`] unless it has all that transformers reads."""
    try:
        content = read_json(index)
    except CheckpointError as error:
        raise ShardError(f"{index.name} is damaged: {error}") from error
    places = content.get("weight_map")
    if not places or not isinstance(places, dict) or not isinstance(content.get("metadata"), dict):
        raise ShardError(f"{index.name} is damaged: it has no weight_map with the files of tensors, or no metadata")
    for name, file in places.items():
        if not isinstance(file, str) or Path(file).name != file or "\0" in file:
            raise ShardError(f"{index.name} is damaged: it places {name} in {file!r}, which is outside of the folder")
    return places


def model_dtype(folder: CheckpointFolder) -> torch.dtype:
    """Return the dtype of the model, as `config.json` or else its largest floating-point tensor says."""
    named = str(folder.config.get("dtype") or folder.config.get("torch_dtype"))
    dtype = getattr(torch, named.removeprefix("torch."), None)
    if isinstance(dtype, torch.dtype):
        return dtype
    floats = [tensor for tensor in folder.tensors.values() if tensor.dtype.is_floating_point]
    if not floats:
        return torch.get_default_dtype()
    return max(floats, key=lambda tensor: tensor.nbytes).dtype


def read_json(path: Path) -> dict[str, Any]:
    """Raise [`CheckpointError`] unless ``path`` is a file that holds a JSON object."""
    try:
        contents = json.loads(regular_file(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {first_line(error)}") from error
    if not isinstance(contents, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return contents
