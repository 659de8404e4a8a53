# SPDX-License-Identifier: Apache-2.0
"""Which layers are quantized: decided by the structure of a model, by whole name parts, and by what its code reads."""

import pytest
import torch
import transformers
from tiny_models import make_model
from torch import nn
from transformers import T5Config
from transformers.models.t5.modeling_t5 import T5DenseActDense

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.model.layer_names import NamePatterns, find_layers, name_matches, skip_reasons, split_linears
from hf_mxfp4.model.structure import HEAD, OTHER_MODALITY, ROUTER, outside_body, text_part
from hf_mxfp4.model.weight_readers import find_weight_readers


# ---- names ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "pattern", "expected"),
    [
        ("model.layers.2.mlp.up_proj", "layers.2", True),
        ("model.layers.20.mlp.up_proj", "layers.2", False),
        ("model.layers.2.mlp.gate", "mlp.gate", True),
        ("model.layers.2.mlp.gate_proj", "mlp.gate", False),
        ("lm_head", "lm_head", True),
        ("model.layers.0", "model.layers.0.mlp", False),
        ("model.layers.0.mlp", "layers.mlp", False),
        ("model.layers.0.mlp", "layers.0.", False),
        ("model.layers.0.mlp.up_proj", r"re:model\.layers\.\d+\.mlp\..*", True),
        ("model.layers.0.mlp.up_proj", r"re:model\.layers\.\d+\.mlp", False),
        ("model.layers.0.mlp.up_proj", "re:up_proj", False),
        ("model.layers.0.mlp.up_proj", "re:.*(up|gate)_proj", True),
    ],
)
def test_name_matches(name, pattern, expected):
    assert name_matches(name, pattern) is expected
    assert NamePatterns(["another", "re:another", pattern]).match(name) is expected


def test_expressions_that_would_take_hours_are_refused():
    with pytest.raises(ValueError, match="takes too long to match 'model.layers.0"):
        name_matches("model.layers.0.self_attn.q_proj" * 4, "re:((.|..)+(.|...)+)+[!?]")


@pytest.mark.parametrize("option", ["modules_to_not_convert", "full_precision"])
@pytest.mark.parametrize("names", [["layers.0"] * 100_001, ["re:" + "a|" * 60_000]], ids=["names", "alternatives"])
def test_lists_that_would_take_minutes_are_refused(names, option):
    with pytest.raises(ValueError, match=f"{option} has more than 100000 names or characters of regular expressions"):
        MXFP4RLConfig.from_dict({option: names})


def tree(**linears: nn.Module) -> nn.Module:
    """A module with the given dotted names, two underscores for a dot."""
    root = nn.Module()
    for name, module in linears.items():
        *parents, last = name.split("__")
        node = root
        for part in parents:
            if part not in node._modules:
                node.add_module(part, nn.Module())
            node = node._modules[part]
        node.add_module(last, module)
    return root


ROUTERS = (
    "mlp__gate", "mlp__shared_expert_gate", "block_sparse_moe__gate", "feed_forward__router", "mlp__router__layer",
)  # fmt: skip
HEADS = ("lm_head", "embed_out", "score", "classifier", "qa_outputs")


@pytest.mark.parametrize("name", [*(f"layers__0__{router}" for router in ROUTERS), *HEADS])
def test_routers_and_heads_are_left_alone_by_name(name):
    model = tree(**{name: nn.Linear(4, 2), "layers__0__mlp__gate_proj": nn.Linear(4, 4)})
    quantized, skipped = find_layers(model)
    assert list(quantized) == ["layers.0.mlp.gate_proj"]
    assert list(skipped) == [name.replace("__", ".")]


@pytest.mark.parametrize(
    ("patterns", "n_quantized"),
    [
        (["mlp"], 8),
        (["self_attn.q_proj", "self_attn.k_proj"], 10),
        (["layers.1"], 7),
        (["model.layers.1.mlp.up_proj"], 13),
        (["re:.*(q|k|v)_proj"], 8),
        ([r"re:model\.layers\.0\..*"], 7),
        (["lm_head"], 14),
    ],
    ids=str,
)
def test_extra_skips(patterns, n_quantized):
    model = make_model()
    quantized, skipped = find_layers(model, patterns)
    assert len(quantized) == n_quantized
    assert len(skipped) == 15 - n_quantized
    assert "lm_head" in skipped
    assert split_linears(model, patterns) == (quantized, list(skipped))


@pytest.mark.parametrize("pattern", ["layers.2", "mlp.gate_pro", "q_projs", "re:down_proj", "model.layer.0", "layers."])
def test_a_skip_that_matches_nothing_is_an_error(pattern):
    with pytest.raises(ValueError, match="modules_to_not_convert.*matches no module of Qwen2ForCausalLM") as error:
        find_layers(make_model(), ["layers.0", pattern])
    assert repr(pattern) in str(error.value)


@pytest.mark.parametrize("pattern", ["model.layers.1", "layers.1", r"re:model\.layers\.1\..*", r"re:layers\.1\..*"])
def test_a_base_model_understands_the_names_of_its_head_model(pattern):
    quantized, skipped = find_layers(make_model("llama").model, [pattern])
    assert len(quantized) == 7
    assert all(name.startswith("layers.0.") for name in quantized)
    assert len(skipped) == 7


def test_subclasses_of_linear_are_left_alone():
    class Special(nn.Linear):
        pass

    quantized, skipped = find_layers(tree(a=nn.Linear(4, 4), b=Special(4, 4), c=nn.Bilinear(4, 4, 4)))
    assert list(quantized) == ["a"]
    assert skipped == {}


# ---- structure ------------------------------------------------------------------------------------------------------


ENCODER = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
BART = {"d_model": 64, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
T5 = {"d_model": 64, "d_kv": 32, "d_ff": 64, "num_layers": 1, "num_heads": 2}
TEXT = {**ENCODER, "num_key_value_heads": 1, "vocab_size": 64, "pad_token_id": 0}


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
    quantized, skipped = find_layers(model)
    assert quantized
    assert all(name.startswith(body) for name in quantized)
    assert {reason for name, reason in skipped.items() if name != "lm_head"} <= {OTHER_MODALITY, HEAD}
    inside = text_part(model)
    assert all(module in inside for module in quantized.values())


@pytest.mark.parametrize(
    ("model", "config"), [("WhisperForConditionalGeneration", "WhisperConfig"), ("ViTModel", "ViTConfig")]
)
def test_the_layers_of_a_speech_or_vision_model_alone_are_quantized(model, config):
    model = on_meta(model, config)
    quantized, skipped = find_layers(model)
    assert len(quantized) > 10 * len(skipped)
    assert text_part(model) is None


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
        vision_config=transformers.CLIPVisionConfig(**ENCODER, image_size=32, patch_size=16),
        text_config=transformers.LlamaConfig(**TEXT),
    )
    tower = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
    assert "vision" in next(name for name, module in model.named_modules() if module is tower)
    tower[0].add_module("experts", nn.Module())
    tower[0].experts.up_proj = nn.Parameter(torch.empty(4, 8, 8, device="meta"))
    name = next(name for name, module in model.named_modules() if module is tower[0].experts)
    assert skip_reasons(model)[name] == OTHER_MODALITY


# ---- weights that code reads ----------------------------------------------------------------------------------------


def test_layers_of_state_space_models_whose_weights_kernels_read():
    model = on_meta("MambaForCausalLM", "MambaConfig", hidden_size=64, num_hidden_layers=1, vocab_size=32)
    mixer = model.backbone.layers[0].mixer
    expected = dict.fromkeys([mixer.x_proj, mixer.dt_proj, mixer.out_proj], "MambaMixer.forward")
    assert find_weight_readers(model) == expected


def test_layers_whose_dtype_is_read():
    model = on_meta("T5Model", "T5Config", **T5, vocab_size=32)
    readers = find_weight_readers(model)
    assert len(readers) == 2
    assert set(readers.values()) == {"T5DenseActDense.forward"}


def test_a_weight_that_another_module_reads():
    model = on_meta("RwkvModel", "RwkvConfig", hidden_size=64, num_hidden_layers=1, vocab_size=32)
    block = model.blocks[0]
    reader = "RwkvModel._rescale_layers"
    assert find_weight_readers(model) == {block.attention.output: reader, block.feed_forward.value: reader}


def test_layers_of_a_subclass():
    class Mine(T5DenseActDense):
        pass

    layer = Mine(T5Config(**T5))
    assert find_weight_readers(layer) == {layer.wo: "T5DenseActDense.forward"}


@pytest.mark.parametrize(("is_slow", "n_readers"), [(False, 0), (True, 2)])
def test_bloom_reads_weights_with_an_option_alone(is_slow, n_readers):
    options = {"hidden_size": 64, "n_layer": 1, "n_head": 2, "vocab_size": 32, "pretraining_tp": 2}
    model = on_meta("BloomForCausalLM", "BloomConfig", **options, slow_but_exact=is_slow)
    assert len(find_weight_readers(model)) == n_readers
