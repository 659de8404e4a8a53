# SPDX-License-Identifier: Apache-2.0
"""The architectures that are written and read: what GGUF calls them and their options, and what llama.cpp computes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


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
    """The architecture that models of a `model_type` of transformers have; `None` for one that is not known here."""
    return next((known for known in ARCHITECTURES if known.model_type == model_type), None)


def of_file(name: str, has_experts: bool) -> Architecture | None:
    """The architecture of a file by its `general.architecture`: Mixtral is a Llama with experts there."""
    return next((known for known in ARCHITECTURES if (known.name, known.has_experts) == (name, has_experts)), None)
