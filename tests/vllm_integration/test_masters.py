# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of master weights in vLLM: it samples from the quantized values, as the policy computes."""

import pytest
import torch
from harness import engine, model_logprobs, served_model, served_weights, tiny_model, vllm_logprobs
from packed_values import values_inside
from transformers import AutoModelForCausalLM

from hf_mxfp4 import MXFP4RLConfig


pytestmark = pytest.mark.vllm

MODELS = {
    "qwen2 with biases": ("qwen2", {}),
    "qwen3 tied": ("qwen3", {"tie": True}),
    "qwen3_moe": ("qwen3_moe", {"moe_intermediate_size": 128}),
    "mixtral": ("mixtral", {"intermediate": 128}),
    "gpt_oss": ("gpt_oss", {"intermediate": 128}),
}


def saved_policy(tmp_path, family, options, preset="w4a16", **scheme):
    """A policy whose masters lie anywhere between the values of the grid, and its folder."""
    tiny_model(family, **options).save_pretrained(tmp_path / "base")
    config = MXFP4RLConfig(preset=preset, **scheme)
    policy = AutoModelForCausalLM.from_pretrained(tmp_path / "base", quantization_config=config)
    policy.save_pretrained(tmp_path / "policy")
    return policy.eval(), tmp_path / "policy"


@pytest.mark.parametrize("name", MODELS)
def test_masters_are_served_as_their_quantized_values(tmp_path, name):
    policy, folder = saved_policy(tmp_path, *MODELS[name], outlier_fallback=None)  # with residuals little is lost
    expected = model_logprobs(policy)
    unquantized = model_logprobs(AutoModelForCausalLM.from_pretrained(tmp_path / "base"))
    with engine(folder) as llm:
        found = vllm_logprobs(llm)
    assert (found - expected).abs().max() < 1e-4
    assert (expected - unquantized).abs().max() > 0.05  # of which quantization is seen


@pytest.mark.parametrize(
    "scheme",
    [
        {"outlier_fallback_rate": 0.1, "dgrad": {"grad": "fp8"}},
        {"macro_block": "row"},
        {"weight_block": "32x32", "macro_block": 32},
    ],
    ids=str,
)
def test_the_very_weights_of_the_policy(tmp_path, scheme):
    policy, folder = saved_policy(tmp_path, "qwen2", {}, **scheme)
    with engine(folder) as llm:
        inside = served_weights(served_model(llm))
    for name in ("self_attn.k_proj", "mlp.up_proj", "mlp.down_proj"):
        layer = policy.get_submodule(f"model.layers.1.{name}")
        found = values_inside(inside, f"model.layers.1.{name}", layer.config.weight_scheme)
        assert torch.equal(found, layer.effective_weight(layer.weight).detach()), name
        assert not torch.equal(found, layer.weight)
    assert torch.equal(inside["model.norm.weight"], policy.model.norm.weight)


@pytest.mark.parametrize("name", ["qwen2 with biases", "qwen3_moe", "gpt_oss"])
def test_w4a4_policies_have_quantized_inputs(tmp_path, name):
    policy, folder = saved_policy(tmp_path, *MODELS[name], preset="w4a4")
    weights_only, _ = saved_policy(tmp_path / "other", *MODELS[name])
    expected = model_logprobs(policy)
    typical = (model_logprobs(weights_only) - expected).abs().median()
    with engine(folder) as llm:
        difference = (vllm_logprobs(llm) - expected).abs()
    assert difference.median() < 0.02 * typical


@pytest.mark.parametrize(
    "scheme",
    [
        {"weight_block": "32x32", "macro_block": 32},
        {"outlier_fallback": 0.5, "outlier_fallback_rate": 0.2, "outlier_fallback_operands": "weights"},
    ],
    ids=str,
)
def test_gate_and_up_of_an_expert_are_quantized_as_one_weight(tmp_path, scheme):
    """On disk they are apart, one expert after the other."""
    policy, folder = saved_policy(tmp_path, *MODELS["qwen3_moe"], **scheme)
    expected = model_logprobs(policy)
    with engine(folder) as llm:
        found = vllm_logprobs(llm)
    assert (found - expected).abs().max() < 1e-4


def test_what_weights_cannot_express_is_refused_before_anything_is_loaded(tmp_path):
    _, folder = saved_policy(tmp_path, "qwen2", {}, fprop={"rotation": "deterministic-32"})
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="vLLM cannot compute with their quantized values"):
        with engine(folder):
            pass
