# SPDX-License-Identifier: Apache-2.0
"""Exported checkpoints in vLLM, which then needs nothing of this package."""

import pytest
from harness import add_mxfp4_kernel, engine, model_logprobs, served_model, tiny_model, vllm_logprobs
from transformers import AutoModelForCausalLM

from hf_mxfp4.checkpoint import export


pytestmark = pytest.mark.vllm

METHODS = {"bf16": "UnquantizedLinearMethod", "compressed-tensors": "CompressedTensorsLinearMethod"}


@pytest.fixture(scope="module", autouse=True)
def mxfp4_kernel():
    add_mxfp4_kernel()


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_exports_have_the_same_values_and_are_read_by_vllm_alone(tmp_path, family):
    """bf16 holds what compressed-tensors stands for: both are the model of transformers on the bf16 export."""
    base = tiny_model(family)
    base.save_pretrained(tmp_path / "base")
    for name in METHODS:
        export(tmp_path / "base", tmp_path / name, format=name)
    expected = model_logprobs(AutoModelForCausalLM.from_pretrained(tmp_path / "bf16", dtype="float32"))
    assert (expected - model_logprobs(base)).abs().max() > 0.05  # of which quantization is seen
    for name, method in METHODS.items():
        found_method, found = served(tmp_path / name)
        assert found_method == method
        assert (found - expected).abs().max() < 1e-4, name


def served(folder):
    """The name of what reads the weights, and log-probabilities; the engine ends with the function."""
    with engine(folder) as llm:
        layer = served_model(llm).model.layers[0].mlp.down_proj
        return type(layer.quant_method).__name__, vllm_logprobs(llm)
