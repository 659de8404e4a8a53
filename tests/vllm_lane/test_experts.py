# SPDX-License-Identifier: Apache-2.0
"""Packed mixtures of experts in vLLM: the log-probabilities of the packed model of transformers."""

import pytest
from harness import engine, model_logprobs, served_model, tiny_model, vllm_logprobs
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hf_mxfp4 import MXFP4RLConfig


pytestmark = pytest.mark.vllm

FAMILIES = {
    "qwen3_moe": {"moe_intermediate_size": 128},
    "mixtral": {"intermediate": 128},
    "gpt_oss": {"intermediate": 128},
}


def packed_folder(tmp_path, family, **scheme):
    """A packed checkpoint, its log-probabilities by transformers, and those of the full-precision model."""
    base = tiny_model(family, **FAMILIES[family])
    base.save_pretrained(tmp_path / "base")
    config = MXFP4RLConfig(mode="packed", **scheme)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", quantization_config=config)
    model.save_pretrained(tmp_path / "packed")
    return tmp_path / "packed", model_logprobs(model), model_logprobs(base)


@pytest.mark.parametrize("scheme", [{}, {"outlier_fallback": 0.5, "macro_block": "row"}], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_w4a16_experts_are_the_packed_ones(tmp_path, family, scheme):
    folder, expected, unquantized = packed_folder(tmp_path, family, **scheme)
    with engine(folder) as llm:
        names = {type(getattr(m, "quant_method", None)).__name__ for m in served_model(llm).modules()}
        found = vllm_logprobs(llm)
    assert "MXFP4RLExpertsMethod" in names
    assert (found - expected).abs().max() < 1e-4
    assert (expected - unquantized).abs().max() > 0.05  # of which quantization is seen


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_that_are_left_alone(tmp_path, family):
    folder, expected, _ = packed_folder(tmp_path, family, modules_to_not_convert=["experts"])
    with engine(folder) as llm:
        names = {type(getattr(m, "quant_method", None)).__name__ for m in served_model(llm).modules()}
        found = vllm_logprobs(llm)
    assert {"UnquantizedFusedMoEMethod", "MXFP4RLLinearMethod"} <= names and "MXFP4RLExpertsMethod" not in names
    assert (found - expected).abs().max() < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_pushed_into_experts_that_were_loaded_packed(tmp_path, family):
    """One tensor at a time, by the names of transformers, as TRL does it."""
    folder, before, _ = packed_folder(tmp_path, family)
    other = tiny_model(family, **FAMILIES[family], seed=1)
    expected = model_logprobs(other)
    with engine(folder) as llm:
        for name, parameter in other.named_parameters():
            served_model(llm).load_weights([(name, parameter.detach())])
        found = vllm_logprobs(llm)
    assert (found - expected).abs().max() < 1e-4
    assert (before - expected).abs().max() > 0.05


def test_experts_whose_inputs_are_quantized_are_refused_before_anything_is_loaded(tmp_path):
    folder, _, _ = packed_folder(tmp_path, "qwen3_moe", preset="w4a4")
    (folder / "model.safetensors").unlink()
    with pytest.raises(
        ValueError, match=r"experts: quantized experts cannot .* down_proj cannot be quantized; use preset"
    ):
        with engine(folder):
            pass


def test_a_checkpoint_that_lacks_scales_is_refused(tmp_path):
    folder, _, _ = packed_folder(tmp_path, "qwen3_moe")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.down_proj_macro"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.experts\.down_proj_macro: in no file of the checkpoint"):
        with engine(folder):
            pass
