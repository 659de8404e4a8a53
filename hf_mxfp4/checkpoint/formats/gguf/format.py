# SPDX-License-Identifier: Apache-2.0
"""GGUF as a checkpoint format: all tensors of a model in one file, quantized ones as GGML's MXFP4."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ....config import MXFP4RLConfig
from ...io.folder import CheckpointError, CheckpointFolder
from ...io.reader import StoredTensor
from ...io.writer import MAX_SHARD_SIZE, OtherTensor, TensorSpec
from ..base import Imported, LayerShape, PackedFormat, Read
from .architectures import of_model
from .blocks import from_blocks, row_bytes, to_blocks
from .file import GGUFFile
from .folder import METHOD
from .hyperparameters import head_dim, rounds_ramp, unsupported_reason, write_options
from .names import Rows, TensorNames
from .others import model_tensors_of, tensors_for
from .package import gguf_package
from .tokenizer import Tokenizer, add_no_tokenizer, read_tokenizer


if TYPE_CHECKING:
    from gguf import GGUFWriter
    from transformers import PreTrainedConfig, PreTrainedModel

#: GGML reads this scale byte, NaN here, as a number.
_NAN = 255


class GGUFFormat(PackedFormat):
    """The format as such, and with a ``model`` that for its checkpoint in ``folder``: names of tensors, order of rows
    and metadata are the architecture's."""

    name = "gguf"
    quant_method = METHOD
    plain_names = False
    how_to_run = (
        "llama.cpp and what builds on it run the file `model-MXFP4.gguf` alone:\n\n"
        "```bash\nllama-cli -hf USER/REPOSITORY:MXFP4     # from the Hub\n"
        "llama-cli -m model-MXFP4.gguf           # the file\n```\n\n"
        "`hf-mxfp4 import model-MXFP4.gguf OUT` makes a packed checkpoint of it, for transformers, with the same bits."
    )

    def __init__(self, folder: CheckpointFolder | None = None, model: "PreTrainedModel | None" = None):
        self._folder, self._model = folder, model
        self._names: TensorNames | None = None
        self._tokenizer: Tokenizer | str = "not looked for"
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

    def quantization_config(self, config: MXFP4RLConfig, ignored: Sequence[str], quantized: Sequence[str] = ()) -> None:
        return None

    def notes(self, config: MXFP4RLConfig, ignored: Sequence[str], quantized: Sequence[str] = ()) -> list[str]:
        notes = []
        if config.activation_scheme is not None:
            notes.append(
                f"Activations were quantized ({config.activation_scheme}); llama.cpp rounds them to 8-bit integers on "
                "CPUs, and does as its kernels want on GPUs."
            )
        if rounds_ramp(self._model.config):
            notes.append(
                "llama.cpp rounds the bounds of yarn's ramp to whole dimensions (truncate), which this model does "
                "not: logits differ a little."
            )
        if isinstance(self._tokenizer, str):
            notes.append(f"The file has no tokenizer and takes token numbers alone: {self._tokenizer}.")
        return notes

    def read_config(self, options: Mapping[str, Any]) -> Imported:
        config = MXFP4RLConfig(mode="packed", preset="w4a16", scale_rule="even", macro_block=None)
        return Imported(
            config, ["The scales are taken as they are; which rule made them is not recorded (scale_rule='even')."]
        )

    def marks(self, tensor: StoredTensor) -> bool:
        return tensor.dtype == torch.uint8

    def specs(self, layer: str, shape: LayerShape) -> dict[str, TensorSpec]:
        return self._specs(layer, shape, torch.uint8, row_bytes(shape.in_features))

    def tensors(
        self, layer: str, shape: LayerShape, expert: int | None, packed: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        if (packed["weight_scale"] == _NAN).any():
            raise CheckpointError(
                f"{layer} holds NaN or infinity in a block, which GGML has no scale for and llama.cpp would read as "
                "numbers; export a checkpoint without them"
            )
        blocks = to_blocks(packed["weight"], packed["weight_scale"])
        return {name: blocks[rows] for name, rows in self._places(layer, shape).items()}

    def read(self, layer: str, shape: LayerShape, expert: int | None, read: Read) -> dict[str, torch.Tensor]:
        blocks = torch.empty(shape.out_features, row_bytes(shape.in_features), dtype=torch.uint8)
        for name, rows in self._places(layer, shape).items():
            blocks[rows] = read(name, expert)
        return dict(zip(("weight", "weight_scale"), from_blocks(blocks), strict=True))

    def full_specs(self, layer: str, shape: LayerShape) -> dict[str, TensorSpec]:
        return self._specs(layer, shape, torch.bfloat16, shape.in_features)

    def full_tensors(
        self, layer: str, shape: LayerShape, expert: int | None, matrix: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        return {name: matrix[rows] for name, rows in self._places(layer, shape).items()}

    def others(self, tensors: Sequence[OtherTensor], dtype: torch.dtype) -> list[OtherTensor]:
        return tensors_for(self._names, self._model.config, tensors, dtype)

    def restored(self, tensors: Sequence[OtherTensor], dtype: torch.dtype) -> list[OtherTensor]:
        return model_tensors_of(self._names, self._model, tensors, self._folder.tensors.keys(), dtype)

    def open_writer(
        self,
        folder: Path,
        specs: Mapping[str, TensorSpec],
        max_shard_size: int | str = MAX_SHARD_SIZE,
        metadata: Mapping[str, str] | None = None,
    ) -> GGUFFile:
        if max_shard_size != MAX_SHARD_SIZE:
            raise CheckpointError("a GGUF file is written in one piece; leave out max_shard_size")
        kind = "MXFP4" if self._quantizes(specs) else "BF16"
        return GGUFFile(folder / f"model-{kind}.gguf", specs, self._names.architecture.name, self._fill(kind), metadata)

    def _quantizes(self, specs: Mapping[str, TensorSpec]) -> bool:
        return any(spec.dtype == torch.uint8 for spec in specs.values())

    def _fill(self, kind: str):
        def fill(writer: "GGUFWriter") -> None:
            gguf = gguf_package()
            writer.add_type(gguf.GGUFType.MODEL)
            writer.add_name(self._folder.path.resolve().name)
            file_type = "MOSTLY_MXFP4_MOE" if kind == "MXFP4" else "MOSTLY_BF16"
            writer.add_file_type(gguf.LlamaFileType[file_type])
            writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
            for key, value in write_options(self._names.architecture, self._model.config).items():
                {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)](key, value)
            if isinstance(self._tokenizer, Tokenizer):
                self._tokenizer.add_to(writer)
            else:
                add_no_tokenizer(writer, self._model.config)

        return fill

    def _places(self, layer: str, shape: LayerShape) -> dict[str, Rows]:
        name = f"{layer}.weight" if shape.experts is None else layer
        return self._names.places(name, shape.out_features)

    def _specs(self, layer: str, shape: LayerShape, dtype: torch.dtype, columns: int) -> dict[str, TensorSpec]:
        experts = () if shape.experts is None else (shape.experts,)
        numbers = torch.arange(shape.out_features)
        return {
            name: TensorSpec(dtype, (*experts, len(numbers[rows]), columns))
            for name, rows in self._places(layer, shape).items()
        }
