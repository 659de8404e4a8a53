# SPDX-License-Identifier: Apache-2.0
"""`MXFP4Linear` alone: its equations against an independent computation, and that it is an ordinary linear layer."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from passes import assert_product, passes
from torch import nn

from hf_mxfp4 import MXFP4Linear, MXFP4PackedLinear, MXFP4RLConfig
from hf_mxfp4.layers import cached_weights
from hf_mxfp4.numerics import apply_scheme, fake_quantize_e4m3, parse_scheme


#: Name of a configuration -> its options.
CONFIGS = {
    "default": {},
    "w4a16": {"preset": "w4a16"},
    "w4a4": {"preset": "w4a4"},
    "paper_a": {"preset": "paper_a"},
    "residuals of inputs": {"preset": "w4a4", "fprop": {"x": "even+mbsrow+of0.5", "weight": "even+mbsrow"}},
    "tiles": {"preset": "w4a4", "fprop": {"x": "floor", "weight": "rceil+mbs128+of0.5+32x32"}},
}
#: What they do to a weight.
WEIGHTS = {
    "default": "even+mbs128-blockwise_fp8",
    "w4a16": "even+mbs128-blockwise_fp8",
    "w4a4": "even+mbs128-blockwise",
    "paper_a": "rceil+mbs128-static+of0.5",
    "residuals of inputs": "even+mbsrow",
    "tiles": "rceil+mbs128+of0.5+32x32",
}
#: What those with MXFP4 inputs do to an input.
INPUTS = {
    "w4a4": "even+mbs128-blockwise",
    "paper_a": "rceil+mbs128-static+of0.5",
    "residuals of inputs": "even+mbsrow+of0.5",
    "tiles": "floor",
}
ROTATED = {"fprop": {"rotation": "deterministic-64"}}
SHAPES = [(2, 5, 64), (33,), (2, 3, 65), (1, 1), (2, 200)]


def make_layer(config="default", in_features=64, out_features=48, bias=True, seed=0, **options) -> MXFP4Linear:
    torch.manual_seed(seed)
    config = MXFP4RLConfig(**CONFIGS[config], **options)
    return MXFP4Linear(in_features, out_features, bias, config=config, name="mlp.up_proj")


def quantized_weight(config: str, weight: torch.Tensor) -> torch.Tensor:
    return apply_scheme(weight.detach(), parse_scheme(WEIGHTS[config]))


def quantized_input(config: str, x: torch.Tensor) -> torch.Tensor:
    if config == "w4a16":
        return x.detach()
    if config == "default":
        return fake_quantize_e4m3(x.detach())
    return apply_scheme(x.detach(), parse_scheme(INPUTS[config]))


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("config", CONFIGS)
def test_forward_and_gradients_are_those_of_the_quantized_operands(config, shape, bias):
    out_features = 5 if shape[-1] % 2 else 48
    layer = make_layer(config, shape[-1], out_features, bias)
    x = torch.randn(shape, requires_grad=True)
    before = x.detach().clone()
    # In float64: libraries of products may add up in another order where memory is aligned differently.
    inputs = quantized_input(config, x).double()
    weight = quantized_weight(config, layer.weight).double()
    assert not torch.equal(weight, layer.weight.double())

    y = layer(x)
    grad = torch.randn_like(y)
    y.backward(grad)

    assert y.dtype == x.dtype
    assert torch.equal(x, before)
    rows = grad.double().reshape(-1, out_features)
    exact = F.linear(inputs, weight, layer.bias.double() if bias else None)
    torch.testing.assert_close(y.double(), exact, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(x.grad.double(), grad.double() @ weight, rtol=2e-6, atol=2e-5)
    exact_gradient = rows.t() @ inputs.reshape(-1, shape[-1])
    torch.testing.assert_close(layer.weight.grad.double(), exact_gradient, rtol=2e-6, atol=2e-5)
    if bias:
        torch.testing.assert_close(layer.bias.grad.double(), rows.sum(0), rtol=2e-6, atol=2e-5)


@pytest.mark.parametrize("config", ["default", "paper_a"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_other_dtypes_are_kept(config, dtype):
    layer = make_layer(config).to(dtype)
    x = torch.randn(3, 64, dtype=dtype)
    y, *gradients = passes(layer, x)
    assert_product(y, quantized_input(config, x), quantized_weight(config, layer.weight), layer.bias)
    assert {tensor.dtype for tensor in (y, *gradients)} == {dtype}


@pytest.mark.parametrize("config", ["default", "paper_a"])
@pytest.mark.parametrize("input_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_with_float32_masters(config, input_dtype):
    layer = make_layer(config)
    x = torch.randn(6, 64).to(input_dtype)
    grad = torch.randn(6, 48).bfloat16()
    inputs = quantized_input(config, x).bfloat16()
    weight = quantized_weight(config, layer.weight).bfloat16()

    y, grad_x, grad_weight, grad_bias = passes(layer, x, grad=grad, autocast=True)

    assert (y.dtype, grad_x.dtype, grad_weight.dtype) == (torch.bfloat16, input_dtype, torch.float32)
    assert layer.weight.dtype == torch.float32
    assert_product(y, inputs, weight, layer.bias.bfloat16())
    assert_product(grad_x.bfloat16(), grad, weight.t())
    assert_product(grad_weight.bfloat16(), grad.t(), inputs.t())
    torch.testing.assert_close(grad_bias, grad.float().sum(0), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("options", [{}, {"preset": "w8a8"}, ROTATED, {"backend": "eager"}], ids=str)
def test_training_goes_on_after_a_pass_without_gradients(mode, options):
    layer = make_layer(**options)
    x = torch.randn(3, 64, requires_grad=True)
    with cached_weights(layer):
        with mode():
            y = layer(x)
        trained = layer(x)
    assert not y.requires_grad
    torch.testing.assert_close(trained, y.clone())
    trained.sum().backward()
    assert layer.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("kind", [MXFP4Linear, MXFP4PackedLinear])
def test_an_input_that_does_not_fit_is_refused_by_name(kind):
    config = MXFP4RLConfig(mode="qat" if kind is MXFP4Linear else "packed")
    layer = kind.from_linear(nn.Linear(64, 48), config, "mlp.up_proj")
    for shape in ((), (3, 63), (64, 3)):
        with pytest.raises(ValueError, match=f"{kind.__name__} mlp.up_proj: .*in_features=64"):
            layer(torch.zeros(shape))
    for dtype in (torch.bfloat16, torch.int64):
        with pytest.raises(TypeError, match=f"mlp.up_proj: input is {dtype} but .* torch.float32.*autocast"):
            layer(torch.zeros(3, 64, dtype=dtype))


def test_from_linear_takes_over_the_very_parameters():
    linear = nn.Linear(64, 48).eval()
    state = torch.get_rng_state()
    layer = MXFP4Linear.from_linear(linear, MXFP4RLConfig(preset="w4a16"), "x.y")
    assert torch.equal(torch.get_rng_state(), state), "it drew random numbers"
    assert layer.weight is linear.weight
    assert layer.bias is linear.bias
    assert (layer.in_features, layer.out_features, layer.training, layer.name) == (64, 48, False, "x.y")
    assert layer.config.preset == "w4a16"
    assert MXFP4Linear.from_linear(nn.Linear(4, 4, bias=False), MXFP4RLConfig()).bias is None


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["own dtype", "bfloat16"])
def test_to_linear_holds_the_quantized_values(dtype):
    layer = make_layer().eval()
    linear = layer.to_linear(dtype)
    assert type(linear) is nn.Linear
    assert not linear.training
    expected = quantized_weight("default", layer.weight).to(dtype or torch.float32)
    assert linear.weight.dtype == expected.dtype
    assert torch.equal(linear.weight, expected)
    assert torch.equal(linear.bias, layer.bias.to(expected.dtype))
    assert linear.bias.data_ptr() != layer.bias.data_ptr()
    assert make_layer(bias=False).to_linear(dtype).bias is None


def test_to_linear_copies_a_weight_that_is_not_quantized():
    layer = make_layer(fprop={"weight": "full"})
    linear = layer.to_linear()
    assert torch.equal(linear.weight, layer.weight)
    assert linear.weight.data_ptr() != layer.weight.data_ptr()


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_state_dict_is_a_linear_layers(bias):
    layer = make_layer(bias=bias)
    other = make_layer(bias=bias, seed=1)
    linear = nn.Linear(64, 48, bias)
    x = torch.randn(2, 64)
    expected = layer(x)
    assert list(layer.state_dict()) == list(linear.state_dict())
    linear.load_state_dict(layer.state_dict())
    other.load_state_dict(linear.state_dict())
    assert torch.equal(other(x), expected)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_copies_are_independent(duplicate):
    layer = make_layer()
    x = torch.randn(2, 64)
    y = layer(x)
    other = duplicate(layer)
    assert torch.equal(other(x), y)
    assert (other.config, other.name) == (layer.config, layer.name)
    with torch.no_grad():
        other.weight.zero_()
    assert torch.equal(layer(x), y)
    assert torch.equal(other(x), other.bias.expand(2, 48))


def test_repr_names_the_scheme():
    assert "in_features=64, out_features=48, bias=True, w4a8 [weights mxfp4+even" in repr(make_layer())
    assert MXFP4Linear(32, 8).config == MXFP4RLConfig()


@pytest.mark.parametrize("config", ["default", "residuals of inputs"])
def test_a_row_does_not_depend_on_what_the_layer_saw(config):
    layer = make_layer(config, 256)
    x, smaller, larger = (torch.randn(64, 256) * scale for scale in (1.0, 0.01, 1000.0))
    expected = layer(x)
    layer(smaller)
    with torch.no_grad(), cached_weights(layer):
        layer(larger)
    assert torch.equal(layer(x), expected)
    torch.testing.assert_close(layer(torch.cat([larger, x]))[64:], expected, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"preset": "paper_a"},
        {"backend": "eager"},
        ROTATED,
        {"mode": "packed"},
        {"mode": "packed", "backend": "eager"},
        {"mode": "packed", **ROTATED},
    ],
    ids=str,
)
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("shape", [(64,), (2, 3, 5, 64)], ids=str)
def test_in_place_changes_have_the_gradients_of_new_tensors(options, has_bias, shape):
    torch.manual_seed(0)
    config = MXFP4RLConfig(**options)
    kind = MXFP4PackedLinear if config.mode == "packed" else MXFP4Linear
    layer = kind.from_linear(nn.Linear(64, 32, has_bias), config)
    x = torch.randn(shape, requires_grad=True)
    twin = x.detach().clone().requires_grad_()

    changed = layer(x)
    changed.mul_(2).relu_()
    expected = (layer(twin) * 2).relu()
    changed.square().sum().backward()
    expected.square().sum().backward()

    assert torch.equal(changed, expected)
    assert torch.equal(x.grad, twin.grad)
