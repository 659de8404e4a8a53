# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts of a few thousand parameters, one per router, tokens for them, and inputs of single experts."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM


_COMMON = {
    "vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 64, "pad_token_id": 0, "eos_token_id": 1,
    "bos_token_id": None, "num_experts_per_tok": 2,
}  # fmt: skip
_EXPERTS = {"num_experts": 6, "moe_intermediate_size": 32}
_LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
    "head_dim": 8, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "num_key_value_heads": 2,
}  # fmt: skip
FAMILIES = {
    "qwen3_moe": {**_EXPERTS, "norm_topk_prob": True},
    "qwen2_moe": {**_EXPERTS, "norm_topk_prob": False, "shared_expert_intermediate_size": 32},
    "mixtral": {"num_local_experts": 6},
    "gpt_oss": {"num_local_experts": 6, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8},
    "olmoe": {"num_experts": 6},
    "deepseek_v3": {"n_routed_experts": 6, "moe_intermediate_size": 32, **_LATENT},
    "granitemoe": {"num_local_experts": 6},
}


def make_moe(family="qwen3_moe", *, seed=0, **extra):
    """A randomly initialised mixture of experts with distinct weights in its routers and norms."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **{**_COMMON, **FAMILIES[family], **extra})
    model = AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            elif ".gate." in name or ".router." in name:
                torch.nn.init.normal_(parameter, std=0.3)
            else:
                torch.nn.init.normal_(parameter, std=0.1)
    return model.eval()


def tokens(batch=3, length=7, seed=0):
    """Token ids ``[batch, length]``, none of them special."""
    return torch.randint(2, 32, (batch, length), generator=torch.Generator().manual_seed(seed))


def routing(tokens=21, experts=4, k=2, dtype=torch.float64, unused=None, seed=0):
    """Hidden states, experts and their weights; no token goes to expert ``unused``."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(tokens, experts, generator=generator)
    if unused is not None:
        scores[:, unused] = -1
    states = torch.randn(tokens, 64, generator=generator, dtype=torch.float64).to(dtype)
    return states, scores.topk(k).indices, torch.rand(tokens, k, generator=generator, dtype=torch.float64).to(dtype)
