# SPDX-License-Identifier: Apache-2.0
"""Tiny configs of transformers' architectures, made by shrinking what their config classes say by default."""

from typing import Any

import transformers
from torch import nn
from transformers.models.auto import modeling_auto as auto


#: Kinds of models; an architecture is tried as the first kind that it has.
KINDS = {
    "image-text": auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    "encoder-decoder": auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "decoder": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "speech": auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    "encoder": auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
}

VOCABULARY = 256
#: Options by name: what they become where the default is larger, in any part of a config.
_AT_MOST = {
    64: (
        "hidden_size d_model n_embd dim embed_dim emb_dim d_ff ffn_dim ffn_hidden_size intermediate_size "
        "n_inner hidden_dim encoder_ffn_dim decoder_ffn_dim moe_intermediate_size "
        "shared_expert_intermediate_size dense_intermediate_size shared_intermediate_size "
        "expert_ffn_hidden_size moe_ffn_hidden_size embedding_size word_embed_proj_dim intermediate_size_mlp "
        "feed_forward_hidden_size hidden_size_per_layer_input lru_width mamba_d_ssm ffn_intermediate_size "
        "moe_shared_expert_intermediate_size projection_dim text_intermediate_size out_hidden_size "
        "attention_hidden_size max_position_embeddings n_positions d_inner depthwise_seq_size mlp_dim "
        "projector_hidden_size mlp_hidden_size"
    ),
    2: (
        "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers "
        "num_encoder_layers num_attention_heads n_head n_heads num_heads encoder_attention_heads "
        "decoder_attention_heads num_key_value_heads num_kv_heads attention_heads depth num_experts_per_tok "
        "num_experts_per_token moe_topk moe_top_k top_k_experts num_mem_blocks swa_num_attention_heads "
        "swa_num_key_value_heads num_attention_groups num_hidden_groups linear_num_key_heads "
        "linear_num_value_heads index_n_heads num_decoder_attention_heads"
    ),
    1: (
        "num_key_value_heads_per_layer num_nextn_predict_layers first_k_dense_replace n_shared_experts "
        "num_shared_experts n_group topk_group mamba_n_groups n_groups num_mem_heads mamba_num_groups "
        "interleave_moe_layer_step"
    ),
    32: (
        "head_dim attention_head_size d_kv kv_channels qk_nope_head_dim qk_rope_head_dim v_head_dim "
        "q_lora_rank kv_lora_rank global_head_dim linear_key_head_dim linear_value_head_dim qk_head_dim "
        "sliding_window attention_window_size index_head_dim vocab_size_per_layer_input_dim rope_head_dim "
        "swa_head_dim local_attention"
    ),
    16: (
        "state_size mamba_d_state ssm_state_size mamba_d_head mamba_dt_rank time_step_rank mamba_head_dim "
        "num_mel_bins chunk_size mamba_chunk_size index_topk patch_size"
    ),
    4: "num_experts num_local_experts n_routed_experts moe_num_experts n_experts",
    VOCABULARY: "vocab_size unpadded_vocab_size vocab_size_per_layer_input text_vocab_size",
    224: "image_size",
}
_LIMITS = {name: limit for limit, names in _AT_MOST.items() for name in names.split()}
_NOT_OPTIONS = ("architectures", "transformers_version", "id2label", "label2id", "dtype")
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}

#: What single architectures need besides.
_SPECIAL: dict[str, dict[str, Any]] = {
    "mamba2": {"num_heads": 4, "head_dim": 32, "expand": 2},
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 16, "attn_layer_indices": [1]},
    "granitemoehybrid": {"mamba_n_heads": 8, "mamba_d_head": 16, "layer_types": ["mamba", "attention"]},
    "falcon_h1": {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_ssm": 64},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "codegen": {"n_head": 4, "n_embd": 128, "rotary_dim": 16},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "ernie4_5_moe": {"moe_k": 2},
    "deepseek_v3": {"num_experts_per_tok": 2},
    "falcon": {"new_decoder_architecture": False},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "ministral": {"head_dim": 32},
    "hunyuan_v1_dense": {"head_dim": 32},
    "hunyuan_v1_moe": {"head_dim": 32},
    "nemotron": {"num_key_value_heads": 2},
    "esm": {"vocab_size": VOCABULARY, "mask_token_id": 3, "position_embedding_type": "rotary"},
    "xlnet": {"n_head": 2, "d_head": 32},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "reformer": {"is_decoder": True, "attn_layers": ["local", "local"], "axial_pos_embds": False},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
}


def architectures() -> dict[str, tuple[str, str]]:
    """Return the kind and the class by model type, models of images last."""
    found: dict[str, tuple[str, str]] = {}
    for kind, names in KINDS.items():
        for model_type, cls in names.items():
            found.setdefault(model_type, (kind, cls if isinstance(cls, str) else cls[0]))
    return dict(sorted(found.items(), key=lambda item: item[1][0] == "image-text"))


def tiny_model(model_type: str, cls: str) -> nn.Module:
    """Return a tiny model of an architecture with random weights."""
    model_class = getattr(transformers, cls)
    config_class = model_class.config_class
    options = shrunk(config_class().to_dict()) | _SPECIAL.get(model_type, {})
    options.pop("model_type", None)
    return model_class(config_class(**options))


def shrunk(options: dict[str, Any]) -> dict[str, Any]:
    """Return options of a config, and of the configs within, made small."""
    found = {}
    for name, value in options.items():
        if name in _NOT_OPTIONS:
            continue
        if name == "per_layer_config":
            value = None
        elif isinstance(value, dict) and name not in ("rope_scaling", "rope_parameters"):
            value = shrunk(value)
        elif "drop" in name and isinstance(value, float):
            value = 0.0
        elif name in _TOKENS:
            value = _TOKENS[name]
        elif name in _LIMITS and isinstance(value, int) and not isinstance(value, bool):
            value = min(value, _LIMITS[name])
        found[name] = value
    layers = next(
        (found[n] for n in ("num_hidden_layers", "n_layer", "num_layers") if isinstance(found.get(n), int)), 2
    )
    for name in ("layer_types", "layers_block_type", "mlp_layer_types", "layers_types", "block_types"):
        if isinstance(found.get(name), list):
            kinds = list(dict.fromkeys(found[name]))
            found[name] = (kinds * layers)[:layers]
    return found
