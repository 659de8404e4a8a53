# SPDX-License-Identifier: Apache-2.0
"""What is a head, a router or a part for another modality is decided by the structure of a model."""

import pytest
import torch
import transformers
from torch import nn

from hf_mxfp4.model_structure import HEAD, OTHER_MODALITY, ROUTER, outside_body, text_part
from hf_mxfp4.module_names import skip_reasons, split_linears


ENCODER = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
BART = {"d_model": 64, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
T5 = {"d_model": 64, "d_kv": 32, "d_ff": 64, "num_layers": 1, "num_heads": 2}
VISION = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
TEXT = {**VISION, "num_key_value_heads": 1, "vocab_size": 64, "pad_token_id": 0}


def on_meta(model: str, config: str, **options) -> nn.Module:
    with torch.device("meta"):
        return getattr(transformers, model)(getattr(transformers, config)(**options))


def outside(model: nn.Module) -> dict[str, str]:
    found = outside_body(model)
    return {name: found[module] for name, module in model.named_modules() if module in found}


@pytest.mark.parametrize(
    ("model", "config", "options", "heads"),
    [
        ("BertForSequenceClassification", "BertConfig", ENCODER, ["bert.pooler.dense", "classifier"]),
        ("BertForMaskedLM", "BertConfig", ENCODER, ["cls.predictions.transform.dense", "cls.predictions.decoder"]),
        ("BertModel", "BertConfig", ENCODER, ["pooler.dense"]),
        (
            "BartForSequenceClassification",
            "BartConfig",
            BART,
            ["classification_head.dense", "classification_head.out_proj"],
        ),
        ("T5ForQuestionAnswering", "T5Config", T5, ["qa_outputs"]),
        ("T5ForConditionalGeneration", "T5Config", T5, ["lm_head"]),
    ],
)
def test_heads_are_what_stands_outside_the_layers(model, config, options, heads):
    assert outside(on_meta(model, config, **options)) == dict.fromkeys(heads, HEAD)


@pytest.mark.parametrize(
    ("model", "config", "options", "body"),
    [
        ("Idefics2ForConditionalGeneration", "Idefics2Config", {}, "model.text_model.layers."),
        ("SmolVLMForConditionalGeneration", "SmolVLMConfig", {}, "model.text_model.layers."),
        ("Phi4MultimodalForCausalLM", "Phi4MultimodalConfig", {}, "model.layers."),
        ("GitForCausalLM", "GitConfig", {}, "git.encoder.layer."),
        ("IdeficsForVisionText2Text", "IdeficsConfig", {}, ("model.layers.", "model.gated_cross_attn_layers.")),
        ("Blip2ForConditionalGeneration", "Blip2Config", {}, "language_model.model.decoder.layers."),
        ("JanusForConditionalGeneration", "JanusConfig", {}, "model.language_model.layers."),
    ],
)
def test_of_several_modalities_the_layers_of_the_text_decoder_are_quantized(model, config, options, body):
    model = on_meta(model, config, **options)
    quantized, skipped = split_linears(model)
    assert quantized and all(name.startswith(body) for name in quantized)
    reasons = skip_reasons(model)
    assert {reasons[name] for name in skipped if name != "lm_head"} <= {OTHER_MODALITY, HEAD}
    inside = text_part(model)
    assert all(module in inside for module in quantized.values())


@pytest.mark.parametrize(
    ("model", "config"), [("WhisperForConditionalGeneration", "WhisperConfig"), ("ViTModel", "ViTConfig")]
)
def test_the_layers_of_a_speech_or_vision_model_alone_are_quantized(model, config):
    model = on_meta(model, config)
    quantized, skipped = split_linears(model)
    assert len(quantized) > 10 * len(skipped) and text_part(model) is None


def test_routers_are_found_by_their_number_of_outputs():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.chooser = nn.Linear(64, 8)
            self.deep_chooser = nn.Sequential(nn.Linear(64, 16), nn.Linear(16, 9))
            self.weight_of_shared = nn.Linear(64, 1)
            # As wide as there are experts, and no router.
            self.shared_expert = nn.ModuleDict({"up": nn.Linear(64, 8), "down": nn.Linear(8, 64)})
            self.experts = nn.ModuleList([nn.Linear(64, 64) for _ in range(8)])

    found = outside(Block())
    assert found == dict.fromkeys(["chooser", "deep_chooser.0", "deep_chooser.1", "weight_of_shared"], ROUTER)


def test_experts_in_a_tower_are_left_alone():
    model = on_meta(
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        vision_config=transformers.CLIPVisionConfig(**VISION, image_size=32, patch_size=16),
        text_config=transformers.LlamaConfig(**TEXT),
    )
    tower = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
    assert "vision" in next(name for name, module in model.named_modules() if module is tower)
    tower[0].add_module("experts", nn.Module())
    tower[0].experts.up_proj = nn.Parameter(torch.empty(4, 8, 8, device="meta"))
    name = next(name for name, module in model.named_modules() if module is tower[0].experts)
    assert skip_reasons(model)[name] == OTHER_MODALITY
