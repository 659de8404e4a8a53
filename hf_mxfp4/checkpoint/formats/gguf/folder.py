# SPDX-License-Identifier: Apache-2.0
"""A GGUF file as a checkpoint folder: its tensors, and the config of its model.

The config is that of a `config.json` beside the file, which export writes; without one it is put together from the
metadata, as far as these go.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from ...._logging import get_logger
from ...io.folder import CheckpointError, CheckpointFolder, read_json
from ...io.guard import without_scheme
from ...io.reader import ShardError, StoredTensor, read_rows
from .architectures import Architecture, of_file, of_model
from .blocks import row_bytes
from .hyperparameters import ROPE_FREQUENCIES, read_options, read_rope_frequencies
from .package import gguf_package


if TYPE_CHECKING:
    from gguf import GGUFReader
    from gguf.gguf_reader import ReaderTensor
    from transformers import PreTrainedConfig

#: What `quant_method` transformers has for GGUF files.
METHOD = "gguf"
#: Option of a config -> what the file calls the token.
_SPECIAL = {"bos": "bos", "eos": "eos", "pad": "padding"}
#: Option of a config -> a tensor that is there if it is true.
_BIASES = {"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_gate.bias"}
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class OtherType(StoredTensor):
    """A tensor in another of GGML's quantized types, ``kind``, which is read as the float32 values that it stands for.

    ``in_file`` is its bytes ``[rows, bytes of a row]``.
    """

    kind: str = ""
    in_file: StoredTensor | None = None

    @property
    def nbytes(self) -> int:
        return self.in_file.nbytes

    def rows(self, start: int, stop: int) -> torch.Tensor:
        gguf = gguf_package()
        per_slice = self.in_file.shape[0] // self.shape[0]
        data = read_rows(self.in_file, start * per_slice, stop * per_slice)
        values = gguf.dequantize(data.numpy(), gguf.GGMLQuantizationType[self.kind])
        return torch.from_numpy(np.ascontiguousarray(values, np.float32)).view(stop - start, *self.shape[1:])


@dataclass(frozen=True)
class GGUFFolder(CheckpointFolder):
    """The folder of a GGUF file, with the file itself, its architecture and its metadata."""

    file: Path = Path()
    architecture: Architecture | None = None
    metadata: Mapping[str, Any] | None = None

    @property
    def origin(self) -> Path:
        return self.file.resolve()

    @property
    def quantization(self) -> dict[str, Any]:
        return {"quant_method": METHOD}

    def empty_model(self) -> nn.Module:
        import transformers

        with torch.device("meta"):
            return getattr(transformers, self.architecture.model_class)(_config_object(self.config))

    def notes(self) -> list[str]:
        kinds = sorted({tensor.kind for tensor in self.tensors.values() if isinstance(tensor, OtherType)})
        if not kinds:
            return []
        return [f"Tensors in {', '.join(kinds)} are written as the float32 values that they stand for."]

    def header_texts(self, key: str) -> set[str | None]:
        text = self.metadata.get(key)
        return {text.rstrip() if isinstance(text, str) else None}

    def copy_side_files(self, target: Path) -> None:
        """Copy tokenizer, generation config and the like from beside the file; without a tokenizer there, make one from
        the metadata, as transformers does."""
        if (self.path / "config.json").is_file():
            super().copy_side_files(target)
        if any(target.glob("tokenizer*")) or self.metadata.get("tokenizer.ggml.model") in (None, "no_vocab", "none"):
            return
        from transformers import AutoTokenizer

        try:
            AutoTokenizer.from_pretrained(self.path, gguf_file=self.file.name).save_pretrained(target)
        except Exception as error:  # of whatever kind: the weights are worth having without it
            get_logger().warning(
                "transformers cannot read the tokenizer of %s (%s); copy that of the model into %s",
                self.file,
                error,
                target,
            )


def is_gguf(path: str | os.PathLike) -> bool:
    """Whether ``path`` is a GGUF file, or a folder with one and no safetensors file."""
    path = Path(path).expanduser()
    if path.is_dir():
        return any(path.glob("*.gguf")) and not any(path.glob("*.safetensors"))
    return path.suffix == ".gguf"


def open_gguf(path: str | os.PathLike) -> GGUFFolder:
    """Read the header of a GGUF file, or of the one in a folder.

    Raises [`CheckpointError`] for an architecture that is not known here or metadata that say too little, and
    `ShardError` for a file that is missing or damaged.
    """
    file = _file_in(Path(path).expanduser())
    reader = _read(file)
    metadata = {name: field.contents() for name, field in reader.fields.items() if len(field.data) == 1}
    if (count := metadata.get("split.count", 1)) > 1:
        raise CheckpointError(f"{file} is one of {count} files; join them with `llama-gguf-split --merge` first")
    architecture = of_file(str(metadata.get("general.architecture")), metadata_has_experts(metadata))
    if architecture is None:
        raise CheckpointError(
            f"{file} is of the architecture {metadata.get('general.architecture')!r}; what can be imported are llama "
            "(with and without experts), qwen2, qwen3, qwen3moe and gpt-oss"
        )
    tensors = {tensor.name: _stored(file, tensor) for tensor in reader.tensors}
    config = _config_beside(file, architecture) or _config_from(architecture, metadata, tensors)
    return GGUFFolder(file.parent, config, tensors, file, architecture, metadata)


def metadata_has_experts(metadata: Mapping[str, Any]) -> bool:
    """Whether the metadata are those of a mixture of experts."""
    return bool(metadata.get(f"{metadata.get('general.architecture')}.expert_count"))


def _file_in(path: Path) -> Path:
    files = sorted(path.glob("*.gguf")) if path.is_dir() else [path]
    if len(files) != 1:
        raise CheckpointError(f"{path} holds {len(files)} GGUF files; name the one to import")
    if not files[0].is_file():
        raise CheckpointError(f"{files[0]} is not a file")
    return files[0]


def _read(file: Path) -> "GGUFReader":
    gguf = gguf_package()
    try:
        return gguf.GGUFReader(file)
    except (ValueError, KeyError, IndexError, OSError) as error:
        raise ShardError(f"{file.name} is damaged, truncated or no GGUF file: {error}") from error


def _stored(file: Path, tensor: "ReaderTensor") -> StoredTensor:
    kind, shape, offset = tensor.tensor_type.name, tuple(int(n) for n in reversed(tensor.shape)), tensor.data_offset
    if kind in _FLOATS:
        return StoredTensor(tensor.name, file, _FLOATS[kind], shape, offset)
    if kind == "MXFP4":
        return StoredTensor(tensor.name, file, torch.uint8, (*shape[:-1], row_bytes(shape[-1])), offset)
    n_rows = tensor.n_elements // shape[-1]
    data = StoredTensor(tensor.name, file, torch.uint8, (n_rows, tensor.n_bytes // n_rows), offset)
    return OtherType(tensor.name, file, torch.float32, shape, offset, kind, data)


def _config_beside(file: Path, architecture: Architecture) -> dict[str, Any] | None:
    if not (file.parent / "config.json").is_file():
        return None
    config = without_scheme(read_json(file.parent / "config.json"))
    kind = config.get("model_type")
    if of_model(kind) is not architecture:
        raise CheckpointError(
            f"{file.parent / 'config.json'} is of a {kind!r}, {file.name} of {architecture.name!r}; "
            "move the file out of the folder to import it by its metadata alone"
        )
    return config


def _config_from(
    architecture: Architecture, metadata: Mapping[str, Any], tensors: Mapping[str, StoredTensor]
) -> dict[str, Any]:
    """`config.json` as the metadata and tensors describe it."""
    embedding = tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError("the file has no token_embd.weight")
    options = {name: values[0] for name, values in architecture.computes.items()}
    options |= {name: _short(value) for name, value in read_options(architecture, metadata).items()}
    options |= {"vocab_size": embedding.shape[0], "tie_word_embeddings": "output.weight" not in tensors}
    options |= {f"{kind}_token_id": metadata.get(f"tokenizer.ggml.{key}_token_id") for kind, key in _SPECIAL.items()}
    config = _config_object({"model_type": architecture.model_type, **options})
    for option, tensor in _BIASES.items():
        if hasattr(config, option):
            setattr(config, option, tensor in tensors)
    if frequencies := tensors.get(ROPE_FREQUENCIES):
        config.rope_parameters = read_rope_frequencies(frequencies.rows(0, frequencies.shape[0]), config)
    config.architectures = [architecture.model_class]
    config.dtype = embedding.dtype if not isinstance(embedding, OtherType) else torch.bfloat16
    return json.loads(config.to_json_string())


def _short(value: Any) -> Any:
    """The shortest number that is the same in float32, as which the file has it."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _config_object(options: Mapping[str, Any]) -> "PreTrainedConfig":
    from transformers import AutoConfig

    return AutoConfig.for_model(**options)
