# SPDX-License-Identifier: Apache-2.0
"""Noise on norms: on which, how strong, when, gone after the rollout; never on one whose output a router reads."""

import copy

import pytest
import torch
from moe_models import FAMILIES, make_moe, tokens
from peft import LoraConfig, get_peft_model
from same_bits import IDS, assert_same
from tiny_models import make_model
from torch import nn
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from hf_mxfp4.model.routers import find_routers
from hf_mxfp4.rl import NoiseSchedule
from hf_mxfp4.rl.noise import NormNoise, find_norms


def test_norm_of_another_library_is_found_by_structure():
    class FasterRMSNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

    model = nn.ModuleDict({"a": FasterRMSNorm(), "final_norm": nn.PReLU(4), "b": nn.LayerNorm(4), "c": nn.PReLU(4)})
    assert list(find_norms(model)) == ["a", "final_norm"]


def test_of_a_model_of_images_the_decoder_gets_noise():
    text = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    text |= {"num_key_value_heads": 1, "vocab_size": 32}
    text |= {"rope_parameters": {"mrope_section": [1, 1, 2], "rope_type": "default"}}
    vision = {"depth": 2, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16}
    model = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision))
    assert any("visual" in name and name.endswith("norm1") for name, _ in model.named_modules())
    decoder = "model.language_model"
    expected = [
        f"{decoder}.layers.0.input_layernorm",
        f"{decoder}.layers.0.post_attention_layernorm",
        f"{decoder}.layers.1.input_layernorm",
        f"{decoder}.layers.1.post_attention_layernorm",
        f"{decoder}.norm",
    ]
    assert list(find_norms(model)) == expected
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    assert list(find_norms(adapted)) == [f"base_model.model.{name}" for name in expected]


def test_model_without_norm_is_refused():
    with pytest.raises(ValueError, match="found none in Linear"):
        NormNoise(nn.Linear(2, 2), seed=0)


def norms_before_routers(model):
    """The norms whose output is what a router gets, seen while the model runs: the same memory."""
    outputs = {}
    feeding = set()
    handles = [
        module.register_forward_hook(lambda m, args, output, name=name: outputs.update({name: output}))
        for name, module in model.named_modules()
        if "norm" in name.rsplit(".", 1)[-1]
    ]

    def look(module, args):
        same = [name for name, output in outputs.items() if output.data_ptr() == args[0].data_ptr()]
        assert same, "a router reads something else than a norm's output"
        feeding.update(same)

    handles += [router.register_forward_pre_hook(look) for router in find_routers(model).values()]
    with torch.no_grad():
        model(tokens())
    for handle in handles:
        handle.remove()
    return feeding


@pytest.mark.parametrize("peft", [False, True], ids=["plain", "peft"])
@pytest.mark.parametrize("family", FAMILIES)
def test_no_norm_that_feeds_a_router_is_noised(family, peft):
    model = make_moe(family)
    if peft:
        model = get_peft_model(model, LoraConfig(target_modules=["q_b_proj" if family == "deepseek_v3" else "q_proj"]))
    feeding = norms_before_routers(model)
    noised = set(find_norms(model))
    assert len(feeding) == len(find_routers(model))
    assert not feeding & noised
    # All else is: the two norms before attention, the final one, and for a dense layer the one before its MLP.
    expected = {name for name, _ in model.named_modules() if name.endswith((".input_layernorm", "model.norm"))}
    if family == "deepseek_v3":
        expected |= {name for name, _ in model.named_modules() if name.endswith("layers.0.post_attention_layernorm")}
    assert len(expected) == 3 + (family == "deepseek_v3")
    assert expected <= noised


def test_routers_that_are_plain_linear_layers_count_by_name():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(4), nn.RMSNorm(4)
            self.mlp = nn.ModuleDict({"gate": nn.Linear(4, 2)})

    assert list(find_norms(nn.ModuleDict({"layer": Block()}))) == ["layer.input_layernorm"]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma"])
def test_noise_acts_as_if_added_to_the_norm_weights(family):
    model = make_model(family)
    noise = NormNoise(model, seed=3)
    shifted = copy.deepcopy(model)
    with torch.no_grad():
        for index, module in enumerate(find_norms(shifted).values()):
            module.weight.add_(noise.noise(index, module.weight, 7, 0.05))
        with noise.active(7, 0.05):
            noisy = model(IDS).logits
        assert torch.equal(noisy, shifted(IDS).logits)
        assert not torch.equal(noisy, model(IDS).logits)


@pytest.mark.parametrize("family", ["qwen2", "gemma"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_noisy_norm_computes_in_float32_and_returns_the_dtype_of_the_clean_one(family, dtype):
    model = make_model(family, dtype=torch.bfloat16)
    noise = NormNoise(model, seed=3)
    norm = model.model.norm
    x = torch.randn(3, 64).to(dtype)
    drawn = noise.noise(len(noise.norms) - 1, norm.weight, 7, 0.05)
    shifted = copy.deepcopy(norm)
    shifted.weight = nn.Parameter(norm.weight.float() + drawn)  # bfloat16 would round small noise away
    with torch.no_grad():
        expected = shifted(x.float()).to(norm(x).dtype)
        with noise.active(7, 0.05):
            found = norm(x)
    assert_same(found, expected)
    assert noise.last_report.measured_std == pytest.approx(drawn.square().mean().sqrt().item(), rel=1e-4)


def test_a_noisy_norm_runs_once_more_for_each_dtype_of_its_input(monkeypatch):
    model = make_model()
    norm = model.model.norm
    calls = []
    forward = type(norm).forward
    monkeypatch.setattr(type(norm), "forward", lambda self, x: calls.append(self) or forward(self, x))
    with NormNoise(model, seed=3).active(7, 0.05):
        for _ in range(3):
            norm(torch.ones(1, 64))
            norm(torch.ones(1, 64).bfloat16())
    assert len(calls) == 3 * 2 + 2


def test_noise_is_a_function_of_seed_step_and_place_alone():
    weight = torch.ones(16)
    first = NormNoise(make_model(seed=0), seed=1)
    second = NormNoise(make_model(seed=5), seed=1)
    state = torch.get_rng_state()
    assert torch.equal(first.noise(2, weight, 9, 0.1), second.noise(2, weight, 9, 0.1))
    assert torch.equal(torch.get_rng_state(), state)
    of_another_seed = NormNoise(make_model(), seed=2).noise(2, weight, 9, 0.1)
    for other in (first.noise(2, weight, 10, 0.1), first.noise(1, weight, 9, 0.1), of_another_seed):
        assert not torch.equal(first.noise(2, weight, 9, 0.1), other)


@pytest.mark.parametrize(
    ("stages", "expected"),
    [(1, [1, 1, 1, 1]), (2, [0, 0, 1, 1]), (3, [0, 0, 1, 0.01]), (4, [0, 0, 1, 1, 0.1, 0.1, 0.01, 0.01])],
)
def test_values_are_those_of_the_formula(stages, expected):
    schedule = NoiseSchedule(1.0, 0.01, stages)
    steps = len(expected)
    assert [schedule.sigma(step, steps) for step in range(steps)] == pytest.approx(expected)
