# SPDX-License-Identifier: Apache-2.0
"""`MXFP4Experts` against the equations of a mixture of experts, token by token in float64, and against one
`MXFP4Linear` for each projection of each expert."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from accelerate.hooks import ModelHook, add_hook_to_module
from moe_models import routing
from passes import passes
from tables import CONFIGS
from tiny_models import make_model
from torch import nn

from hf_mxfp4 import MXFP4Experts, MXFP4RLConfig, cached_weights, fake_quantize, set_quantization_step
from hf_mxfp4.integrations.transformers import quantize_linears
from hf_mxfp4.layers import random_layers
from hf_mxfp4.model.structure import experts_unsupported_reason
from hf_mxfp4.numerics import dequantize_mxfp8, fake_quantize_e4m3, quantize_mxfp8


FAMILIES = ["qwen3_moe", "qwen2_moe", "mixtral", "gpt_oss"]
#: The default's scheme of weights.
WEIGHT = {"scale_rule": "even", "macro_block": 128, "macro_search": "block_mantissas_fp8"}
OFF = {"fprop": {"x": "full", "weight": "full"}}
NAME = "model.layers.0.mlp.experts"


def plain_experts(family="qwen3_moe", dtype=torch.float64, **options):
    return make_model(family, layers=1, dtype=dtype, **options).model.layers[0].mlp.experts


def quantized(family="qwen3_moe", dtype=torch.float64, **options):
    return MXFP4Experts.from_experts(plain_experts(family, dtype), MXFP4RLConfig(**options), NAME)


def straight_through(x, quantized):
    """`quantized`, with the gradient of ``x``."""
    return x + (quantized - x.detach())


def fp8(x):
    return straight_through(x, fake_quantize_e4m3(x.detach()))


def mxfp8(x):
    return straight_through(x, dequantize_mxfp8(*quantize_mxfp8(x.detach()), x.dtype))


#: Options of the config, and what they do to the input of each projection.
INPUTS = {
    "default": ({}, fp8),
    "w4a16": ({"preset": "w4a16"}, lambda x: x),
    "mxfp8": ({"fprop": {"x": "mxfp8"}}, mxfp8),
}


def gated(family, up_out):
    """SwiGLU of each family, from its paper or model card."""
    if family != "gpt_oss":
        gate, up = up_out.split(up_out.shape[-1] // 2, dim=-1)
        return gate * torch.sigmoid(gate) * up
    gate, up = up_out.view(-1, 2).unbind(-1)
    gate = gate.clamp(max=7.0)
    up = up.clamp(-7.0, 7.0)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


def reference(family, experts, states, index, weights, quantize_input):
    """One token and one of its experts at a time."""
    rows = []
    for token in range(len(states)):
        total = torch.zeros(states.shape[1], dtype=states.dtype)
        for slot, expert in enumerate(index[token].tolist()):
            x = states[token]
            for projection in ("gate_up_proj", "down_proj"):
                weight = getattr(experts, projection)[expert]
                weight = weight.T if family == "gpt_oss" else weight
                weight = straight_through(weight, fake_quantize(weight.detach(), **WEIGHT))
                x = weight @ quantize_input(x)
                if family == "gpt_oss":
                    x = x + getattr(experts, f"{projection}_bias")[expert]
                x = gated(family, x) if projection == "gate_up_proj" else x
            total = total + weights[token, slot] * x
        rows.append(total)
    return torch.stack(rows)


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_and_gradients_are_those_of_the_equations(family, inputs):
    options, quantize_input = INPUTS[inputs]
    layer = quantized(family, **options)
    twin = plain_experts(family)
    states, index, weights = routing(9)
    ours = [t.clone().requires_grad_() for t in (states, weights)]
    theirs = [t.clone().requires_grad_() for t in (states, weights)]
    out = layer(ours[0], index, ours[1])
    expected = reference(family, twin, theirs[0], index, theirs[1], quantize_input)
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)
    probe = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape)
    (out * probe).sum().backward()
    (expected * probe).sum().backward()
    for found, want in zip([*ours, *layer.parameters()], [*theirs, *twin.parameters()], strict=True):
        torch.testing.assert_close(found.grad, want.grad, rtol=1e-8, atol=1e-8)
        assert want.grad.abs().sum() > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_without_quantization_they_are_the_models_own_experts(family):
    for implementation, dtype, tolerance in (("eager", torch.float64, 1e-10), ("grouped_mm", torch.float32, 1e-5)):
        plain = plain_experts(family, dtype)
        layer = quantized(family, dtype, **OFF)
        plain.config._experts_implementation = implementation
        found, expected = (passes(each, *routing(dtype=dtype, unused=1)) for each in (layer, plain))
        torch.testing.assert_close(found[0], expected[0], rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(found, expected, rtol=10 * tolerance, atol=10 * tolerance)


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_the_very_ones_and_the_class_is_still_the_models(family):
    plain = plain_experts(family)
    layer = MXFP4Experts.from_experts(plain, MXFP4RLConfig(), NAME)
    assert isinstance(layer, type(plain))
    assert isinstance(layer, MXFP4Experts)
    assert [(n, id(p)) for n, p in layer.named_parameters()] == [(n, id(p)) for n, p in plain.named_parameters()]
    assert type(layer) is type(quantized(family))
    assert type(layer).__name__ == f"MXFP4{type(plain).__name__}"
    assert plain.config is not layer.config
    assert type(plain).forward is not type(layer).forward
    shape = {"qwen3_moe": (4, 64, 64), "qwen2_moe": (4, 64, 64), "mixtral": (4, 192, 64), "gpt_oss": (4, 192, 64)}
    assert layer.weight_size("gate_up_proj") == shape[family]
    assert "w4a8" in repr(layer)
    assert "gate_up_proj [4, " in repr(layer)


def test_a_change_of_one_expert_is_seen():
    layer = quantized(dtype=torch.float32)
    states, _, weights = routing(dtype=torch.float32)
    index = torch.tensor([[1, 2]]).expand(21, 2)
    with cached_weights(layer):
        before = layer(states, index, weights)
    # Two experts that trade places have the same elements.
    layer.gate_up_proj.data[[1, 2]] = layer.gate_up_proj.data[[2, 1]]
    with cached_weights(layer):
        swapped = layer(states, index, weights)
    assert torch.equal(pickle.loads(pickle.dumps(layer))(states, index, weights), swapped)
    assert torch.equal(copy.deepcopy(layer)(states, index, weights), swapped)
    assert not torch.equal(swapped, before)


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_experts_of_the_quantized_values(family):
    layer = quantized(family, preset="w4a16")
    before = {name: parameter.detach().clone() for name, parameter in layer.named_parameters()}
    plain = layer.to_experts()
    inputs = routing()
    plain.config._experts_implementation = "eager"
    assert type(plain) is type(plain_experts(family))
    assert vars(plain).keys() == vars(plain_experts(family)).keys()
    torch.testing.assert_close(plain(*inputs), layer(*inputs), rtol=1e-10, atol=1e-10)
    axis = 1 if family == "gpt_oss" else 2
    assert torch.equal(plain.down_proj, fake_quantize(before["down_proj"], **WEIGHT, axis=axis))
    assert layer.to_experts(torch.bfloat16).down_proj.dtype == torch.bfloat16
    assert all(torch.equal(p, before[name]) for name, p in layer.named_parameters())


def test_random_numbers_belong_to_layer_and_expert_and_follow_the_step():
    layer = quantized(dtype=torch.float32, **CONFIGS["random"])
    inputs = routing(dtype=torch.float32)
    with torch.no_grad():
        first = layer(*inputs)
        assert torch.equal(layer(*inputs), first)
        assert set_quantization_step(nn.ModuleList([layer]), 1) == 1
        second = layer(*inputs)
        assert not torch.equal(second, first)
        set_quantization_step(nn.ModuleList([layer]), 0)
        assert torch.equal(layer(*inputs), first)
    keys = {rng.layer for state in layer.states.values() for rng in state.rngs}
    assert len(keys) == 8
    assert f"{NAME}.3.down_proj" in keys
    assert random_layers(layer) == [layer]
    assert random_layers(quantized()) == []


@pytest.mark.parametrize("family", FAMILIES)
def test_no_tokens_at_all(family):
    layer = quantized(family, torch.float32)
    plain = plain_experts(family, torch.float32)
    found, expected = (passes(each, *routing(0, dtype=torch.float32)) for each in (layer, plain))
    assert found[0].shape == (0, 64)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_wrong_inputs_are_refused():
    layer = quantized(dtype=torch.float32)
    states, index, weights = routing(dtype=torch.float32)
    with pytest.raises(ValueError, match=rf"MXFP4Qwen3MoeExperts {NAME}: input \(21, 32\) is not \[tokens, 64\]"):
        layer(states[:, :32], index, weights)
    with pytest.raises(TypeError, match="input is torch.bfloat16 but the layer's dtype is torch.float32"):
        layer(states.bfloat16(), index, weights)
    layer._is_expert_parallel = True
    with pytest.raises(ValueError, match="without expert parallelism"):
        layer(states, index, weights)


def test_hooks_of_accelerate_do_not_bring_the_plain_experts_back():
    plain = plain_experts(dtype=torch.float32)
    add_hook_to_module(plain, ModelHook())
    layer = MXFP4Experts.from_experts(plain, MXFP4RLConfig(), NAME)
    inputs = routing(dtype=torch.float32)
    assert torch.equal(layer(*inputs), quantized(dtype=torch.float32)(*inputs))
    assert not torch.equal(layer(*inputs), plain(*inputs))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"_is_expert_parallel": True}, "spread over processes"),
        ({"extra": nn.Parameter(torch.zeros(2))}, "has the parameters"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_other_layouts_are_refused(change, message):
    experts = plain_experts()
    for name, value in change.items():
        setattr(experts, name, value)
    assert message in experts_unsupported_reason(experts)
    with pytest.raises(ValueError, match=f"layers.0.mlp.experts cannot be quantized: .*{message}"):
        MXFP4Experts.from_experts(experts, MXFP4RLConfig(), NAME)


def test_a_class_of_ones_own_is_refused():
    class MyExperts(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2, 4, 4))

    reason = "MyExperts is not made by transformers' use_experts_implementation"
    assert experts_unsupported_reason(MyExperts()) == reason
    model = nn.Sequential(nn.Linear(4, 4))
    model.experts = MyExperts()
    with pytest.raises(ValueError, match="cannot be quantized .experts: MyExperts is not made by.*add 'experts' to"):
        quantize_linears(model, MXFP4RLConfig())
    quantized, skipped = quantize_linears(model, MXFP4RLConfig(modules_to_not_convert=["experts"]))
    assert quantized == ["0"]
    assert skipped == {"experts": "modules_to_not_convert"}


def test_experts_without_a_gate_and_with_a_norm_behind_them():
    """Layouts that transformers describes (Nemotron-H, Muse Spark) and that no tiny model here has."""
    experts = plain_experts()
    experts.has_gate, experts.has_post_expert_norm, experts.post_expert_norm = False, True, nn.LayerNorm(64).double()
    experts.up_proj = nn.Parameter(experts.gate_up_proj.detach()[:, :32].clone())
    del experts.gate_up_proj
    layer = MXFP4Experts.from_experts(experts, MXFP4RLConfig(**OFF), NAME)
    assert layer.projections == ("up_proj", "down_proj")
    states, index, weights = routing()
    expected = torch.zeros_like(states)
    for token in range(21):
        for slot, expert in enumerate(index[token].tolist()):
            x = experts.down_proj[expert] @ F.silu(experts.up_proj[expert] @ states[token])
            expected[token] += weights[token, slot] * experts.post_expert_norm(x).detach()
    torch.testing.assert_close(layer(states, index, weights), expected, rtol=1e-9, atol=1e-9)
