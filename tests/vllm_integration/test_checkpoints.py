# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of packed and of master weights in vLLM: the log-probabilities of the quantized model of transformers."""

import pytest
import serving
import torch
from harness import (
    EXPERTS,
    engine,
    model_logprobs,
    saved_model,
    served_model,
    served_weights,
    tiny_model,
    values_inside,
    vllm_logprobs,
    with_settings,
)
from transformers import AutoModelForCausalLM
from vllm import EngineArgs

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.checkpoint import pack_checkpoint
from hf_mxfp4.integrations.vllm.quantization import MXFP4RLVLLMConfig


pytestmark = pytest.mark.vllm

#: With residuals little is lost by quantization, and a model in full precision would pass.
W4A16 = {"preset": "w4a16"}
TILES = {"fprop": {"weight": "even+mbs32-dynamic+32x32"}}
ROW = {"outlier_fallback": 0.5, "macro_block": "row"}
FALLBACK = {"outlier_fallback": 0.5}


def methods_of(llm):
    """The kinds of layers inside of vLLM."""
    return {type(getattr(module, "quant_method", None)).__name__ for module in served_model(llm).modules()}


def served(folder, **options):
    with engine(folder / "saved", **options) as llm:
        return vllm_logprobs(llm), methods_of(llm)


@pytest.mark.parametrize("mode", ["packed", "qat"])
@pytest.mark.parametrize("family", ["qwen2", "qwen2 tied", "llama", "qwen3 tied", *EXPERTS])
def test_weights_are_served_as_their_quantized_values(tmp_path, family, mode):
    model, base = saved_model(tmp_path, family, mode=mode, **W4A16)
    expected = model_logprobs(model)
    found, methods = served(tmp_path)
    assert "MXFP4RLLinearMethod" in methods
    assert ("MXFP4RLExpertsMethod" in methods) == (family in EXPERTS)
    assert (found - expected).abs().max() < 1e-4
    assert (expected - model_logprobs(base)).abs().max() > 0.05  # of which quantization is seen


@pytest.mark.parametrize(
    ("mode", "family", "scheme"),
    [
        ("packed", "qwen2", {"macro_block": "row"}),
        ("packed", "qwen2", {"outlier_fallback": 0.5}),
        ("packed", "qwen3_moe", ROW),
        ("packed", "gpt_oss", ROW),
        ("packed", "qwen3_moe", TILES),
        ("packed", "mixtral", FALLBACK),
        # On disk, gate and up of an expert are apart; they are quantized as one weight.
        ("qat", "qwen3_moe", TILES),
        ("qat", "qwen3_moe", FALLBACK),
        *(("packed", family, {"modules_to_not_convert": ["experts"]}) for family in EXPERTS),
    ],
    ids=str,
)
def test_other_schemes(tmp_path, mode, family, scheme):
    model, _ = saved_model(tmp_path, family, mode=mode, preset="w4a16", **scheme)
    found, methods = served(tmp_path)
    is_on_experts = family in EXPERTS and "modules_to_not_convert" not in scheme
    assert ("MXFP4RLExpertsMethod" in methods) == is_on_experts
    assert (found - model_logprobs(model)).abs().max() < 1e-4


@pytest.mark.parametrize(
    "scheme",
    [{"dgrad": {"grad": "fp8"}}, {"macro_block": "row"}, TILES],
    ids=str,
)
def test_the_very_weights_of_the_policy(tmp_path, scheme):
    policy, _ = saved_model(tmp_path, "qwen2", preset="w4a16", **scheme)
    with engine(tmp_path / "saved") as llm:
        inside = served_weights(served_model(llm))
    for name in ("self_attn.k_proj", "mlp.up_proj", "mlp.down_proj"):
        layer = policy.get_submodule(f"model.layers.1.{name}")
        found = values_inside(inside, f"model.layers.1.{name}", layer.config.weight_scheme)
        assert torch.equal(found, layer.effective_weight(layer.weight).detach()), name
        assert not torch.equal(found, layer.weight)
    assert torch.equal(inside["model.norm.weight"], policy.model.norm.weight)


@pytest.mark.parametrize(
    ("mode", "family", "settings", "scheme"),
    [
        ("packed", "qwen2", None, {}),
        ("packed", "qwen3", None, {"outlier_fallback": 1.0}),
        ("qat", "qwen2", None, {}),
        *(("packed", family, None, {}) for family in EXPERTS),
        ("qat", "gpt_oss", None, {}),
        *(("packed", family, {"weights": "dense"}, {}) for family in ("gpt_oss", "qwen3_moe")),
    ],
    ids=str,
)
def test_w4a4_has_quantized_inputs(tmp_path, mode, family, settings, scheme):
    """An activation at the edge between two values of the grid falls to either side in two orders of summation."""
    model, _ = saved_model(tmp_path, family, settings=settings, mode=mode, preset="w4a4", **scheme)
    weights_only = AutoModelForCausalLM.from_pretrained(
        tmp_path / "base", quantization_config=MXFP4RLConfig(mode=mode, preset="w4a16")
    )
    expected = model_logprobs(model)
    found, methods = served(tmp_path)
    difference = (found - expected).abs()
    typical = (model_logprobs(weights_only) - expected).abs().median()
    assert ("MXFP4RLExpertsMethod" in methods) == (family in EXPERTS)
    assert difference.median() < 0.02 * typical, (difference.median(), typical)


@pytest.mark.parametrize("scheme", serving.SCHEMES)
def test_packed_policies_are_served_as_the_table_says(tmp_path, scheme):
    base = tiny_model("qwen2").bfloat16()
    base.save_pretrained(tmp_path / "base")
    policy = serving.save_policy(tmp_path / "base", tmp_path / "policy", scheme)
    if serving.cell(scheme, "vLLM") == serving.REFUSED:
        with pytest.raises(ValueError, match="vLLM cannot compute with their quantized values"):
            MXFP4RLVLLMConfig(policy.config.quantization_config)
        return
    pack_checkpoint(tmp_path / "policy", tmp_path / "saved", dtype="float32")
    found, methods = served(tmp_path)
    expected = model_logprobs(policy)
    typical = (model_logprobs(base.float()) - expected).abs().median()
    assert "MXFP4RLLinearMethod" in methods
    assert (found - expected).abs().median() < 0.02 * typical


def test_graphs_of_other_settings_are_not_taken_from_vllms_cache(tmp_path):
    """vLLM keeps what it compiles by a hash of its config."""
    saved_model(tmp_path, "qwen2", mode="packed")
    found = set()
    for settings in ({}, {"weights": "dense"}, {"adapter_rank": 4}):
        options = {"max_model_len": 64, "dtype": "float32", "skip_tokenizer_init": True}
        engine_args = EngineArgs(model=str(with_settings(tmp_path / "saved", **settings)), **options)
        found.add(engine_args.create_engine_config().compute_hash())
    assert len(found) == 3
