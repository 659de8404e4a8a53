# SPDX-License-Identifier: Apache-2.0
"""A GGUF file as a checkpoint folder: its tensors, and the `config.json` of its model next to it."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...folder import CheckpointError, CheckpointFolder, read_json
from ...scheme import without_scheme
from ...tensors import ShardError, StoredTensor
from .layout import gguf_package, of_model


if TYPE_CHECKING:
    from gguf.gguf_reader import ReaderTensor

#: The `quant_method` that transformers has for GGUF files.
METHOD = "gguf"
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, eq=False)
class GGUFTensor(StoredTensor):
    """A tensor whose bytes ``data`` are mapped into memory. Of MXFP4 it has the rows of blocks; other quantized types
    of GGML are read as the float32 values that they stand for."""

    kind: str = ""
    data: np.ndarray = field(default=None, repr=False)

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def read(self, start: int | None = None, stop: int | None = None) -> torch.Tensor:
        data = np.array(self.data[start:stop])
        if self.kind == "MXFP4":
            return torch.from_numpy(data)
        if self.kind in _FLOATS:
            return torch.from_numpy(data).view(self.dtype)
        gguf = gguf_package()
        values = gguf.dequantize(data, gguf.GGMLQuantizationType[self.kind])
        return torch.from_numpy(np.ascontiguousarray(values, np.float32))


@dataclass(frozen=True)
class GGUFFolder(CheckpointFolder):
    """The folder of a GGUF ``file``."""

    file: Path = Path()

    @property
    def origin(self) -> Path:
        return self.file.resolve()

    @property
    def quantization(self) -> dict[str, Any]:
        return {"quant_method": METHOD}

    def notes(self) -> list[str]:
        kinds = sorted({tensor.kind for tensor in self.tensors.values()} - {"MXFP4", *_FLOATS})
        if not kinds:
            return []
        return [f"Tensors in {', '.join(kinds)} are written as the float32 values that they stand for."]


def is_gguf(path: str | os.PathLike) -> bool:
    """Return whether ``path`` is a GGUF file, or a folder with one and no safetensors file."""
    path = Path(path).expanduser()
    if path.is_dir():
        return any(path.glob("*.gguf")) and not any(path.glob("*.safetensors"))
    return path.suffix == ".gguf"


def open_gguf(path: str | os.PathLike) -> GGUFFolder:
    """Read the header of a GGUF file, or of the one in a folder, and the `config.json` next to it.

    Raises [`CheckpointError`] for an architecture that is not known here or a missing config, and `ShardError` for a
    file that is damaged.
    """
    file, gguf = _file_in(Path(path).expanduser()), gguf_package()
    try:
        reader = gguf.GGUFReader(file)
    except (ValueError, KeyError, IndexError, OSError) as error:
        raise ShardError(f"{file.name} is damaged, truncated or no GGUF file: {error}") from error
    metadata = {name: found.contents() for name, found in reader.fields.items() if len(found.data) == 1}
    if (count := metadata.get("split.count", 1)) > 1:
        raise CheckpointError(f"{file} is one of {count} files; join them with `llama-gguf-split --merge` first")
    if not (file.parent / "config.json").is_file():
        raise CheckpointError(
            f"{file.parent} has no config.json; put config.json and the tokenizer files of the original model next to "
            f"{file.name}"
        )
    config = without_scheme(read_json(file.parent / "config.json"))
    known, name = of_model(config.get("model_type")), metadata.get("general.architecture")
    if known is None or (known.name, known.has_experts) != (name, bool(metadata.get(f"{name}.expert_count"))):
        raise CheckpointError(
            f"{file} is of the architecture {name!r}, and config.json next to it of model_type "
            f"{config.get('model_type')!r}; what can be imported are llama, mixtral, qwen2, qwen3, qwen3_moe and "
            "gpt_oss with the config.json of the same model"
        )
    tensors = {tensor.name: _stored(file, tensor) for tensor in reader.tensors}
    return GGUFFolder(file.parent, config, tensors, file)


def _file_in(path: Path) -> Path:
    files = sorted(path.glob("*.gguf")) if path.is_dir() else [path]
    if len(files) != 1:
        raise CheckpointError(f"{path} holds {len(files)} GGUF files; name the one to import")
    if not files[0].is_file():
        raise CheckpointError(f"{files[0]} is not a file")
    return files[0]


def _stored(file: Path, tensor: "ReaderTensor") -> GGUFTensor:
    kind, shape = tensor.tensor_type.name, tuple(int(n) for n in reversed(tensor.shape))
    if kind == "MXFP4":
        return GGUFTensor(tensor.name, file, torch.uint8, tensor.data.shape, kind, tensor.data)
    return GGUFTensor(tensor.name, file, _FLOATS.get(kind, torch.float32), shape, kind, tensor.data)
