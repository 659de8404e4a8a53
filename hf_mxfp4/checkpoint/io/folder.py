# SPDX-License-Identifier: Apache-2.0
"""A checkpoint folder: its tensors by name, its `config.json`, and the structure of the model that it is of."""

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open

from .reader import ShardError, StoredTensor, read_file_header, tensors_by_name
from .writer import INDEX


if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Files beside the weights that belong to a checkpoint of any format. No pickles, no optimizer state, no model card.
SIDE_FILES = (
    "generation_config.json",
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "*.model",
    "*.tiktoken",
    "preprocessor_config.json",
    "processor_config.json",
    "LICENSE*",
)


#: Writes an argument and its value: as Python has it, or as an option of the command.
Spelling = Callable[[str, Any], str]
#: Options of the command that are called otherwise than the argument.
_OPTIONS = {"modules_to_not_convert": "skip", "calibration": "text"}


class CheckpointError(ValueError):
    """A checkpoint that cannot be read or converted; the message says which part and what to do."""


class RemoteCodeError(CheckpointError):
    """A model that only code from elsewhere can make; none is run here."""


class ArgumentError(CheckpointError):
    """A conversion that another argument would make possible, or one that has no effect.

    ``message`` writes the text with the spelling that it is given: that of Python in the error itself, that of options
    by [`on_command_line`].
    """

    def __init__(self, message: Callable[[Spelling], str]):
        super().__init__(message(_as_argument))
        self._message = message

    def on_command_line(self) -> str:
        """The text with ``--on-mismatch requantize`` in place of ``on_mismatch='requantize'``."""
        return self._message(_as_option)


def _as_argument(name: str, value: Any) -> str:
    return f"{name}={value!r}"


def _as_option(name: str, value: Any) -> str:
    option = f"--{_OPTIONS.get(name, name).replace('_', '-')}"
    return " ".join(f"{option} {one}" for one in (value if isinstance(value, list) else [value]))


#: Options of configs that are numbers of modules.
_COUNTS = re.compile(r"layers?$|depths?$|blocks?$|stages?$|experts$|n_layer|num_hidden_groups|inner_group_num")


@dataclass(frozen=True)
class CheckpointFolder:
    """Contents of `config.json` and the stored tensors by name, in the order of the shards' names."""

    path: Path
    config: dict[str, Any]
    tensors: Mapping[str, StoredTensor]

    @property
    def origin(self) -> Path:
        """Return what nothing may be written over or into: the folder."""
        return self.path.resolve()

    @property
    def quantization(self) -> dict[str, Any]:
        """The `quantization_config`; empty for a full-precision checkpoint. Raises [`CheckpointError`]."""
        options = self.config.get("quantization_config") or {}
        if not isinstance(options, dict):
            raise CheckpointError(f"quantization_config in {self.path / 'config.json'} is not a JSON object")
        return options

    def empty_model(self) -> "PreTrainedModel":
        """The model without memory (meta device), for the names and classes of its layers. No code of the folder runs.

        Raises [`CheckpointError`] for an architecture that this transformers has not, and for a config that describes
        no model, or one much larger than the files.
        """
        import transformers

        file = self.path / "config.json"
        names = self.config.get("architectures")
        name = names[0] if isinstance(names, list) and names else None
        found = model_class(name)
        if found is None:
            raise RemoteCodeError(
                f"{file} names the architecture {name!r}, which transformers {transformers.__version__} has not as a "
                "model; models of remote code are not converted"
            )
        refuse_kernels(self.config, file)
        _check_counts(self.config, len(self.tensors), file)
        try:
            config = transformers.AutoConfig.from_pretrained(self.path, trust_remote_code=False)
            with torch.device("meta"):
                model = found(config)
        except Exception as error:  # whatever the numbers in it make of a model
            raise CheckpointError(f"{file} describes no model ({type(error).__name__}: {first_line(error)})") from error
        n_bytes = sum(tensor.nbytes for tensor in self.tensors.values())
        for name, tensor in model.state_dict().items():
            if tensor.numel() > 8 * n_bytes:
                raise CheckpointError(
                    f"{file} describes {name} with {tensor.numel()} elements, but the files hold {n_bytes} bytes"
                )
        return model

    def notes(self) -> list[str]:
        """Return what is lost or changed by reading these files, in sentences."""
        return []

    def header_texts(self, key: str) -> set[str | None]:
        """What the headers of the files have under ``key`` in their metadata; `None` stands for files without it."""
        texts = set()
        for file in {tensor.file for tensor in self.tensors.values()}:
            with safe_open(file, "pt") as opened:
                texts.add((opened.metadata() or {}).get(key))
        return texts

    def copy_side_files(self, target: Path) -> None:
        """Copy tokenizer, generation config and the like."""
        for pattern in SIDE_FILES:
            for file in self.path.glob(pattern):
                if file.is_file() and not (target / file.name).exists():
                    shutil.copyfile(file, target / file.name)


def model_class(name: Any) -> "type[PreTrainedModel] | None":
    """Return the model class of transformers with this name; `None` if there is none."""
    import transformers

    found = getattr(transformers, name, None) if isinstance(name, str) else None
    return found if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel) else None


def refuse_kernels(config: Any, where: Any) -> None:
    """Raise [`RemoteCodeError`] for a config that makes transformers load code from the Hub: kernels for attention or
    experts that are named as `org/kernel`."""
    parts = [config]
    while parts:
        part = parts.pop()
        if isinstance(part, Mapping):
            for key, value in part.items():
                kinds = value.values() if isinstance(value, Mapping) else [value]
                if "_implementation" in str(key) and any("/" in str(kind) for kind in kinds):
                    raise RemoteCodeError(
                        f"{where} asks for the kernel {value!r} ({key}), which is code from the Hub; remove the "
                        "entry to use the model"
                    )
            parts += part.values()
        elif isinstance(part, list):
            parts += part


def first_line(error: Exception) -> str:
    """Return the first line of an error's text, cut to a readable length."""
    return (str(error).strip().splitlines() or [""])[0][:300]


def _check_counts(config: Mapping[str, Any], n_tensors: int, file: Path) -> None:
    """Raise [`CheckpointError`] for more layers than tensors: making them takes hours before anything else is wrong."""
    most = 1024 + n_tensors
    for key, value in config.items():
        if isinstance(value, Mapping):
            _check_counts(value, n_tensors, file)
        for number in value if isinstance(value, list) else [value]:
            if _COUNTS.search(str(key)) and isinstance(number, (int, float)) and number > most:
                raise CheckpointError(f"{file} has {key}={number}, but the files hold only {n_tensors} tensors")


def open_checkpoint(path: str | os.PathLike) -> CheckpointFolder:
    """Read `config.json` and the headers of all safetensors files of a folder.

    Raises [`CheckpointError`] when there is no such folder, config or weight, or they contradict each other, and
    [`ShardError`] for a file that is missing, truncated or damaged.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder; give that of a checkpoint")
    config = read_json(folder / "config.json")
    if (folder / INDEX).is_file():
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
            raise CheckpointError(f"{folder / INDEX} has no usable weight_map; is it complete?")
        if outside := [file for file in weight_map.values() if Path(file).name != file]:
            raise CheckpointError(f"{folder / INDEX} points outside of its folder: {outside[0]!r}")
        files = sorted(set(weight_map.values()))
    else:
        weight_map, files = {}, ["model.safetensors"]
        if not (folder / files[0]).is_file():
            raise CheckpointError(f"{folder} has neither {INDEX} nor {files[0]}; only safetensors checkpoints are read")
    tensors = tensors_by_name(read_file_header(folder / file) for file in files)
    if not tensors:
        raise ShardError(f"{files[0]} holds no tensors")
    for name, file in weight_map.items():
        if name not in tensors or tensors[name].file.name != file:
            raise ShardError(f"{file} lacks {name}, though {INDEX} says otherwise")
    return CheckpointFolder(folder, config, tensors)


def model_dtype(folder: CheckpointFolder) -> torch.dtype:
    """The dtype of the model, as `config.json` or else its largest floating-point tensor says."""
    named = folder.config.get("dtype") or folder.config.get("torch_dtype")
    dtype = getattr(torch, str(named).removeprefix("torch."), None)
    if isinstance(dtype, torch.dtype):
        return dtype
    floats = [tensor for tensor in folder.tensors.values() if tensor.dtype.is_floating_point]
    return max(floats, key=lambda tensor: tensor.nbytes).dtype if floats else torch.get_default_dtype()


def read_json(path: Path) -> dict[str, Any]:
    """Raises [`CheckpointError`] unless ``path`` is a file that holds a JSON object."""
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {first_line(error)}") from error
    if not isinstance(contents, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return contents
