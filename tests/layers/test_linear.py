# SPDX-License-Identifier: Apache-2.0
"""`MXFP4Linear` alone: its equations against an independent computation, and that it is an ordinary linear layer."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from factors import factors_config
from torch import nn

from hf_mxfp4 import MXFP4Linear, MXFP4RLConfig, fake_quantize


PAPER = {"scale_rule": "rceil", "macro_block": 128, "outlier_fallback": 0.5}
#: Options of the config, then what they must do to a weight and to an input (`None`: nothing).
RECIPES = {
    "w4a4": ({}, {**PAPER, "macro_search": "dynamic"}, {**PAPER, "macro_search": "static"}),
    "w4a16": ({"preset": "w4a16"}, {**PAPER, "macro_search": "dynamic"}, None),
    "ocp": (
        {"scale_rule": "floor", "macro_block": None, "outlier_fallback": None},
        {"scale_rule": "floor"},
        {"scale_rule": "floor"},
    ),
    "fallback-on-inputs": (
        {
            "scale_rule": "even",
            "macro_block": "row",
            "macro_search": "static",
            "outlier_fallback_operands": "activations",
        },
        {"scale_rule": "even", "macro_block": "row"},
        {"scale_rule": "even", "macro_block": "row", "outlier_fallback": 0.5},
    ),
}
SHAPES = [(7, 64), (2, 5, 64), (33,), (3, 33), (2, 3, 65), (1, 1), (2, 200)]


def make_layer(recipe="w4a4", in_features=64, out_features=48, bias=True, seed=0, **options) -> MXFP4Linear:
    torch.manual_seed(seed)
    return MXFP4Linear(
        in_features, out_features, bias, config=factors_config(**{**RECIPES[recipe][0], **options}), name="mlp.up_proj"
    )


def expected_operands(recipe: str, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    _, of_weight, of_input = RECIPES[recipe]
    quantized_x = x.detach() if of_input is None else fake_quantize(x.detach(), **of_input)
    return quantized_x, fake_quantize(weight.detach(), **of_weight)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_forward_and_gradients_are_those_of_the_quantized_operands(recipe, shape, bias):
    layer = make_layer(recipe, in_features=shape[-1], out_features=48 if shape[-1] % 2 == 0 else 5, bias=bias)
    x = torch.randn(shape, requires_grad=True)
    quantized_x, quantized_w = expected_operands(recipe, x, layer.weight)
    y = layer(x)
    assert torch.equal(y, F.linear(quantized_x, quantized_w, layer.bias))

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


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_operands_are_quantized_at_all(recipe):
    layer, x = make_layer(recipe), torch.randn(3, 64)
    quantized_x, quantized_w = expected_operands(recipe, x, layer.weight)
    assert not torch.equal(quantized_w, layer.weight)
    assert torch.equal(quantized_x, x) == (recipe == "w4a16")
    assert not torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))


def test_values_of_the_grid_pass_unchanged():
    layer = make_layer("ocp", in_features=8, out_features=2)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[0, 0.5, 1, 1.5, 2, 3, 4, 6], [-6, -4, -3, -2, -1.5, -1, -0.5, 0]]))
        layer.bias.copy_(torch.tensor([0.25, -1.0]))
    x = torch.tensor([[6.0, 4, 3, 2, 1.5, 1, 0.5, 0]])
    assert layer(x).tolist() == [[2 + 3 + 3 + 3 + 3 + 2 + 0.25, -36 - 16 - 9 - 4 - 2.25 - 1 - 0.25 - 1.0]]


@pytest.mark.parametrize("recipe", ["w4a4", "w4a16"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_other_dtypes_are_kept(recipe, dtype):
    layer = make_layer(recipe).to(dtype)
    x = torch.randn(3, 64, dtype=dtype, requires_grad=True)
    y = layer(x)
    quantized_x, quantized_w = expected_operands(recipe, x, layer.weight)
    assert quantized_w.dtype == y.dtype == dtype
    assert torch.equal(y, F.linear(quantized_x, quantized_w, layer.bias))
    y.sum().backward()
    assert x.grad.dtype == layer.weight.grad.dtype == layer.bias.grad.dtype == dtype


@pytest.mark.parametrize("recipe", ["w4a4", "w4a16"])
@pytest.mark.parametrize("input_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_with_float32_masters(recipe, input_dtype):
    layer = make_layer(recipe)
    x = torch.randn(2, 3, 64).to(input_dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    quantized_x, quantized_w = (t.bfloat16() for t in expected_operands(recipe, x, layer.weight))
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, F.linear(quantized_x, quantized_w, layer.bias.bfloat16()))

    grad = torch.randn(2, 3, 48).bfloat16()
    y.backward(grad)
    assert x.grad.dtype == input_dtype
    assert layer.weight.dtype == layer.weight.grad.dtype == layer.bias.grad.dtype == torch.float32
    rows = grad.reshape(-1, 48)
    assert torch.equal(x.grad, (grad @ quantized_w).to(input_dtype))
    assert torch.equal(layer.weight.grad, (rows.t() @ quantized_x.reshape(-1, 64)).float())
    torch.testing.assert_close(layer.bias.grad, rows.float().sum(0), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("first", ["full-precision", "autocast"])
def test_autocast_and_full_precision_alternate_without_mixing_up_the_kept_weight(first):
    layer, x = make_layer("w4a16"), torch.randn(2, 64)
    quantized = expected_operands("w4a16", x, layer.weight)[1]
    for i in range(4):
        if (i % 2 == 0) == (first == "full-precision"):
            assert torch.equal(layer(x), F.linear(x, quantized, layer.bias))
        else:
            with torch.autocast("cpu", torch.bfloat16):
                y = layer(x)
            assert torch.equal(y, F.linear(x.bfloat16(), quantized.bfloat16(), layer.bias.bfloat16()))


def test_weight_without_gradient():
    layer = make_layer()
    layer.requires_grad_(False)
    x = torch.randn(3, 64, requires_grad=True)
    layer(x).sum().backward()
    assert layer.weight.grad is None and layer.bias.grad is None
    torch.testing.assert_close(x.grad, expected_operands("w4a4", x, layer.weight)[1].sum(0).expand(3, 64))
    assert not layer(x.detach()).requires_grad


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_no_gradients_recorded_then_training_goes_on(mode):
    layer, x = make_layer(), torch.randn(3, 64)
    with mode():
        y = layer(x)
    assert not y.requires_grad
    trained = layer(x)
    assert torch.equal(trained, y.clone())
    trained.sum().backward()
    assert layer.weight.grad.abs().sum() > 0


def test_one_layer_used_twice_adds_its_gradients():
    layer = make_layer(in_features=32, out_features=32)
    x = torch.randn(3, 32)
    h = layer(x)
    layer(h).sum().backward()
    total = layer.weight.grad.clone()

    parts = []
    for first, second in ((layer, copy.deepcopy(layer)), (copy.deepcopy(layer), layer)):
        layer.zero_grad()
        second(first(x)).sum().backward()
        parts.append(layer.weight.grad.clone())
    torch.testing.assert_close(total, parts[0] + parts[1])
    assert all(part.abs().sum() > 0 for part in parts)


def test_two_layers_share_one_weight():
    first, second = (
        make_layer(in_features=32, out_features=32, seed=0),
        make_layer(in_features=32, out_features=32, seed=1),
    )
    second.weight = first.weight
    x = torch.randn(2, 32)
    quantized_x, quantized_w = expected_operands("w4a4", x, first.weight)
    for _ in range(2):
        assert torch.equal(second(x), F.linear(quantized_x, quantized_w, second.bias))
        assert torch.equal(first(x), F.linear(quantized_x, quantized_w, first.bias))
        (first(x) + second(x)).sum().backward()
        with torch.no_grad():
            first.weight -= 0.1 * first.weight.grad
        quantized_w = expected_operands("w4a4", x, first.weight)[1]


def test_input_is_never_written():
    layer, x = make_layer(), torch.randn(3, 64)
    before = x.clone()
    layer(x)
    assert torch.equal(x, before)


@pytest.mark.parametrize("recipe", ["w4a4", "w4a16"])
@pytest.mark.parametrize(
    ("shape", "dtype", "error", "words"),
    [
        ((3, 63), torch.float32, ValueError, ["(3, 63)", "in_features=64"]),
        ((64, 3), torch.float32, ValueError, ["(64, 3)", "in_features=64"]),
        ((3, 64), torch.bfloat16, TypeError, ["torch.bfloat16", "torch.float32", "autocast"]),
        ((3, 64), torch.float64, TypeError, ["torch.float64", "torch.float32"]),
    ],
    ids=["short", "transposed", "bfloat16", "float64"],
)
def test_an_input_that_does_not_fit_is_refused_by_name(recipe, shape, dtype, error, words):
    with pytest.raises(error) as caught:
        make_layer(recipe)(torch.zeros(shape, dtype=dtype))
    assert str(caught.value).startswith("MXFP4Linear mlp.up_proj: ")
    assert all(word in str(caught.value) for word in words)


def test_not_a_number_in_an_input_stays_in_its_row():
    layer, x = make_layer(), torch.randn(3, 64)
    clean = layer(x)
    x[1, 5] = float("nan")
    y = layer(x)
    assert y[1].isnan().all() and torch.equal(y[[0, 2]], clean[[0, 2]])


def test_from_linear_takes_over_the_very_parameters():
    linear = nn.Linear(64, 48).eval()
    linear.bias.requires_grad_(False)
    layer = MXFP4Linear.from_linear(linear, factors_config(preset="w4a16"), "x.y")
    assert layer.weight is linear.weight and layer.bias is linear.bias
    assert (layer.in_features, layer.out_features, layer.training, layer.name) == (64, 48, False, "x.y")
    assert layer.config.preset == "w4a16"
    assert MXFP4Linear.from_linear(nn.Linear(4, 4, bias=False), factors_config()).bias is None


def test_from_linear_consumes_no_random_numbers():
    linear = nn.Linear(64, 48)
    state = torch.get_rng_state()
    MXFP4Linear.from_linear(linear, factors_config())
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["own-dtype", "bfloat16"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
def test_to_linear_holds_the_quantized_values(dtype, bias):
    layer = make_layer("w4a16", bias=bias).eval()
    linear = layer.to_linear(dtype)
    assert type(linear) is nn.Linear and not linear.training
    expected = expected_operands("w4a16", torch.zeros(64), layer.weight)[1].to(dtype or torch.float32)
    assert linear.weight.dtype == expected.dtype and torch.equal(linear.weight, expected)
    if bias:
        assert torch.equal(linear.bias, layer.bias.to(expected.dtype))
        assert linear.bias.data_ptr() != layer.bias.data_ptr()
    else:
        assert linear.bias is None


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


def test_default_config_is_the_default_scheme():
    assert MXFP4Linear(32, 8).config == MXFP4RLConfig()
