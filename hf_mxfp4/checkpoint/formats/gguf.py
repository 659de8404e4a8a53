# SPDX-License-Identifier: Apache-2.0
"""GGUF, the one-file format of llama.cpp: all tensors of a model, quantized ones as GGML's MXFP4.

GGML's `block_mxfp4` has 17 bytes for 32 elements: a scale byte and the codes. Byte ``j`` has element ``j`` in the low
nibble and ``j + 16`` in the high one, where this package has ``2j`` and ``2j + 1``. Byte 255, NaN here, is 2^128 there.

Rows of ``q`` and ``k`` are stored in another order for Llama, whose rotary embedding rotates adjacent rows there. Of
tensors that are not quantized, vectors and routers are float32, as llama.cpp wants them; the others keep 16 bits.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from ...config import MXFP4RLConfig
from ...numerics import BLOCK_SIZE
from ...numerics.formats import E8M0_NAN
from ..folder import CheckpointError, CheckpointFolder, NewTensor
from ..names import LayerShape
from .base import Names, Packed, PackedFormat
from .gguf_tokenizer import Tokenizer, add_no_tokenizer, read_tokenizer


if TYPE_CHECKING:
    from gguf import GGUFWriter
    from transformers import PreTrainedConfig, PreTrainedModel

#: Rows of a model's tensor that are in a tensor of the file, in the order there; of biases elements.
Rows: TypeAlias = slice | torch.Tensor

#: Dtypes of tensors -> GGML's types; bytes are blocks of MXFP4.
_KINDS = {torch.uint8: "MXFP4", torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
#: Type of most weights -> that of the file, as llama.cpp calls it.
_FILE_TYPES = {"MXFP4": "MOSTLY_MXFP4_MOE", "BF16": "MOSTLY_BF16", "F16": "MOSTLY_F16", "F32": "ALL_F32"}
#: Key of a file, after the architecture's name -> attribute of transformers' config.
_COMMON = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "vocab_size": "vocab_size",
}
_HEADS = {"attention.key_length": "head_dim", "attention.value_length": "head_dim"}
_LLAMA = {**_HEADS, "rope.dimension_count": "head_dim"}
_EXPERTS = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
_NO_WINDOW = {"use_sliding_window": (False, None)}
_NO_BIAS = {"attention_bias": (False, None)}
_ALL_EXPERTS = {"norm_topk_prob": (True,), "decoder_sparse_step": (1,), "mlp_only_layers": ([], None)}
#: Type of rotary embedding -> key after `rope.scaling.` -> option of `rope_parameters`.
_ROPE_OPTIONS = {
    "default": {},
    "linear": {"factor": "factor"},
    "yarn": {
        "factor": "factor",
        "original_context_length": "original_max_position_embeddings",
        "yarn_beta_fast": "beta_fast",
        "yarn_beta_slow": "beta_slow",
    },
    "llama3": {},  # its frequencies are a tensor in the file
}


@dataclass(frozen=True)
class Architecture:
    """One architecture of llama.cpp, as far as models of one `model_type` use it.

    Attributes:
        options: key of the file after ``name`` -> attribute of the config, in addition to the common ones.
        computes: attribute of the config -> the values that llama.cpp computes, which the file does not record.
    """

    name: str
    model_class: str
    options: Mapping[str, str]
    computes: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)


#: `model_type` of transformers -> what llama.cpp has for it.
ARCHITECTURES = {
    "llama": Architecture("llama", "LlamaForCausalLM", _LLAMA),
    "mixtral": Architecture("llama", "MixtralForCausalLM", _LLAMA | _EXPERTS, {"sliding_window": (None,)}),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", {}, _NO_WINDOW),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", _HEADS, _NO_WINDOW | _NO_BIAS),
    "qwen3_moe": Architecture(
        "qwen3moe",
        "Qwen3MoeForCausalLM",
        {**_HEADS, **_EXPERTS, "expert_feed_forward_length": "moe_intermediate_size"},
        {**_NO_WINDOW, **_NO_BIAS, **_ALL_EXPERTS},
    ),
    "gpt_oss": Architecture(
        "gpt-oss",
        "GptOssForCausalLM",
        {
            **_HEADS,
            "attention.sliding_window": "sliding_window",
            **_EXPERTS,
            "expert_feed_forward_length": "intermediate_size",
        },
        {"attention_bias": (True,), "swiglu_alpha": (1.702, None), "swiglu_limit": (7.0, None)},
    ),
}


class GGUFFormat(PackedFormat):
    """The format as such, and with a ``model`` that for its checkpoint in ``folder``: names of tensors, order of rows
    and metadata are the architecture's."""

    name = "gguf"
    activations = "llama.cpp rounds them to 8-bit integers on CPUs; on GPUs it depends on the kernel"
    plain_names = False
    keeps_float16 = True
    serve = "llama-server -m {folder}/*.gguf"

    def __init__(self, folder: CheckpointFolder | None = None, model: "PreTrainedModel | None" = None):
        self._folder = folder
        if model is None:
            return
        gguf = gguf_package()
        self._config = model.config
        self._architecture = ARCHITECTURES[self._config.model_type]
        keys = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}
        self._names = gguf.get_tensor_name_map(keys[self._architecture.name], self._config.num_hidden_layers)
        self._tokenizer = read_tokenizer(folder.path, self._config.vocab_size)

    def for_checkpoint(
        self, folder: CheckpointFolder, model: "PreTrainedModel", quantizes_inputs: bool
    ) -> "GGUFFormat":
        if reason := unsupported_reason(model.config):
            raise CheckpointError(f"format 'gguf' cannot hold {folder.path}: {reason}")
        return GGUFFormat(folder, model)

    def notes(self, config: MXFP4RLConfig, ignored: Names, quantized: Names = ()) -> list[str]:
        notes = super().notes(config, ignored, quantized)
        if isinstance(self._tokenizer, str):
            notes.append(f"The file has no tokenizer and takes token numbers only: {self._tokenizer}.")
        return notes

    def tensors(self, layer: str, shape: LayerShape, packed: Packed) -> dict[str, torch.Tensor]:
        if not packed["weight"].is_meta and (packed["weight_scale"] == E8M0_NAN).any():
            raise CheckpointError(
                f"{layer} holds NaN or infinity in a block, which GGML has no scale for and llama.cpp would read as "
                "numbers; export a checkpoint without them"
            )
        return self.full_tensors(layer, shape, to_blocks(packed["weight"], packed["weight_scale"]))

    def full_tensors(self, layer: str, shape: LayerShape, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        places = self._places(shape.weight_name(layer), shape.out_features)
        return {place: weight[..., rows, :] for place, rows in places.items()}

    def others(self, tensors: Sequence[NewTensor], cast: Set[str], dtype: torch.dtype) -> list[NewTensor]:
        embeddings = "model.embed_tokens.weight"
        has_embeddings = any(tensor.name == embeddings for tensor in tensors)
        written = []
        for tensor in tensors:
            matrix_dtype = dtype if tensor.name in cast else tensor.dtype
            if tensor.name == "lm_head.weight" and not has_embeddings:  # they are tied, and stored as the head
                tensor = replace(tensor, name=embeddings)
            if tensor.dtype == torch.uint8 or tensor.dtype not in _KINDS:
                raise CheckpointError(f"{tensor.name} is {tensor.dtype}, which GGUF files of llama.cpp do not hold")
            written += self._parts(tensor, matrix_dtype)
        frequencies = rope_frequencies(self._config)
        if frequencies is not None:
            shape = tuple(frequencies.shape)
            written.append(NewTensor("rope_freqs.weight", torch.float32, shape, lambda: frequencies))
        return written

    def write(self, folder: Path, tensors: Sequence[NewTensor], metadata: Mapping[str, str]) -> list[Path]:
        gguf = gguf_package()
        dtype = max(tensors, key=lambda tensor: tensor.nbytes).dtype
        if any(tensor.dtype == torch.uint8 for tensor in tensors):
            dtype = torch.uint8
        kind = _KINDS[dtype]
        writer = gguf.GGUFWriter(folder / f"model-{kind}.gguf", self._architecture.name)
        self._add_metadata(writer, _FILE_TYPES[kind])
        for tensor in tensors:
            numpy_dtype = np.dtype("uint8" if tensor.dtype == torch.uint8 else "float32")
            ggml_type = gguf.GGMLQuantizationType[_KINDS[tensor.dtype]]
            writer.add_tensor_info(tensor.name, tensor.shape, numpy_dtype, tensor.nbytes, raw_dtype=ggml_type)
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
        """Add what describes the model, its options and its tokenizer."""
        gguf = gguf_package()
        writer.add_type(gguf.GGUFType.MODEL)
        writer.add_name(self._folder.path.resolve().name)
        writer.add_file_type(gguf.LlamaFileType[file_type])
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        for key, value in _options(self._architecture, self._config).items():
            add[type(value)](key, value)
        if isinstance(self._tokenizer, Tokenizer):
            self._tokenizer.add_to(writer)
        else:
            add_no_tokenizer(writer, self._config)

    def _places(self, name: str, n_rows: int) -> dict[str, Rows]:
        """Return the tensors of the file that have the rows of ``name``, a tensor of the model with ``n_rows`` of them.

        Raises [`CheckpointError`] for a tensor that llama.cpp has no place for.
        """
        # The package `gguf` knows names that end so, and gate and up projections of experts as tensors of their own.
        plain = name.replace("_proj_bias", "_proj.bias")
        if not plain.endswith((".weight", ".bias")):
            plain = f"{plain}.weight"
        if ".experts.gate_up_proj" in plain:
            if self._architecture.name == "gpt-oss":  # rows of gate and up alternate
                gate = slice(0, None, 2)
                up = slice(1, None, 2)
            else:
                gate = slice(0, n_rows // 2)
                up = slice(n_rows // 2, n_rows)
            rows = {plain.replace("gate_up_proj", "gate_proj"): gate, plain.replace("gate_up_proj", "up_proj"): up}
        else:
            rows = {plain: self._order(plain)}
        places = {}
        for part, part_rows in rows.items():
            place = self._names.get_name(part, try_suffixes=(".weight", ".bias"))
            if place is None:
                architecture = self._architecture.name
                raise CheckpointError(f"{name} has no place in a GGUF file of the architecture {architecture!r}")
            places[place] = part_rows
        return places

    def _order(self, name: str) -> Rows:
        """Return the order of rows in the file: that of rotary embeddings in Llama's queries and keys."""
        config = self._config
        layer = name.rpartition("self_attn.")[2].partition(".")[0]
        if layer not in ("q_proj", "k_proj") or self._architecture.name != "llama":
            return slice(None)
        heads = config.num_attention_heads
        if layer == "k_proj" and config.num_key_value_heads:
            heads = config.num_key_value_heads
        return torch.arange(heads * head_dim(config)).view(heads, 2, -1).transpose(1, 2).flatten()

    def _parts(self, tensor: NewTensor, dtype: torch.dtype) -> list[NewTensor]:
        """Return the tensors of the file for one that is not quantized, in ``dtype`` if it is a matrix."""
        is_of_experts = ".experts." in tensor.name
        is_transposed = is_of_experts and len(tensor.shape) == 3 and self._architecture.name == "gpt-oss"

        def select(values: torch.Tensor, rows: Rows) -> torch.Tensor:
            if is_transposed:
                values = values.mT
            if is_of_experts:
                return values[:, rows]
            return values[rows]

        def part(place: str, rows: Rows) -> NewTensor:
            shape = tuple(select(whole, rows).shape)
            part_dtype = dtype
            is_vector = len(shape) == 1 or place.endswith(".bias")
            is_router = ".ffn_gate_inp." in place
            if is_vector or is_router:
                part_dtype = torch.float32
            return NewTensor(place, part_dtype, shape, lambda: select(tensor.make(), rows).to(part_dtype))

        whole = torch.empty(tensor.shape, device="meta")
        axis_of_rows = 1 if is_of_experts else 0
        n_rows = select(whole, slice(None)).shape[axis_of_rows]
        return [part(place, rows) for place, rows in self._places(tensor.name, n_rows).items()]


def to_blocks(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return codes ``[..., K/2]`` and scale bytes ``[..., K/32]`` as rows of blocks ``[..., K/32 * 17]``, all uint8."""
    # The bytes of elements 0 to 15 of a block, and of elements 16 to 31.
    first, second = codes.unflatten(-1, (-1, 2, BLOCK_SIZE // 4)).unbind(-2)
    even = first & 0x0F | second << 4
    odd = first >> 4 | second & 0xF0
    blocks = torch.stack([even, odd], dim=-1).flatten(-2)
    return torch.cat([scale[..., None], blocks], dim=-1).flatten(-2)


def gguf_package() -> ModuleType:
    """Return the module `gguf`. Raises [`CheckpointError`] if it is not installed, or knows no MXFP4."""
    try:
        import gguf
    except ImportError:
        raise CheckpointError("GGUF files need the package gguf; install it with `pip install gguf`") from None
    if not hasattr(gguf.GGMLQuantizationType, "MXFP4"):
        raise CheckpointError("this version of the package gguf knows no MXFP4; `pip install --upgrade gguf`")
    return gguf


def head_dim(config: "PreTrainedConfig") -> int:
    """Return the rows of each attention head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def unsupported_reason(config: "PreTrainedConfig") -> str | None:
    """Return why llama.cpp does not compute a model of this config as transformers does; `None` if it does."""
    known = ARCHITECTURES.get(config.model_type)
    if known is None:
        return f"the architecture {config.model_type!r} is not one of {', '.join(ARCHITECTURES)}"
    if (config.architectures or [known.model_class])[0] != known.model_class:
        return f"{config.architectures[0]} is no language model with a head ({known.model_class})"
    for name, values in {"hidden_act": ("silu",), **known.computes}.items():
        value = getattr(config, name, values[0])
        if value not in values:
            return f"llama.cpp computes {known.model_class} with {name}={values[0]!r} alone, not {value!r}"
    if known.name == "qwen2" and head_dim(config) * config.num_attention_heads != config.hidden_size:
        return "llama.cpp has no place for heads of Qwen2 that are not hidden_size / num_attention_heads wide"
    alternating = ["sliding_attention", "full_attention"] * config.num_hidden_layers
    if known.name == "gpt-oss" and config.layer_types != alternating[: len(config.layer_types)]:
        return "llama.cpp takes layers of gpt-oss for sliding and full attention by turns"
    rope = _rope(config)
    if rope["rope_type"] not in _ROPE_OPTIONS or rope["rope_type"] == "llama3" and config.model_type != "llama":
        return f"llama.cpp has no rotary embedding of the type {rope['rope_type']!r} for {config.model_type!r}"
    for option in ("attention_factor", "mscale", "mscale_all_dim"):
        if rope.get(option) is not None:
            return f"rope_parameters has {option!r}, which is not written to GGUF files"
    return None


def rope_frequencies(config: "PreTrainedConfig") -> torch.Tensor | None:
    """Return the divisors of Llama 3's rotary frequencies, float32 ``[head_dim / 2]``; `None` for other models."""
    rope = _rope(config)
    if rope["rope_type"] != "llama3":
        return None
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    size = head_dim(config)
    return rope["rope_theta"] ** -(torch.arange(0, size, 2, dtype=torch.float32) / size) / scaled


def _rope(config: "PreTrainedConfig") -> dict[str, Any]:
    """Return `rope_parameters`, with the type in any case."""
    return {"rope_type": "default", **(config.rope_parameters or {})}


def _options(architecture: Architecture, config: "PreTrainedConfig") -> dict[str, int | float | str]:
    """Return the metadata of a model, by full keys."""
    names = {**_COMMON, **architecture.options}
    values = {key: getattr(config, name, None) for key, name in names.items()}
    values |= {key: head_dim(config) for key, name in names.items() if name == "head_dim"}
    rope = _rope(config)
    values["rope.freq_base"] = float(rope["rope_theta"])
    scaling = _ROPE_OPTIONS[rope["rope_type"]]
    if scaling:
        values["rope.scaling.type"] = rope["rope_type"]
    for key, name in scaling.items():
        value = rope.get(name)
        if value is not None and not name.startswith("original"):
            value = float(value)
        values[f"rope.scaling.{key}"] = value
    return {f"{architecture.name}.{key}": value for key, value in values.items() if value is not None}
