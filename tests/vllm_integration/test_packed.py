# SPDX-License-Identifier: Apache-2.0
"""Packed checkpoints in vLLM through the plugin: the log-probabilities of the packed model of transformers."""

import pytest
import torch
from harness import engine, model_logprobs, served_model, tiny_model, vllm_logprobs, with_settings
from transformers import AutoModelForCausalLM
from vllm import EngineArgs, SamplingParams

import hf_mxfp4
from hf_mxfp4 import MXFP4RLConfig


pytestmark = pytest.mark.vllm

MODELS = {
    "qwen2 with biases": ("qwen2", {}),
    "qwen2 tied": ("qwen2", {"tie": True}),
    "llama": ("llama", {}),
    "qwen3": ("qwen3", {}),
}


def packed_folder(tmp_path, family, options, **scheme):
    """A packed checkpoint, its log-probabilities by transformers, and those of the full-precision model."""
    base = tiny_model(family, **options)
    base.save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "base", quantization_config=MXFP4RLConfig(mode="packed", **scheme)
    )
    model.save_pretrained(tmp_path / "packed")
    return tmp_path / "packed", model_logprobs(model), model_logprobs(base)


@pytest.mark.parametrize("name", MODELS)
def test_w4a16_is_the_packed_model(tmp_path, name):
    folder, expected, unquantized = packed_folder(tmp_path, *MODELS[name])
    with engine(folder) as llm:
        method = served_model(llm).model.layers[0].mlp.down_proj.quant_method
        assert type(method).__name__ == "MXFP4RLLinearMethod"
        found = vllm_logprobs(llm)
    assert (found - expected).abs().max() < 1e-4
    assert (expected - unquantized).abs().max() > 0.05  # of which quantization is seen


@pytest.mark.parametrize("scheme", [{"macro_block": "row"}, {"outlier_fallback": 0.5}], ids=str)
def test_other_schemes(tmp_path, scheme):
    folder, expected, _ = packed_folder(tmp_path, "qwen2", {}, **scheme)
    with engine(folder) as llm:
        assert (vllm_logprobs(llm) - expected).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("qwen2 with biases", {}),
        ("qwen3", {}),
        ("qwen3", {"outlier_fallback": 1.0, "outlier_fallback_rate": 0.1}),
    ],
    ids=str,
)
def test_w4a4_is_the_packed_model_but_for_edges_of_the_grid(tmp_path, name, options):
    """An activation at the edge between two values of the grid falls to either side in two orders of summation."""
    folder, expected, _ = packed_folder(tmp_path, *MODELS[name], preset="w4a4", **options)
    weights_only = AutoModelForCausalLM.from_pretrained(
        folder.parent / "base", quantization_config=MXFP4RLConfig(mode="packed")
    )
    with engine(folder) as llm:
        difference = (vllm_logprobs(llm) - expected).abs()
    typical = (model_logprobs(weights_only) - expected).abs().median()
    assert difference.median() < 0.02 * typical, (difference.median(), typical)


def test_graphs_of_other_settings_are_not_taken_from_vllms_cache(tmp_path):
    """vLLM keeps what it compiles by a hash of its config."""
    folder, _, _ = packed_folder(tmp_path, "qwen2", {})
    found = set()
    for settings in ({}, {"weights": "dense"}, {"adapter_rank": 4}):
        options = {"max_model_len": 64, "dtype": "float32", "skip_tokenizer_init": True}
        engine_args = EngineArgs(model=str(with_settings(folder, **settings)), **options)
        found.add(engine_args.create_engine_config().compute_hash())
    assert len(found) == 3


def test_pack_in_memory_and_tokens(tmp_path):
    """`hf_mxfp4.pack` of a trained policy serves too, and greedy tokens are those of `generate`."""
    tiny_model("qwen2").save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", quantization_config=MXFP4RLConfig())
    hf_mxfp4.pack(model).save_pretrained(tmp_path / "packed")
    ids = [5, 9, 17, 3, 8, 30]
    expected = model.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False, eos_token_id=None)[0, 6:]
    with engine(tmp_path / "packed") as llm:
        options = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True, "detokenize": False}
        found = llm.generate({"prompt_token_ids": ids}, SamplingParams(**options), use_tqdm=False)
    assert list(found[0].outputs[0].token_ids) == expected.tolist()
