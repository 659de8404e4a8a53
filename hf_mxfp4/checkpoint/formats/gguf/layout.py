# SPDX-License-Identifier: Apache-2.0
"""How llama.cpp stores the architectures that are written and read: names of tensors, order of rows, and options.

The differences between a model of transformers and what llama.cpp computes are all ones of rows:

* its rotary embedding of Llama rotates adjacent rows of a head instead of rows half a head apart, so those of ``q``
  and ``k`` are stored in another order (not those of the other architectures);
* gate and up projections of experts are tensors of their own;
* gpt-oss has their rows alternating in the model.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from ...folder import CheckpointError


if TYPE_CHECKING:
    from transformers import PreTrainedConfig

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
_HEAD_DIM = {"attention.key_length": "head_dim", "attention.value_length": "head_dim"}
_NO_WINDOW = {"use_sliding_window": (False, None)}
_NO_BIAS = {"attention_bias": (False, None)}


@dataclass(frozen=True)
class Architecture:
    """One architecture of llama.cpp, as far as models of one `model_type` use it.

    Attributes:
        name: `general.architecture`.
        model_type, model_class: of transformers.
        options: key of the file after ``name`` -> attribute of the config.
        computes: attribute of the config -> the values that llama.cpp computes, which the file does not record.
        own_names: tensors that are called otherwise than in the other architectures.
        permutes_heads: rows of q and k are stored in the order of the original Llama.
        gate_up_alternate: the model has rows of gate and up of its experts by turns.
    """

    name: str
    model_type: str
    model_class: str
    options: Mapping[str, str]
    computes: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    own_names: Mapping[str, str] = field(default_factory=dict)
    permutes_heads: bool = False
    gate_up_alternate: bool = False

    @property
    def has_experts(self) -> bool:
        return "expert_count" in self.options


_LLAMA_OPTIONS = {**_COMMON, **_HEAD_DIM, "rope.dimension_count": "head_dim"}

ARCHITECTURES = (
    Architecture("llama", "llama", "LlamaForCausalLM", _LLAMA_OPTIONS, permutes_heads=True),
    Architecture(
        "llama",
        "mixtral",
        "MixtralForCausalLM",
        {**_LLAMA_OPTIONS, "expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
        computes={"sliding_window": (None,)},
        permutes_heads=True,
    ),
    Architecture("qwen2", "qwen2", "Qwen2ForCausalLM", _COMMON, computes=_NO_WINDOW),
    Architecture("qwen3", "qwen3", "Qwen3ForCausalLM", {**_COMMON, **_HEAD_DIM}, computes={**_NO_WINDOW, **_NO_BIAS}),
    Architecture(
        "qwen3moe",
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        {
            **_COMMON,
            **_HEAD_DIM,
            "expert_count": "num_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "moe_intermediate_size",
        },
        computes={
            **_NO_WINDOW,
            **_NO_BIAS,
            "norm_topk_prob": (True,),
            "decoder_sparse_step": (1,),
            "mlp_only_layers": ([], None),
        },
    ),
    Architecture(
        "gpt-oss",
        "gpt_oss",
        "GptOssForCausalLM",
        {
            **_COMMON,
            **_HEAD_DIM,
            "attention.sliding_window": "sliding_window",
            "expert_count": "num_local_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "intermediate_size",
        },
        computes={"attention_bias": (True,), "swiglu_alpha": (1.702, None), "swiglu_limit": (7.0, None)},
        own_names={"post_attention_layernorm": "post_attention_norm"},
        gate_up_alternate=True,
    ),
)


def of_model(model_type: str) -> Architecture | None:
    """Return the architecture of models of a `model_type` of transformers; `None` for an unknown one."""
    return next((known for known in ARCHITECTURES if known.model_type == model_type), None)


#: Frequencies of Llama 3's rotary embedding, which are a tensor in the file.
ROPE_FREQUENCIES = "rope_freqs.weight"
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
    "llama3": {},
}

#: Rows of a model's tensor that are in a tensor of the file, in the order there; of biases elements.
Rows = slice | torch.Tensor
ALL = slice(None)

_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.sinks": "attn_sinks",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "mlp.experts.down_proj": "ffn_down_exps",
}
_IN_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_SUFFIX = re.compile(r"(.+?)(?:\.(weight|bias)|_(bias))?")


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
    known = of_model(config.model_type)
    if known is None:
        return f"the architecture {config.model_type!r} is not one of llama, mixtral, qwen2, qwen3, qwen3_moe, gpt_oss"
    if (config.architectures or [known.model_class])[0] != known.model_class:
        return f"{config.architectures[0]} is no language model with a head ({known.model_class})"
    for name, values in {"hidden_act": ("silu",), **known.computes}.items():
        value = getattr(config, name, values[0])
        if value not in values:
            return f"llama.cpp computes {known.model_class} with {name}={values[0]!r} alone, not {value!r}"
    if known.name == "qwen2" and head_dim(config) * config.num_attention_heads != config.hidden_size:
        return "llama.cpp has no place for heads of Qwen2 that are not hidden_size / num_attention_heads wide"
    if known.name == "gpt-oss" and not _alternates(config.layer_types):
        return "llama.cpp takes layers of gpt-oss for sliding and full attention by turns"
    rope = rope_of(config)
    if rope["rope_type"] not in _ROPE_OPTIONS:
        return f"llama.cpp has no rotary embedding of the type {rope['rope_type']!r} for {known.name!r}"
    if rope["rope_type"] == "llama3" and known.model_type != "llama":
        return "scaled frequencies of Llama 3 are read for Llama alone"
    if extra := sorted(k for k in ("attention_factor", "mscale", "mscale_all_dim") if rope.get(k) is not None):
        return f"rope_parameters has {extra[0]!r}, which is not written to GGUF files"
    return None


def _alternates(layer_types: list[str]) -> bool:
    return all(kind == ("full_attention" if i % 2 else "sliding_attention") for i, kind in enumerate(layer_types))


def rope_of(config: "PreTrainedConfig") -> dict[str, Any]:
    """Return `rope_parameters`, with the type in any case."""
    return {"rope_type": "default", **(config.rope_parameters or {})}


def write_options(architecture: Architecture, config: "PreTrainedConfig") -> dict[str, int | float | str]:
    """Return the metadata, by full keys."""
    values = {key: getattr(config, name, None) for key, name in architecture.options.items()}
    values = {key: head_dim(config) if architecture.options[key] == "head_dim" else v for key, v in values.items()}
    rope = rope_of(config)
    values["rope.freq_base"] = float(rope["rope_theta"])
    if scaling := _ROPE_OPTIONS[rope["rope_type"]]:
        values["rope.scaling.type"] = rope["rope_type"]
        floats = {key: rope.get(name) for key, name in scaling.items()}
        values |= {f"rope.scaling.{key}": v if key.startswith("orig") else _float(v) for key, v in floats.items()}
    return {f"{architecture.name}.{key}": value for key, value in values.items() if value is not None}


def _float(value: float | None) -> float | None:
    return None if value is None else float(value)


def rope_frequencies(config: "PreTrainedConfig") -> torch.Tensor | None:
    """Return the divisors of Llama 3's rotary frequencies, float32 ``[head_dim / 2]``; `None` for any other rotary
    embedding."""
    rope = rope_of(config)
    if rope["rope_type"] != "llama3":
        return None
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    size = head_dim(config)
    return rope["rope_theta"] ** -(torch.arange(0, size, 2, dtype=torch.float32) / size) / scaled


@dataclass(frozen=True)
class TensorNames:
    """The names for one model: ``heads`` and ``kv_heads`` of its attention, ``head_dim`` rows each."""

    architecture: Architecture
    heads: int
    kv_heads: int
    head_dim: int

    def places(self, name: str, n_rows: int) -> dict[str, Rows]:
        """Return the tensors of the file that have the rows of ``name``, a tensor of the model with ``n_rows`` of them.

        Raises [`CheckpointError`] for a tensor that llama.cpp has no place for.
        """
        owner, of_layer, of_experts = _SUFFIX.fullmatch(name).groups()
        suffix = of_layer or of_experts or "weight"
        if owner in _TOP:
            return {f"{_TOP[owner]}.{suffix}": ALL}
        match = _IN_LAYER.fullmatch(owner)
        block, own = (f"blk.{match[1]}", match[2].replace("block_sparse_moe", "mlp")) if match else ("", owner)
        if own == "mlp.experts.gate_up_proj":
            gate, up = self._gate_and_up(n_rows)
            return {f"{block}.ffn_gate_exps.{suffix}": gate, f"{block}.ffn_up_exps.{suffix}": up}
        theirs = {**_LAYER, **self.architecture.own_names}.get(own)
        if theirs is None:
            raise CheckpointError(f"{name} has no place in a GGUF file of the architecture {self.architecture.name!r}")
        return {f"{block}.{theirs}.{suffix}": self._order(own)}

    def _gate_and_up(self, n_rows: int) -> tuple[slice, slice]:
        if self.architecture.gate_up_alternate:
            return slice(0, None, 2), slice(1, None, 2)
        return slice(0, n_rows // 2), slice(n_rows // 2, n_rows)

    def _order(self, own: str) -> Rows:
        heads = {"self_attn.q_proj": self.heads, "self_attn.k_proj": self.kv_heads}.get(own)
        if heads is None or not self.architecture.permutes_heads:
            return ALL
        return torch.arange(heads * self.head_dim).view(heads, 2, -1).transpose(1, 2).flatten()
