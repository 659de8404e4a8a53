# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from tiny_models import make_model

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.quantizer import quantize_linears
from hf_mxfp4.rl.aqn import NormNoise
from hf_mxfp4.rl.vllm_sync import rollout_parameters


def quantized_model():
    model = make_model()
    quantize_linears(model, MXFP4RLConfig())
    return model


def test_quantized_values_travel_and_master_weights_stay():
    model = quantized_model()
    pushed = dict(rollout_parameters(model.named_parameters(), model))
    layer = model.model.layers[1].mlp.up_proj
    expected = layer.quantized_weight(layer.weight, torch.float32)
    assert torch.equal(pushed["model.layers.1.mlp.up_proj.weight"], expected)
    assert not torch.equal(expected, layer.weight)
    for name in ("lm_head.weight", "model.norm.weight", "model.layers.0.self_attn.q_proj.bias"):
        assert pushed[name] is dict(model.named_parameters())[name]
    assert list(pushed) == [name for name, _ in model.named_parameters()]


def test_noise_travels_on_norm_weights_only():
    model = quantized_model()
    noise = NormNoise(model, seed=0)
    clean = dict(rollout_parameters(model.named_parameters(), model))
    noisy = dict(rollout_parameters(model.named_parameters(), model, noise, step=4, sigma=0.1))
    changed = [name for name in clean if not torch.equal(clean[name], noisy[name])]
    assert changed == [f"{name}.weight" for name in noise.norms]
    index = list(noise.norms).index("model.norm")
    norm = model.model.norm.weight
    assert torch.equal(noisy["model.norm.weight"], norm + noise.noise(index, norm, 4, 0.1))


def test_nothing_matching_is_an_error():
    model = quantized_model()
    with pytest.raises(RuntimeError, match="none of the quantized layers"):
        list(rollout_parameters([("other.weight", torch.ones(2))], model))


def test_noise_without_norms_is_an_error():
    model = make_model()
    noise = NormNoise(model, seed=0)
    with pytest.raises(RuntimeError, match="reached none"):
        list(rollout_parameters([("other.weight", torch.ones(2))], model, noise, 1, 0.1))


def test_names_match_under_peft():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(quantized_model(), peft.LoraConfig(target_modules=["q_proj"]))
    noise = NormNoise(model, seed=0)
    base = [
        (name.removeprefix("base_model.model.").replace(".base_layer", ""), value)
        for name, value in model.named_parameters()
        if "lora_" not in name
    ]
    pushed = dict(rollout_parameters(base, model, noise, 1, 0.1))
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(pushed[name], dict(base)[name])
    assert not torch.equal(pushed["model.norm.weight"], dict(base)["model.norm.weight"])
