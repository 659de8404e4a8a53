# SPDX-License-Identifier: Apache-2.0
"""`MXFP4Linear` alone: its equations against an independent computation, and that it is an ordinary linear layer."""

import copy
import pickle
import re

import pytest
import torch
import torch.nn.functional as F
from factors import factors_config
from passes import assert_product, passes
from tables import PLAIN
from torch import nn

from hf_mxfp4 import MXFP4Linear, MXFP4PackedLinear, MXFP4RLConfig
from hf_mxfp4.layers import cached_weights
from hf_mxfp4.numerics import apply_scheme, parse_scheme


#: Options of the config, then what they must do to a weight and to an input (`None`: nothing).
RECIPES = {
    "w4a4": ({}, "rceil+mbs128-dynamic+of0.5", "rceil+mbs128+of0.5"),
    "w4a16": ({"preset": "w4a16"}, "rceil+mbs128-dynamic+of0.5", None),
    "ocp": ({**PLAIN, "scale_rule": "floor"}, "floor", "floor"),
    "fallback-on-inputs": (
        {"macro_block": "row", "scale_rule": "even", "fprop": {"weight": "even+mbsrow"}},
        "even+mbsrow",
        "even+mbsrow+of0.5",
    ),
    "tiles": ({"fprop": {"weight": "rceil+mbs128+of0.5+32x32"}}, "rceil+mbs128+of0.5+32x32", "rceil+mbs128+of0.5"),
}
ROTATED = {"preset": "w4a4", "fprop": {"rotation": "deterministic-64"}}
SHAPES = [(2, 5, 64), (33,), (2, 3, 65), (1, 1), (2, 200)]


def make_layer(recipe="w4a4", in_features=64, out_features=48, bias=True, seed=0, **options) -> MXFP4Linear:
    torch.manual_seed(seed)
    config = factors_config(**{**RECIPES[recipe][0], **options})
    return MXFP4Linear(in_features, out_features, bias, config=config, name="mlp.up_proj")


def expected_operands(recipe: str, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    _, of_weight, of_input = RECIPES[recipe]
    quantized_x = x.detach() if of_input is None else apply_scheme(x.detach(), parse_scheme(of_input))
    return quantized_x, apply_scheme(weight.detach(), parse_scheme(of_weight))


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_forward_and_gradients_are_those_of_the_quantized_operands(recipe, shape, bias):
    layer = make_layer(recipe, in_features=shape[-1], out_features=48 if shape[-1] % 2 == 0 else 5, bias=bias)
    x = torch.randn(shape, requires_grad=True)
    before = x.detach().clone()
    quantized_x, quantized_w = expected_operands(recipe, x, layer.weight)
    assert not torch.equal(quantized_w, layer.weight) and torch.equal(quantized_x, x) == (recipe == "w4a16")
    y = layer(x)
    # In float64: libraries of products may add up in another order where memory is aligned differently.
    exact = F.linear(quantized_x.double(), quantized_w.double(), None if layer.bias is None else layer.bias.double())
    torch.testing.assert_close(y.double(), exact, rtol=2e-6, atol=2e-6)
    assert y.dtype == x.dtype and torch.equal(x, before)

    grad = torch.randn_like(y)
    y.backward(grad)
    rows = grad.double().reshape(-1, layer.out_features)
    close = {"rtol": 2e-6, "atol": 2e-5}
    torch.testing.assert_close(x.grad.double(), grad.double() @ quantized_w.double(), **close)
    torch.testing.assert_close(
        layer.weight.grad.double(), rows.t() @ quantized_x.double().reshape(-1, shape[-1]), **close
    )
    if bias:
        torch.testing.assert_close(layer.bias.grad.double(), rows.sum(0), **close)


@pytest.mark.parametrize("recipe", ["w4a4", "w4a16"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_other_dtypes_are_kept(recipe, dtype):
    layer = make_layer(recipe).to(dtype)
    x = torch.randn(3, 64, dtype=dtype)
    y, *grads = passes(layer, x)
    quantized_x, quantized_w = expected_operands(recipe, x, layer.weight)
    assert_product(y, quantized_x, quantized_w, layer.bias)
    assert [t.dtype for t in (quantized_w, y, *grads)] == [dtype] * 5


@pytest.mark.parametrize("recipe", ["w4a4", "w4a16"])
@pytest.mark.parametrize("input_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_with_float32_masters(recipe, input_dtype):
    layer = make_layer(recipe)
    x, grad = torch.randn(2, 3, 64).to(input_dtype), torch.randn(2, 3, 48).bfloat16()
    y, *grads, grad_bias = passes(layer, x, grad=grad, autocast=True)
    quantized_x, quantized_w = (t.bfloat16() for t in expected_operands(recipe, x, layer.weight))
    rows, inputs = grad.reshape(-1, 48), quantized_x.reshape(-1, 64)
    assert_product(y.view(-1, 48), inputs, quantized_w, layer.bias.bfloat16())
    assert [t.dtype for t in (y, layer.weight, *grads)] == [torch.bfloat16, torch.float32, input_dtype, torch.float32]
    assert_product(grads[0].view(-1, 64).bfloat16(), rows, quantized_w.t())
    assert_product(grads[1].bfloat16(), rows.t(), inputs.t())
    torch.testing.assert_close(grad_bias, rows.float().sum(0), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("options", [{}, {"preset": "w8a8"}, ROTATED, {"backend": "eager"}], ids=str)
def test_no_gradients_recorded_then_training_goes_on(mode, options):
    layer, x = make_layer(**options), torch.randn(3, 64, requires_grad=True)
    with cached_weights(layer):
        with mode():
            y = layer(x)
        assert not y.requires_grad
        trained = layer(x)
        torch.testing.assert_close(trained, y.clone())
        trained.sum().backward()
    assert layer.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("preset", ["w4a4", "w4a16"])
@pytest.mark.parametrize("kind", [MXFP4Linear, MXFP4PackedLinear])
def test_an_input_that_does_not_fit_is_refused_by_name(kind, preset):
    config = factors_config(preset=preset, mode="qat" if kind is MXFP4Linear else "packed")
    layer, name = kind.from_linear(nn.Linear(64, 48), config, "mlp.up_proj"), f"{kind.__name__} mlp.up_proj: input"
    for shape in ((), (3,), (3, 63), (3, 32), (64, 3)):
        with pytest.raises(ValueError, match=re.escape(f"{name} {shape} does not end in in_features=64")):
            layer(torch.zeros(shape))
    for dtype in (torch.bfloat16, torch.float64, torch.int64):
        with pytest.raises(TypeError, match=f"{name} is {dtype} but the layer's dtype is torch.float32.*autocast"):
            layer(torch.zeros(3, 64, dtype=dtype))


def test_from_linear_takes_over_the_very_parameters():
    linear = nn.Linear(64, 48).eval()
    linear.bias.requires_grad_(False)
    state = torch.get_rng_state()
    layer = MXFP4Linear.from_linear(linear, factors_config(preset="w4a16"), "x.y")
    assert torch.equal(torch.get_rng_state(), state)
    assert layer.weight is linear.weight and layer.bias is linear.bias
    assert (layer.in_features, layer.out_features, layer.training, layer.name) == (64, 48, False, "x.y")
    assert layer.config.preset == "w4a16"
    assert MXFP4Linear.from_linear(nn.Linear(4, 4, bias=False), factors_config()).bias is None


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["own-dtype", "bfloat16"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
def test_to_linear_holds_the_quantized_values(dtype, bias):
    layer = make_layer("w4a16", bias=bias).eval()
    linear = layer.to_linear(dtype)
    assert type(linear) is nn.Linear and not linear.training
    expected = expected_operands("w4a16", torch.zeros(64), layer.weight)[1].to(dtype or torch.float32)
    assert linear.weight.dtype == expected.dtype and torch.equal(linear.weight, expected)
    plain = make_layer(bias=bias, fprop={"weight": "full"})
    pairs = [(plain.to_linear(dtype).weight, plain.weight)]
    if bias:
        pairs += [(linear.bias, layer.bias)]
    else:
        assert linear.bias is None
    for copied, own in pairs:
        assert torch.equal(copied, own.to(expected.dtype)) and copied.data_ptr() != own.data_ptr()


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
def test_state_dict_is_a_linear_layers(bias):
    layer = make_layer(bias=bias)
    layer(torch.randn(2, 64))
    linear = nn.Linear(64, 48, bias)
    assert list(layer.state_dict()) == list(linear.state_dict())
    linear.load_state_dict(layer.state_dict())
    other = make_layer(bias=bias, seed=1)
    other.load_state_dict(linear.state_dict())
    x = torch.randn(2, 64)
    assert torch.equal(other(x), layer(x))
    assert not list(layer.buffers())


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_copies_are_independent(duplicate):
    layer, x = make_layer(), torch.randn(2, 64)
    y = layer(x)
    other = duplicate(layer)
    assert torch.equal(other(x), y) and other.config == layer.config and other.name == layer.name
    with torch.no_grad():
        other.weight.zero_()
    assert torch.equal(layer(x), y)
    assert torch.equal(other(x), other.bias.expand(2, 48))


def test_repr_names_the_scheme():
    assert "in_features=64, out_features=48, bias=True, w4a4 [weights mxfp4+rceil" in repr(make_layer())
    assert MXFP4Linear(32, 8).config == MXFP4RLConfig()


def batch(rows=64, seed=1, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 256, generator=generator) * torch.randn(rows, 1, generator=generator).exp() * scale


def test_a_row_does_not_depend_on_what_the_layer_saw():
    layer, x = make_layer("fallback-on-inputs", 256), batch()
    expected = layer(x)
    for scale in (0.01, 100.0):
        layer(batch(seed=2, scale=scale))
    with torch.no_grad(), cached_weights(layer):
        layer(batch(seed=3, scale=1000.0))
    assert torch.equal(layer(x), expected)
    torch.testing.assert_close(layer(torch.cat([batch(seed=4, scale=50.0), x]))[64:], expected, rtol=1e-6, atol=1e-5)


CONFIGS = {
    "default": {},
    "w4a4": {"preset": "w4a4", "outlier_fallback": 1.0},
    "w4a16": {"preset": "w4a16"},
    "eager": {"backend": "eager"},
    "rotated": ROTATED,
    "packed": {"mode": "packed"},
    "packed, dense values": {"mode": "packed", "backend": "eager"},
    "packed, rotated": {"mode": "packed", "fprop": {"rotation": "deterministic-64"}},
}


@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("name", CONFIGS)
def test_in_place_changes_have_the_gradients_of_new_tensors(name, has_bias):
    torch.manual_seed(0)
    config = MXFP4RLConfig(**CONFIGS[name])
    kind = MXFP4PackedLinear if config.mode == "packed" else MXFP4Linear
    layer = kind.from_linear(nn.Linear(64, 32, has_bias), config)
    for shape in ((64,), (5, 64), (2, 5, 64), (2, 3, 5, 64)):
        inputs = [torch.randn(shape, generator=torch.Generator().manual_seed(1)).requires_grad_() for _ in range(2)]
        results = [layer(x) for x in inputs]
        results[0].mul_(2).add_(results[0].detach().roll(1)).relu_()
        results[1] = (results[1] * 2 + (results[1] * 2).detach().roll(1)).relu()
        for result in results:
            result.square().sum().backward()
        assert torch.equal(*results) and torch.equal(inputs[0].grad, inputs[1].grad)
