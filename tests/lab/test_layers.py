# SPDX-License-Identifier: Apache-2.0
"""Which tensors of a checkpoint are analysed, by name; checked against what the quantizer does to the models."""

import pytest
import torch
from tiny_models import make_model

from hf_mxfp4.lab.layers import classify, location_of, natural_key
from hf_mxfp4.module_names import find_layers


BF16 = torch.bfloat16
VECTOR, HEAD, EMBEDDING, OTHER = (
    "norm, bias or other vector",
    "head, router or other tower",
    "embedding",
    "not the weight of a linear layer",
)


@pytest.mark.parametrize(
    ("name", "location"),
    [
        ("model.layers.3.self_attn.q_proj.weight", ("self_attn.q_proj", 3)),
        ("model.layers.12.mlp.experts.7.up_proj.weight", ("mlp.experts.up_proj", 12)),
        ("model.layers.0.mlp.experts.gate_up_proj", ("mlp.experts.gate_up_proj", 0)),
        ("transformer.h.5.attn.weight", ("attn", 5)),
        ("lm_head.weight", ("lm_head", None)),
        ("blocks.4.weight", ("blocks", 4)),
    ],
)
def test_locations(name, location):
    assert location_of(name) == location


@pytest.mark.parametrize(
    ("name", "shape", "skipped"),
    [
        ("model.layers.0.mlp.up_proj.weight", (64, 32), None),
        ("model.layers.0.mlp.experts.3.up_proj.weight", (64, 32), None),
        ("model.layers.0.mlp.experts.gate_up_proj", (4, 64, 32), None),
        ("model.layers.0.input_layernorm.weight", (32,), VECTOR),
        ("model.layers.0.self_attn.q_proj.bias", (32,), VECTOR),
        ("model.norm.weight", (1, 32), VECTOR),
        ("lm_head.weight", (64, 32), HEAD),
        ("model.layers.0.mlp.gate.weight", (4, 32), HEAD),
        ("visual.blocks.0.attn.qkv.weight", (96, 32), HEAD),
        ("model.embed_tokens.weight", (64, 32), EMBEDDING),
        ("transformer.wte.weight", (64, 32), EMBEDDING),
        ("transformer.wpe.weight", (64, 32), EMBEDDING),
        ("bert.embeddings.word_embeddings.weight", (64, 32), EMBEDDING),
        ("gpt_neox.embed_in.weight", (64, 32), EMBEDDING),
        ("tok_embeddings.weight", (64, 32), EMBEDDING),
        ("model.layers.0.mixer.conv1d.weight", (64, 1, 4), OTHER),
        ("model.layers.0.mixer.A_log", (64, 16), OTHER),
        ("model.layers.0.mlp.experts.gate_up_proj_bias", (4, 64), OTHER),
    ],
)
def test_decisions(name, shape, skipped):
    decision = classify(name, shape, BF16)
    assert decision.skipped == skipped
    assert decision.axis == (None if skipped else -1) and decision.stored is None


def test_the_gate_projection_is_no_router():
    assert classify("model.layers.0.mlp.gate_proj.weight", (64, 32), BF16).axis == -1


@pytest.mark.parametrize(("model_type", "axis"), [("gpt_oss", 1), ("llama4_text", 1), ("qwen3_moe", -1), ("", -1)])
@pytest.mark.parametrize("name", ["gate_up_proj", "down_proj"])
def test_contraction_axis_of_fused_experts(name, model_type, axis):
    assert classify(f"model.layers.0.mlp.experts.{name}", (4, 64, 32), BF16, model_type).axis == axis


def test_conv1d_models_have_no_linear_layer():
    assert classify("transformer.h.0.attn.c_attn.weight", (32, 96), BF16, "gpt2").skipped == OTHER


def test_own_skips():
    decision = classify("model.layers.2.mlp.up_proj.weight", (64, 32), BF16, skips=("layers.2",))
    assert decision.skipped == "modules_to_not_convert"
    assert classify("model.layers.20.mlp.up_proj.weight", (64, 32), BF16, skips=("layers.2",)).axis == -1


@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    [
        ("model.layers.0.mlp.up_proj.weight", (64, 16), torch.uint8),
        ("model.layers.0.mlp.up_proj.weight", (64, 32), torch.float8_e4m3fn),
        ("model.layers.0.mlp.up_proj.weight_packed", (64, 16), torch.uint8),
        ("model.layers.0.mlp.up_proj.weight_scale", (64, 1), torch.uint8),
        ("model.layers.0.mlp.up_proj.qweight", (4, 64), torch.int32),
        ("model.layers.0.mlp.experts.gate_up_proj_blocks", (4, 64, 2, 16), torch.uint8),
        ("model.layers.0.mlp.experts.down_proj", (4, 64, 32), torch.float8_e4m3fn),
    ],
)
def test_quantized_storage_is_recognised(name, shape, dtype):
    assert classify(name, shape, dtype).stored == f"{name} ({str(dtype).removeprefix('torch.')})"


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma"])
def test_the_same_layers_as_the_quantizer(family):
    model = make_model(family)
    chosen = {
        name.removesuffix(".weight")
        for name, tensor in model.state_dict().items()
        if classify(name, tensor.shape, tensor.dtype, model.config.model_type).axis is not None
    }
    assert chosen == {name for name, layer in find_layers(model)[0].items() if isinstance(layer, torch.nn.Linear)}


def test_natural_order():
    names = ["l.10.a", "l.9.b", "l.9.a", "norm", "l.x"]
    assert sorted(names, key=natural_key) == ["l.9.a", "l.9.b", "l.10.a", "l.x", "norm"]
