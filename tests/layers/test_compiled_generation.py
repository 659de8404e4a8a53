# SPDX-License-Identifier: Apache-2.0
"""`generate` with a static cache and a compiled forward pass gives the tokens of the eager run."""

from collections import Counter

import pytest
import torch
from transformers import AutoModelForCausalLM, CompileConfig

from hf_mxfp4 import MXFP4RLConfig, cached_weights


IDS = torch.arange(2, 16).view(2, 7)


@pytest.fixture
def counting():
    """A compiler as `generate` takes it, and the operators of ours in each graph that it was given."""
    from torch._dynamo.backends.debugging import aot_eager

    torch._dynamo.reset()
    graphs = []

    def compiler(graph, inputs, **options):
        graphs.append([str(node.target) for node in graph.graph.nodes if "hf_mxfp4" in str(node.target)])
        return aot_eager(graph, inputs)

    yield compiler, graphs
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("family", "mode", "preset", "operators_expected"),
    [
        ("qwen2", "qat", "w4a4", [{"quantized_linear": 7}]),
        ("qwen2", "packed", "w4a16", [{"packed_linear": 7}]),
        ("qwen3_moe", "packed", "w4a4", [{"packed_linear": 4, "packed_experts": 2}]),
        pytest.param("qwen2", "qat", "w4a16", [{"quantized_linear": 7}], marks=pytest.mark.large),
        pytest.param("qwen2", "packed", "w4a4", [{"packed_linear": 7}], marks=pytest.mark.large),
        pytest.param(
            "qwen3_moe",
            "qat",
            "w4a4",
            [{"quantized_linear": 6}],
            marks=pytest.mark.large,
        ),
    ],
)
def test_the_tokens_are_those_of_the_eager_run(checkpoint, counting, family, mode, preset, operators_expected):
    """Of one graph."""
    config = MXFP4RLConfig(mode=mode, preset=preset)
    folder = checkpoint(family, layers=1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=config)
    assert model.hf_quantizer.is_compileable
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    expected = model.generate(IDS, **options)
    assert len(set(expected[0, 7:].tolist())) > 1
    compiler, graphs = counting
    compiling = CompileConfig(fullgraph=True, backend=compiler, mode=None)
    compiling._compile_all_devices = True  # as on a GPU
    options |= {"cache_implementation": "static", "compile_config": compiling}
    assert torch.equal(model.generate(IDS, **options), expected)
    with cached_weights(model):
        assert torch.equal(model.generate(IDS, **options), expected)
        assert torch.equal(model.generate(IDS.flip(0), **options), expected.flip(0))
    assert [Counter(name.split(".")[1] for name in operators) for operators in graphs] == operators_expected
