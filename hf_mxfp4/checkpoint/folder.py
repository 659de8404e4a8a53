# SPDX-License-Identifier: Apache-2.0
"""A checkpoint folder: its tensors by name, its `config.json`, and the structure of the model that it is of."""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .tensors import INDEX, SINGLE, ShardError, StoredTensor, read_header, tensors_by_name


if TYPE_CHECKING:
    from transformers import PreTrainedModel

CONFIG = "config.json"
#: Files that belong to a checkpoint of any format, apart from the weights. No pickles, optimizer state or model card.
SIDE_FILES = (
    "generation_config.json",
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "*_token*.json",
    "chat_template*",
    "*.model",
    "*.tiktoken",
    "*processor_config.json",
    "LICENSE*",
)


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

    def empty_model(self) -> "PreTrainedModel":
        """Return the model on the meta device; no code of the folder runs. Raises [`CheckpointError`] for a config that
        describes no model of this version of transformers."""
        import transformers

        file = self.path / CONFIG
        names = self.config.get("architectures")
        name = names[0] if isinstance(names, list) and names else None
        found = getattr(transformers, name, None) if isinstance(name, str) else None
        if not isinstance(found, type) or not issubclass(found, transformers.PreTrainedModel):
            raise RemoteCodeError(
                f"{file} names the architecture {name!r}, which transformers {transformers.__version__} does not have; "
                "models of remote code are not converted"
            )
        refuse_kernels(self.config, file)
        try:
            for key, value in {**self.config, **(self.config.get("text_config") or {})}.items():
                counts = isinstance(value, int) and key.endswith(("layers", "layer", "experts"))
                if counts and value > 1024 + len(self.tensors):  # making them takes hours
                    raise ValueError(f"{key}={value}, but the files hold only {len(self.tensors)} tensors")
            config = transformers.AutoConfig.from_pretrained(self.path, trust_remote_code=False)
            with torch.device("meta"):
                return found(config)
        except Exception as error:  # whatever the numbers in it make of a model
            raise CheckpointError(f"{file} describes no model ({type(error).__name__}: {first_line(error)})") from error

    def copy_side_files(self, target: Path) -> None:
        """Copy tokenizer, generation config and the like."""
        for pattern in SIDE_FILES:
            for file in self.path.glob(pattern):
                if file.is_file() and not (target / file.name).exists():
                    shutil.copyfile(file, target / file.name)


def refuse_kernels(config: Any, where: Any) -> None:
    """Raise [`RemoteCodeError`] for a config with kernels from the Hub, for attention or experts (`org/kernel`)."""
    if isinstance(config, list):
        config = dict(enumerate(config))
    if not isinstance(config, Mapping):
        return
    for key, value in config.items():
        kinds = value.values() if isinstance(value, Mapping) else [value]
        if "_implementation" in str(key) and any("/" in str(kind) for kind in kinds):
            raise RemoteCodeError(
                f"{where} asks for the kernel {value!r} ({key}), which is code from the Hub; remove the entry to use "
                "the model"
            )
        refuse_kernels(value, where)


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
    config = read_json(folder / CONFIG)
    weight_map = read_index(folder / INDEX) if (folder / INDEX).is_file() else {}
    files = sorted(set(weight_map.values())) or [SINGLE]
    if not weight_map and not (folder / SINGLE).is_file():
        raise CheckpointError(f"{folder} has neither {INDEX} nor {SINGLE}; only safetensors checkpoints are read")
    tensors = tensors_by_name(read_header(folder / file) for file in files)
    if not tensors:
        raise ShardError(f"{files[0]} holds no tensors")
    if weight_map and (wrong := weight_map.items() ^ {(name, tensor.file.name) for name, tensor in tensors.items()}):
        name, _ = min(wrong)
        found = f"is in {tensors[name].file.name}" if name in tensors else "is in none of the files"
        raise ShardError(f"{INDEX} places {name} in {weight_map.get(name)}, but it {found}")
    return CheckpointFolder(folder, config, tensors)


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
    return max(floats, key=lambda tensor: tensor.nbytes).dtype if floats else torch.get_default_dtype()


def read_json(path: Path) -> dict[str, Any]:
    """Raise [`CheckpointError`] unless ``path`` is a file that holds a JSON object."""
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {first_line(error)}") from error
    if not isinstance(contents, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return contents
