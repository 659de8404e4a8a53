# SPDX-License-Identifier: Apache-2.0
"""`torch.compile` of quantized experts, one graph whatever the routing, with the bits of eager code; and `generate`."""

from collections import Counter

import pytest
import torch
from compiled_training import STOCHASTIC, adapted, check_training, compiled
from same_bits import assert_same
from tiny_models import make_model
from torch.library import opcheck
from transformers import AutoModelForCausalLM, CompileConfig

from hf_mxfp4 import MXFP4Experts, MXFP4RLConfig, cached_weights
from hf_mxfp4.integrations.transformers import quantize_linears
from hf_mxfp4.layers import MXFP4PackedExperts
from hf_mxfp4.ops import Groups, compiled_linear, group_by_expert, packed_operators, quantized_linear
from hf_mxfp4.ops.inputs import what_is_saved
from hf_mxfp4.ops.operators import groups_of


pytestmark = pytest.mark.usefixtures("fresh_compiler")
OPS = torch.ops.hf_mxfp4
FAMILIES = ["qwen3_moe", "gpt_oss"]  # gpt-oss has transposed weights and biases


def experts(family="qwen3_moe", mode="qat", **scheme):
    model = make_model(family, layers=1)
    plain = next(module for name, module in model.named_modules() if name.endswith("experts"))
    layer_class = MXFP4Experts if mode == "qat" else MXFP4PackedExperts
    return layer_class.from_experts(plain, MXFP4RLConfig(mode=mode, **scheme), "e")


def passes(function, layer, seed, used) -> list[torch.Tensor]:
    """Output and gradients for tokens that go to the first ``used`` of four experts."""
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(7, 64, generator=generator).requires_grad_()
    weights = torch.rand(7, 2, generator=generator).requires_grad_()
    index = torch.stack([torch.randperm(used, generator=generator)[:2] for _ in range(7)])
    layer.zero_grad()
    out = function(states, index, weights)
    out.backward(torch.randn(7, 64, generator=generator))
    return [out.detach(), states.grad, weights.grad, *(p.grad for p in layer.parameters() if p.grad is not None)]


#: Experts and their scheme.
SCHEMES = [
    ("qwen3_moe", {}),
    ("gpt_oss", {"preset": "w4a16"}),
    ("qwen3_moe", {"preset": "w4a4"}),
    ("gpt_oss", {"preset": "w4a8g8"}),
    ("qwen3_moe", {"preset": "paper_b"}),
    ("gpt_oss", {"preset": "w4a4g4"}),
    ("qwen3_moe", STOCHASTIC),
    ("qwen3_moe", {"mode": "packed"}),
    ("gpt_oss", {"mode": "packed", "preset": "w4a8"}),
]


@pytest.mark.parametrize(("family", "scheme"), SCHEMES, ids=str)
def test_experts(family, scheme):
    layer = experts(family, **scheme)
    call, counter = compiled(layer)
    for step, used in enumerate((4, 2, 3)):
        found = []
        for function in (layer, call):
            if "wgrad" in scheme:
                layer.set_step(step)  # the count of backward passes starts again
            found.append([tensor.clone() for tensor in passes(function, layer, step, used)])
        assert_same(*found)
    assert counter.frame_count == 1


@pytest.mark.parametrize("wrong", [4, -1])
def test_a_token_for_an_expert_that_does_not_exist(wrong):
    call, _ = compiled(experts())
    states = torch.randn(2, 64)
    weights = torch.rand(2, 2)
    with pytest.raises(ValueError, match="a token was sent to an expert beyond the 4"):
        call(states, torch.tensor([[0, 1], [2, wrong]]), weights)


@pytest.mark.parametrize("ends", [[-3, 5], [4, 3], [2, 6]], ids=str)
def test_ends_of_experts_rise_from_zero_to_the_number_of_rows(ends):
    with pytest.raises(ValueError, match="a token was sent to an expert beyond the 2"):
        groups_of(torch.tensor(ends, dtype=torch.int32), 5)


@pytest.mark.parametrize(
    ("family", "scheme"),
    [("gpt_oss", {"preset": "w4a4", "dgrad": {"grad": "fp8"}}), ("qwen3_moe", {"preset": "w4a8g8"})],
    ids=str,
)
def test_the_operator_of_trainable_experts(family, scheme):
    layer = experts(family, **scheme)
    name = layer.projections[0]
    weight = getattr(layer, name)
    bias = layer.bias_of(name)
    state = layer.states[name]
    for counts in ((3, 0, 2, 1), (0, 0, 0, 0)):
        ends = Groups(counts).offsets("cpu")
        x = torch.randn(sum(counts), 64, requires_grad=True)
        kept = what_is_saved(state.spec, x.dtype, x.dtype, is_grouped=True)
        options = 64, True, layer.is_transposed, True
        arguments = x, weight, bias, ends, state.layer_id, x.dtype, kept, *options
        opcheck(OPS.quantized_linear.default, arguments)
        out, tensors = OPS.quantized_linear(*arguments)
        needs = [True, True, bias is not None]
        tail = state.layer_id, kept, True, layer.is_transposed, needs
        opcheck(OPS.quantized_linear_backward.default, (out.detach(), weight.detach(), ends, tensors, *tail))


def test_the_operator_of_packed_experts(monkeypatch):
    layer = experts("gpt_oss", mode="packed", preset="w4a4", outlier_fallback=0.5)
    name = layer.projections[0]
    # The checks copy all arguments, so that the codes are no layer's.
    product = layer.states[name], layer.packed_weight(name)
    monkeypatch.setattr(packed_operators, "find_product", lambda codes: product)
    codes = getattr(layer, name)
    bias = layer.bias_of(name)
    for counts in ((3, 0, 2, 1), (0, 0, 0, 0)):
        ends = Groups(counts).offsets("cpu")
        x = torch.randn(sum(counts), 64, requires_grad=True)
        opcheck(OPS.packed_experts.default, (x, codes, bias, ends, x.dtype))
        grad = torch.randn(len(x), layer.weight_size(name)[1])
        options = 64, x.dtype, bias.dtype, [True, True]
        opcheck(OPS.packed_experts_backward.default, (grad, codes, ends, *options))


def test_what_cuda_graphs_may_hold():
    for name, unsafe in (("packed_experts", True), ("packed_linear", False)):
        for operator in (getattr(OPS, name), getattr(OPS, f"{name}_backward")):
            assert (torch.Tag.cudagraph_unsafe in operator.default.tags) == unsafe


def test_experts_that_are_not_quantized_as_adapters_have_them():
    weight = torch.randn(3, 8, 16, requires_grad=True)
    ids = torch.tensor([2, 0, 2, 2, 0])

    def linear(x, ids):
        product = compiled_linear if torch.compiler.is_compiling() else quantized_linear
        return product(x, weight, None, groups=group_by_expert(ids, 3)[1])

    call, counter = compiled(linear)
    for _ in range(2):
        found = []
        x = torch.randn(5, 16)
        for function in (call, linear):
            weight.grad, leaf = None, x.clone().requires_grad_()
            out = function(leaf, ids)
            out.square().sum().backward()
            found.append([out.detach(), leaf.grad, weight.grad])
        assert_same(*found)
        with torch.no_grad():
            weight.mul_(2)
    assert counter.frame_count == 1


@pytest.mark.large
@pytest.mark.parametrize("family", FAMILIES)
def test_mixtures_train_as_in_eager_mode(family):
    model = make_model(family, layers=1, attn_implementation="eager")
    quantize_linears(model, MXFP4RLConfig(**STOCHASTIC))
    check_training(model, random=True, checkpointing=True)


def test_adapters_on_packed_experts(checkpoint):
    check_training(adapted(checkpoint("qwen3_moe", layers=1), ["experts", "q_proj"]))


IDS = torch.arange(2, 16).view(2, 7)


@pytest.fixture
def counting():
    """A compiler as `generate` takes it, and the operators of ours in each graph that it was given."""
    from torch._dynamo.backends.debugging import aot_eager

    graphs = []

    def compiler(graph, inputs, **options):
        graphs.append([str(node.target) for node in graph.graph.nodes if "hf_mxfp4" in str(node.target)])
        return aot_eager(graph, inputs)

    return compiler, graphs


@pytest.mark.parametrize(
    ("family", "mode", "preset", "operators_expected"),
    [
        ("qwen2", "qat", "w4a4", [{"quantized_linear": 7}]),
        ("qwen3_moe", "packed", "w4a4", [{"packed_linear": 4, "packed_experts": 2}]),
        pytest.param("qwen2", "packed", "w4a16", [{"packed_linear": 7}], marks=pytest.mark.large),
        pytest.param("qwen3_moe", "qat", "w4a4", [{"quantized_linear": 6}], marks=pytest.mark.large),
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
