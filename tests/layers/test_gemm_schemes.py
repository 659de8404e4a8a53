# SPDX-License-Identifier: Apache-2.0
"""The three products of `MXFP4Linear` under every choice for their six operands, against the same equations in float64
written here in another way: explicit rotation matrices, explicit padding, products by einsum."""

import copy
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from passes import assert_product, passes
from rotations import rotation_matrix
from tables import FP8_GRADIENTS

from hf_mxfp4 import MXFP4Linear, MXFP4RLConfig, numerics
from hf_mxfp4.ops import rng as draws_module


OPERANDS = [
    ("fprop", "x"), ("fprop", "weight"), ("dgrad", "grad"), ("dgrad", "weight"), ("wgrad", "grad"), ("wgrad", "x"),
]  # fmt: skip
#: Without macro blocks: a product of every operand rounds each block of 32.
PLAIN = {"preset": "w4a4", "macro_block": None}
#: Tokens, outputs and inputs, none of them a multiple of 16 or 32.
M = 43
N = 37
K = 50


def options_for(quantized: set, rotation: str, rounding: str) -> dict:
    """Config options that quantize exactly these operands; products without any keep their axes."""
    text = "even" if rounding == "nearest" else "even+stochastic"
    options = {}
    for gemm in ("fprop", "dgrad", "wgrad"):
        mine = {name: text if (gemm, name) in quantized else "full" for g, name in OPERANDS if g == gemm}
        if set(mine.values()) != {"full"}:
            mine["rotation"] = rotation
        options[gemm] = mine
    return options


def make_layer(bias=True, seed=0, in_features=K, out_features=N, **options) -> MXFP4Linear:
    torch.manual_seed(seed)
    config = MXFP4RLConfig(**{**PLAIN, **options})
    return MXFP4Linear(in_features, out_features, bias, config=config, name="layers.3.mlp.up_proj")


def fake_quantize(x: torch.Tensor, **options) -> torch.Tensor:
    return numerics.fake_quantize(x, scale_rule="even", **options)


def one_pass(layer, x, grad, autocast=False) -> list[torch.Tensor]:
    """y, dx and dW."""
    return passes(layer, x, grad=grad, autocast=autocast)[:3]


def same(first, second) -> list[bool]:
    return [torch.equal(a, b) for a, b in zip(first, second, strict=True)]


class Oracle:
    """One pass of a layer in float64, with the layer's own random numbers drawn again by their keys."""

    def __init__(self, layer: MXFP4Linear, options: dict):
        self.options, self.rng = options, copy.deepcopy(layer.rng)

    def operand(self, gemm: str, name: str, values: torch.Tensor) -> torch.Tensor:
        """``values [rows, contraction]`` after rotation and quantization."""
        rotation = self.options[gemm].get("rotation", "none")
        signs = None
        if rotation.startswith("random"):
            size = int(rotation.split("-")[1])
            signs = self.rng.signs(gemm, math.ceil(values.shape[1] / size) * size, "cpu")
        rotated = values.double() @ rotation_matrix(rotation, values.shape[1], signs)
        if rotation != "none":
            # The very rotated values decide on which side of a rounding boundary they fall.
            padded = F.pad(values.float(), (0, rotated.shape[1] - values.shape[1]))
            kernel = numerics.rotate(padded, size := int(rotation.split("-")[1]), signs=signs)
            torch.testing.assert_close(kernel.double(), rotated, rtol=0, atol=2e-6 * size * float(values.abs().max()))
            rotated = kernel
        text = self.options[gemm][name]
        if text in ("full", "reuse"):
            return rotated.double()
        seed = self.rng.seed_of(gemm, name) if "stochastic" in text else None
        rounding = "stochastic" if "stochastic" in text else "nearest"
        return fake_quantize(rotated.float(), rounding=rounding, seed=seed).double()

    def forward(self, x, weight, bias):
        left = self.operand("fprop", "x", x)
        right = self.operand("fprop", "weight", weight)
        return torch.einsum("mk,nk->mn", left, right) + bias.double()

    def grad_x(self, grad, weight):
        left = self.operand("dgrad", "grad", grad)
        right = self.operand("dgrad", "weight", weight.t().contiguous())
        return torch.einsum("mn,kn->mk", left, right)

    def grad_weight(self, grad, x):
        left = self.operand("wgrad", "grad", grad.t().contiguous())
        return torch.einsum("nm,km->nk", left, self.operand("wgrad", "x", x.t().contiguous()))


COMBINATIONS = [set(c) for r in range(7) for c in itertools.combinations(OPERANDS, r)]


@pytest.mark.parametrize(
    ("rotation", "rounding"),
    [("none", "nearest"), ("deterministic-16", "stochastic"), ("random-32", "nearest")],
)
def test_every_combination_of_operands(rotation, rounding):
    assert len(COMBINATIONS) == 64
    torch.manual_seed(1)
    batch = torch.randn(M, K)
    grad = torch.randn(M, N)
    seen = set()
    for quantized in COMBINATIONS:
        options = options_for(quantized, rotation, rounding)
        layer = make_layer(**options)
        layer.set_step(5)
        oracle = Oracle(layer, options)
        found = one_pass(layer, batch, grad)
        weight = layer.weight.detach()
        expected = [
            oracle.forward(batch, weight, layer.bias.detach()),
            oracle.grad_x(grad, weight),
            oracle.grad_weight(grad, batch),
        ]
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-5, check_dtype=False)
        torch.testing.assert_close(layer.bias.grad, grad.sum(0))
        seen.add(tuple(round(float(t.sum()), 4) for t in expected))
    assert len(seen) == 64  # every choice shows in a value


def test_all_off_is_a_plain_linear_layer_to_the_last_bit():
    options = options_for(set(), "none", "nearest")
    layer = make_layer(**options)
    plain = torch.nn.Linear(K, N)
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(3, 5, K)
    assert torch.equal(layer(x), plain(x))
    torch.testing.assert_close(passes(layer, x), passes(plain, x))
    double = make_layer(in_features=6, out_features=4, **options).double()
    assert torch.autograd.gradcheck(double, torch.randn(3, 6, dtype=torch.float64, requires_grad=True))


@pytest.mark.parametrize("preset", ["w4a8", "w4a16", "w4a4", "paper_a"])
def test_reuse_in_so_many_words_is_the_preset(preset):
    words = {"dgrad": {"grad": "full", "weight": "reuse"}, "wgrad": {"x": "reuse", "rotation": "none"}}
    assert MXFP4RLConfig(preset=preset, **words).gemms() == MXFP4RLConfig(preset=preset).gemms()


@pytest.mark.parametrize("rotation", ["deterministic-16", "random-32"])
def test_reused_operands_are_those_of_a_rotated_forward_rotated_back(rotation):
    layer = make_layer(fprop={"rotation": rotation})
    options = {"fprop": {"x": "even", "weight": "even", "rotation": rotation}}
    oracle = Oracle(layer, options)
    x = torch.randn(M, K)
    grad = torch.randn(M, N)
    found = one_pass(layer, x, grad)
    weight = layer.weight.detach()
    size = int(rotation.split("-")[1])
    signs = oracle.rng.signs("fprop", math.ceil(K / size) * size, "cpu") if rotation.startswith("random") else None
    back = rotation_matrix(rotation, K, signs).t()
    effective_w = oracle.operand("fprop", "weight", weight) @ back
    effective_x = oracle.operand("fprop", "x", x) @ back
    y = oracle.forward(x, weight, layer.bias.detach())
    expected = y, grad.double() @ effective_w, grad.double().t() @ effective_x, effective_w
    found = [*found, layer.to_linear().weight]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-5, check_dtype=False)


def test_fp8_output_gradients_are_quantized_along_each_contraction():
    layer = make_layer(**FP8_GRADIENTS)
    x = torch.randn(M, K)
    grad = torch.randn(M, N) * torch.logspace(-6, 3, M).unsqueeze(1)
    by_token = numerics.fake_quantize_e4m3(grad)
    by_output = numerics.fake_quantize_e4m3(grad.t())
    assert not torch.equal(by_token, by_output.t())

    _, grad_x, grad_weight = one_pass(layer, x, grad)

    assert_product(grad_x, by_token, fake_quantize(layer.weight.detach()).t())
    assert_product(grad_weight, by_output, fake_quantize(x).t())


RANDOM = {
    "preset": "w4a4g4",
    "fprop": {"x": "even+stochastic", "weight": "even+stochastic", "rotation": "random-16"},
    "dgrad": {"grad": "even+stochastic", "weight": "even+stochastic"},
    "wgrad": {"grad": "even+stochastic", "x": "even+stochastic", "rotation": "random-32"},
}


def test_draws_leave_the_generator_of_torch_alone():
    layer = make_layer(**RANDOM)
    x = torch.randn(M, K)
    grad = torch.randn(M, N)
    state = torch.get_rng_state()
    one_pass(layer, x, grad)
    assert torch.equal(torch.get_rng_state(), state)


def test_draws_follow_the_step_and_the_micro_batch():
    layer = make_layer(**RANDOM)
    x = torch.randn(M, K)
    grad = torch.randn(M, N)
    layer.set_step(3)
    first = one_pass(layer, x, grad)
    assert same(one_pass(layer, x, grad), first) == [True, False, False]  # the next micro-batch of the step
    layer.set_step(3)
    assert same(one_pass(layer, x, grad), first) == [True, True, True]
    layer.set_step(4)
    assert same(one_pass(layer, x, grad), first) == [False, False, False]


@pytest.mark.parametrize(("seed", "name"), [(1, "layers.3.mlp.up_proj"), (0, "layers.4.mlp.up_proj")], ids=str)
def test_another_seed_or_layer_draws_other_numbers(seed, name):
    layer = make_layer(**RANDOM)
    x = torch.randn(M, K)
    grad = torch.randn(M, N)
    config = MXFP4RLConfig(**{**PLAIN, **RANDOM, "stochastic_seed": seed})
    other = MXFP4Linear(K, N, config=config, name=name)
    other.load_state_dict(layer.state_dict())
    assert same(one_pass(other, x, grad), one_pass(layer, x, grad)) == [False, False, False]


def test_ranks_draw_other_numbers_but_for_the_weight(monkeypatch):
    layer = make_layer(**RANDOM)
    x = torch.randn(M, K)
    grad = torch.randn(M, N)
    first = one_pass(layer, x, grad)
    weight = layer.quantized_weight(layer.weight, torch.float32)

    monkeypatch.setattr(draws_module, "_rank", lambda: 1)
    layer.set_step(0)

    assert same(one_pass(layer, x, grad), first) == [False, False, False]
    assert torch.equal(layer.quantized_weight(layer.weight, torch.float32), weight)


def test_operands_draw_independently():
    layer = make_layer(**RANDOM)
    assert len({layer.rng.seed_of(*name) for name in OPERANDS}) == 6


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputed_forward_draws_the_same(reentrant):
    x = torch.randn(M, K)
    grad = torch.randn(M, K)
    results = []
    for recompute in (False, True):
        layers = [make_layer(out_features=K, seed=i, **RANDOM) for i in range(2)]
        for i, layer in enumerate(layers):
            layer.rng.layer = f"layers.{i}"
        leaf = x.clone().requires_grad_()
        for _ in range(2):  # two micro-batches
            h = leaf
            for layer in layers:
                h = torch.utils.checkpoint.checkpoint(layer, h, use_reentrant=reentrant) if recompute else layer(h)
            h.backward(grad)
        results.append([leaf.grad, *(layer.weight.grad for layer in layers)])
    assert same(*results) == [True] * 3


@pytest.mark.parametrize(
    ("options", "index"),
    [
        ({"fprop": {"x": "rceil+stochastic", "weight": "rceil+stochastic"}}, 0),
        ({"dgrad": {"grad": "rceil+stochastic", "weight": "rceil+stochastic"}}, 1),
        ({"wgrad": {"grad": "rceil+stochastic", "x": "rceil+stochastic"}}, 2),
        ({"wgrad": {"grad": "rceil+stochastic", "x": "rceil+stochastic", "rotation": "random-16"}}, 2),
        ({"wgrad": {"grad": "rceil+stochastic", "x": "full", "rotation": "deterministic-16"}}, 2),
    ],
    ids=["fprop", "dgrad", "wgrad", "wgrad-random", "wgrad-one"],
)
def test_stochastic_products_are_unbiased(options, index):
    """Also where both operands are stochastic, which holds only if they are drawn independently. The rule is one that
    clamps no value, since that has a bias."""
    layer = make_layer(False, **{**options_for(set(), "none", "nearest"), **options})
    x = torch.randn(M, K)
    grad = torch.randn(M, N)
    weight = layer.weight.detach().double()
    exact = (x.double() @ weight.t(), grad.double() @ weight, grad.double().t() @ x.double())[index]
    n = 100
    total = 0.0
    squares = 0.0
    for step in range(n):
        layer.set_step(step)
        error = one_pass(layer, x, grad)[index].double() - exact
        total = total + error
        squares = squares + error.square()
    variance = squares / n - (total / n).square()
    z = total / n / (variance / n).sqrt()
    assert variance.min() > 0
    # Under the hypothesis z is about normal: its mean square over the output is near 1, and its largest value small.
    assert 0.8 < float(z.square().mean()) < 1.2
    assert float(z.abs().max()) < 5.5


@pytest.mark.parametrize("preset", ["w4a8", "w4a8g8", "w4a4g4", "paper_b"])
@pytest.mark.parametrize("shape", [(2, 0, K), (2, 3, K)], ids=str)
def test_shapes_down_to_no_tokens(preset, shape):
    torch.manual_seed(0)
    layer = MXFP4Linear(K, N, config=MXFP4RLConfig(preset=preset))
    y, grad_x, grad_weight, _ = passes(layer, torch.randn(shape))
    assert y.shape == (*shape[:-1], N)
    assert grad_x.shape == shape
    assert grad_weight.shape == (N, K)
    assert grad_weight.isfinite().all()
    assert grad_weight.any() == (grad_x.numel() > 0)


@pytest.mark.parametrize("preset", ["w4a8g8", "w4a4g4", "paper_b"])
@pytest.mark.parametrize("setting", ["bfloat16", "autocast"])
def test_bfloat16_and_autocast_follow_float32(preset, setting):
    torch.manual_seed(0)
    layer = MXFP4Linear(64, 48, config=MXFP4RLConfig(preset=preset))
    x = torch.randn(40, 64).bfloat16()
    grad = torch.randn(40, 48).bfloat16()
    with torch.no_grad():
        layer.weight.copy_(layer.weight.bfloat16())
    reference = one_pass(layer, x.float(), grad.float())
    autocast = setting == "autocast"
    actual = one_pass(layer, x.float(), grad, True) if autocast else one_pass(layer.bfloat16(), x, grad)
    masters = torch.float32 if autocast else torch.bfloat16
    assert [value.dtype for value in actual] == [torch.bfloat16, masters, masters]
    for value, expected in zip(actual, reference, strict=True):
        assert (value.float() - expected).norm() < 0.02 * expected.norm()


def test_backward_quantizes_the_weight_as_it_is_then():
    """A sharded engine refills the weight's storage between the passes."""
    layer = make_layer(preset="w4a4g4")
    x = torch.randn(M, K, requires_grad=True)
    grad = torch.randn(M, N)
    y = layer(x)
    other = torch.randn(N, K)
    layer.weight.data = other
    y.backward(grad)
    expected = fake_quantize(grad).double() @ fake_quantize(other, axis=0).double()
    torch.testing.assert_close(x.grad.double(), expected, rtol=1e-5, atol=1e-5)


def test_tiles_serve_the_weight_and_its_transpose():
    tiles = {"weight": "even+32x32"}
    layer = make_layer(preset="w4a4g4", fprop=tiles, dgrad=tiles, in_features=64, out_features=96)
    grad = torch.randn(8, 96)
    x = torch.randn(8, 64, requires_grad=True)
    layer(x).backward(grad)
    forward_weight = layer.quantized_weight(layer.weight, torch.float32)
    expected = fake_quantize(grad).double() @ forward_weight.double()
    torch.testing.assert_close(x.grad.double(), expected, rtol=1e-5, atol=1e-5)
