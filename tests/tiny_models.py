# SPDX-License-Identifier: Apache-2.0
"""Decoders of a few thousand parameters, one per family."""

import torch
from transformers import (
    GemmaConfig,
    GemmaForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)


_FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "gemma": (GemmaConfig, GemmaForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "qwen2_moe": (Qwen2MoeConfig, Qwen2MoeForCausalLM),
    "mixtral": (MixtralConfig, MixtralForCausalLM),
    "gpt_oss": (GptOssConfig, GptOssForCausalLM),
}

#: Options that only mixtures of experts know; Mixtral and gpt-oss have `intermediate_size` per expert.
_EXPERTS = {
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "qwen2_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64,
        "decoder_sparse_step": 1,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


def make_model(
    family="qwen2", *, layers=2, hidden=64, intermediate=96, tie=False, dtype=torch.float32, seed=0, **extra
):
    """A randomly initialised decoder of a few thousand parameters, vocabulary 32."""
    config_class, model_class = _FAMILIES[family]
    options = {
        "vocab_size": 32,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": hidden // 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": tie,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": None,
        **extra,
    }
    options = {**_EXPERTS.get(family, {}), **options}
    torch.manual_seed(seed)
    model = model_class(config_class(**options)).to(dtype)
    for parameter in model.parameters():
        # Norms and biases start constant; distinct values make their mistakes visible.
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, mean=float(parameter.detach().float().mean()), std=0.1)
    return model.eval()
