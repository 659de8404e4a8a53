# SPDX-License-Identifier: Apache-2.0
"""GGUF as a checkpoint format: all tensors of a model in one file, quantized ones as GGML's MXFP4."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from ....config import MXFP4RLConfig
from ...folder import CheckpointError, CheckpointFolder
from ...layers import LayerShape
from ...tensors import MAX_SHARD_SIZE, NewTensor
from ..base import Packed, PackedFormat
from .layout import Rows, TensorNames, gguf_package, head_dim, of_model, unsupported_reason, write_options
from .tensors import tensors_for, to_blocks
from .tokenizer import Tokenizer, add_no_tokenizer, read_tokenizer


if TYPE_CHECKING:
    from gguf import GGUFWriter
    from transformers import PreTrainedConfig, PreTrainedModel

#: GGML reads this scale byte, NaN here, as a number.
_NAN = 255
#: Tensors of these dtypes, and bytes, which are blocks of MXFP4 -> GGML's types.
_KINDS = {torch.uint8: "MXFP4", torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}


class GGUFFormat(PackedFormat):
    """The format as such, and with a ``model`` that for its checkpoint in ``folder``: names of tensors, order of rows
    and metadata are the architecture's."""

    name = "gguf"
    plain_names = False

    def __init__(self, folder: CheckpointFolder | None = None, model: "PreTrainedModel | None" = None):
        self._folder, self._model = folder, model
        if model is not None:
            config = model.config
            kv_heads = config.num_key_value_heads or config.num_attention_heads
            known = of_model(config.model_type)
            self._names = TensorNames(known, config.num_attention_heads, kv_heads, head_dim(config))
            self._tokenizer = read_tokenizer(folder.path, config.vocab_size)

    def architecture_misfit(self, config: "PreTrainedConfig") -> str | None:
        return unsupported_reason(config)

    def for_checkpoint(self, folder: CheckpointFolder, model: "PreTrainedModel") -> "GGUFFormat":
        gguf_package()
        return GGUFFormat(folder, model)

    def notes(self, config: MXFP4RLConfig, ignored: Sequence[str], quantized: Sequence[str] = ()) -> list[str]:
        notes = []
        if config.activation_scheme is not None:
            notes.append(
                f"Activations were quantized ({config.activation_scheme}); llama.cpp rounds them to 8-bit integers on "
                "CPUs; on GPUs it depends on the kernel."
            )
        if isinstance(self._tokenizer, str):
            notes.append(f"The file has no tokenizer and takes token numbers only: {self._tokenizer}.")
        return notes

    def tensors(self, layer: str, shape: LayerShape, packed: Packed) -> dict[str, torch.Tensor]:
        if not packed["weight"].is_meta and (packed["weight_scale"] == _NAN).any():
            raise CheckpointError(
                f"{layer} holds NaN or infinity in a block, which GGML has no scale for and llama.cpp would read as "
                "numbers; export a checkpoint without them"
            )
        return self.full_tensors(layer, shape, to_blocks(packed["weight"], packed["weight_scale"]))

    def full_tensors(self, layer: str, shape: LayerShape, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: weight[..., rows, :] for name, rows in self._places(layer, shape).items()}

    def others(self, tensors: Sequence[NewTensor], dtype: torch.dtype) -> list[NewTensor]:
        return tensors_for(self._names, self._model.config, tensors, dtype)

    def write(
        self, folder: Path, tensors: Sequence[NewTensor], max_shard_size: int | str, metadata: Mapping[str, str]
    ) -> list[Path]:
        if max_shard_size != MAX_SHARD_SIZE:
            raise CheckpointError("a GGUF file is written in one piece; leave out max_shard_size")
        gguf = gguf_package()
        kind = "MXFP4" if any(tensor.dtype == torch.uint8 for tensor in tensors) else "BF16"
        writer = gguf.GGUFWriter(folder / f"model-{kind}.gguf", self._names.architecture.name)
        self._add_metadata(writer, "MOSTLY_MXFP4_MOE" if kind == "MXFP4" else "MOSTLY_BF16")
        for tensor in tensors:
            raw = np.dtype("uint8" if tensor.dtype == torch.uint8 else "float32")
            type_in_file = gguf.GGMLQuantizationType[_KINDS[tensor.dtype]]
            writer.add_tensor_info(tensor.name, tensor.shape, raw, tensor.nbytes, raw_dtype=type_in_file)
        try:
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for tensor in tensors:
                writer.write_tensor_data(tensor.make().contiguous().view(torch.uint8).numpy())
        finally:
            writer.close()
        return []

    def _add_metadata(self, writer: "GGUFWriter", file_type: str) -> None:
        gguf = gguf_package()
        writer.add_type(gguf.GGUFType.MODEL)
        writer.add_name(self._folder.path.resolve().name)
        writer.add_file_type(gguf.LlamaFileType[file_type])
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        for key, value in write_options(self._names.architecture, self._model.config).items():
            {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)](key, value)
        if isinstance(self._tokenizer, Tokenizer):
            self._tokenizer.add_to(writer)
        else:
            add_no_tokenizer(writer, self._model.config)

    def _places(self, layer: str, shape: LayerShape) -> dict[str, Rows]:
        name = f"{layer}.weight" if shape.experts is None else layer
        return self._names.places(name, shape.out_features)
