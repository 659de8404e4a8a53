# SPDX-License-Identifier: Apache-2.0
"""Layers with E4M3 inputs (presets w4a8, w4a8g8 and w8a8, and MXFP8) against the same products of operands that are
rounded here: E4M3 by ml_dtypes, with the power of two that a logarithm in float64 gives."""

import importlib
import math

import pytest
import torch
import torch.nn.functional as F
from ml_dtypes import float8_e4m3fn
from passes import assert_product, passes
from same_bits import assert_same
from tables import needs_fp8_on_cpu
from tiny_models import make_model

from hf_mxfp4 import MXFP4Experts, MXFP4Linear, MXFP4PackedLinear, MXFP4RLConfig, cached_weights, numerics, ops
from hf_mxfp4.ops import GemmSpec, GemmState, Groups, LayerRng, quantization, quantized_linear, select_matmul


choice, products, weights = (
    importlib.import_module(f"hf_mxfp4.ops.{name}") for name in ("choice", "products", "weights")
)
#: Tokens, outputs and inputs, none of them a multiple of 16 or 32.
M = 43
N = 37
K = 50
#: Without macro factors, which FP8 tensor cores do not multiply.
PLAIN = {"macro_block": None}
MXFP8 = {"preset": "w4a8", "fprop": {"x": "mxfp8"}, **PLAIN}
FP8_PRODUCTS = {"matmul_backend": "fp8", **PLAIN}


def scales_of(x: torch.Tensor) -> torch.Tensor:
    """The smallest power of two for each row that leaves no magnitude above 448: float64 ``[..., 1]``."""
    return 2.0 ** (x.double().abs().amax(-1, keepdim=True) / 448).log2().ceil()


def e4m3(x: torch.Tensor) -> torch.Tensor:
    """The elements of rows of ``x`` in float64, rounded by ml_dtypes."""
    elements = (x.double() / scales_of(x)).float().numpy().astype(float8_e4m3fn)
    return torch.from_numpy(elements.astype("float64"))


def fp8(x: torch.Tensor) -> torch.Tensor:
    return (e4m3(x) * scales_of(x)).to(x.dtype)


def mxfp8(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([fp8(block) for block in x.split(32, dim=-1)], dim=-1)


def tokens(dtype=torch.float32) -> torch.Tensor:
    """Inputs whose tokens have scales from 2**-20 to 2**20, and a channel that is larger than the others."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(M, K, generator=generator) * 2.0 ** torch.randint(-12, 13, (M, 1), generator=generator)
    x[:, 3] *= 40
    return x.to(dtype)


def layer(dtype=torch.float32, **options) -> MXFP4Linear:
    torch.manual_seed(0)
    return MXFP4Linear(K, N, dtype=dtype, config=MXFP4RLConfig(**options), name="up_proj")


def check_passes(layer: MXFP4Linear, x: torch.Tensor, values: torch.Tensor, weight: torch.Tensor) -> None:
    """A layer computes as with these operands, whose gradients are those of a straight-through estimator."""
    grad = torch.randn(len(x), N, generator=torch.Generator().manual_seed(2)).to(x.dtype)
    y, grad_x, grad_weight, grad_bias = passes(layer, x, grad=grad)
    assert_product(y, values, weight, layer.bias)
    assert_product(grad_x, grad, weight.t())
    assert_product(grad_weight, grad.t(), values.t())
    assert_product(grad_bias[:, None], grad.t(), torch.ones(1, len(x)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["default", "w8a8", "mxfp8"])
def test_products_are_those_of_dequantized_operands_and_have_their_gradients(name, dtype):
    options = {"default": {}, "w8a8": {"preset": "w8a8"}, "mxfp8": MXFP8}
    found = layer(dtype, **options[name])
    x = tokens(dtype)
    weight = found.weight.detach()
    rounded = fp8(weight) if name == "w8a8" else numerics.apply_scheme(weight, found.config.weight_scheme)
    values = mxfp8(x) if name == "mxfp8" else fp8(x)
    assert not torch.equal(values, x)
    check_passes(found, x, values, rounded)


def test_gradients_in_mxfp8_have_scales_along_each_contraction():
    found = layer(**MXFP8, dgrad={"grad": "mxfp8"}, wgrad={"grad": "mxfp8"})
    x = tokens()
    grad = torch.randn(M, N, generator=torch.Generator().manual_seed(2)) * torch.logspace(-6, 3, M)[:, None]
    _, grad_x, grad_weight, _ = passes(found, x, grad=grad)
    assert_product(grad_x, mxfp8(grad), found.to_linear().weight.t())
    assert_product(grad_weight, mxfp8(grad.t()), mxfp8(x).t())


def test_an_input_in_mxfp8_is_kept_as_elements_and_scales():
    trained = layer(**MXFP8)
    x = tokens()
    kept = []

    def note(tensor):
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        trained(x)
    found = [(tensor.dtype, tuple(tensor.shape)) for tensor in kept if len(tensor) == M]
    assert found == [(torch.float8_e4m3fn, (M, K)), (torch.uint8, (M, 2))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_packed_and_compiled_layers_have_the_bits_of_mxfp8_inputs(dtype, fresh_compiler):
    trained = layer(dtype, **MXFP8, backend="eager")
    x = tokens(dtype)
    compiled = torch.compile(trained, backend="aot_eager", fullgraph=True)
    assert_same(passes(compiled, x), passes(trained, x))
    packed = MXFP4PackedLinear.from_linear(trained, trained.config.packed(), "up_proj")
    for function in (packed, torch.compile(packed, backend="eager", fullgraph=True)):
        assert torch.equal(function(x), trained(x))


def test_nvfp4_has_one_scale_for_the_weight_and_one_for_each_token():
    found = layer(fprop={"x": "nvfp4", "weight": "nvfp4"})
    x = tokens()
    weight = numerics.fake_quantize_nvfp4(found.weight.detach())
    values = torch.cat([numerics.fake_quantize_nvfp4(token[None]) for token in x])
    check_passes(found, x, values, weight)


@pytest.mark.parametrize("options", [{}, pytest.param(FP8_PRODUCTS, marks=needs_fp8_on_cpu)], ids=["dense", "fp8"])
def test_w4a8g8_folds_the_scales_of_tokens_into_the_gradient_before_that_is_rounded(options):
    found = layer(preset="w4a8g8", **options)
    x = tokens()
    grad = torch.randn(M, N, generator=torch.Generator().manual_seed(2))
    weight = numerics.apply_scheme(found.weight.detach(), found.config.weight_scheme).double()
    scaled = (grad.double() * scales_of(x)).t().float()
    expected = [
        fp8(x).double() @ weight.t() + found.bias.detach(),
        fp8(grad).double() @ weight,
        fp8(scaled).double() @ e4m3(x),
    ]
    ops.reset_matmul_counts()

    results = passes(found, x, grad=grad)[:3]

    for result, exact in zip(results, expected, strict=True):
        torch.testing.assert_close(result.double(), exact, rtol=2e-5, atol=2e-5 * float(exact.abs().max()))
    by = "fp8" if options else "dense"
    assert ops.matmul_counts() == {"fprop": {by: 1}, "dgrad": {by: 1}, "wgrad": {by: 1}, "inexact_elements": 0}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_tokens_of_any_scale_keep_gradients_finite(dtype):
    x = tokens(dtype)
    x[0], x[1], x[2] = 1e30, 1e-30, 0
    found = passes(layer(dtype, preset="w4a8g8"), x)
    assert all(part.isfinite().all() for part in found)
    assert found[2].any()


@pytest.mark.parametrize("options", [{}, FP8_PRODUCTS], ids=["dense", "fp8"])
def test_a_nan_reaches_the_whole_gradient_of_the_weight(options):
    x = tokens()
    x[3, 5] = math.nan
    grad_weight = passes(layer(preset="w4a8g8", **options), x)[2]
    assert grad_weight.isnan().all()


def test_a_nan_reaches_the_gradients_of_its_own_experts_alone():
    plain = make_model("qwen3_moe", layers=1).model.layers[0].mlp.experts
    experts = MXFP4Experts.from_experts(plain, MXFP4RLConfig(preset="w4a8g8"), "experts")
    routing = torch.tensor([[0, 1], *[[2, 3]] * 20]), torch.full((21, 2), 0.5)
    hidden = torch.randn(21, 64, generator=torch.Generator().manual_seed(3))
    hidden[0, 5] = math.nan
    grad_up = passes(experts, hidden, *routing, grad=torch.ones(21, 64))[2]
    assert grad_up[:2].isnan().all()
    assert grad_up[2:].isfinite().all()
    assert grad_up[2:].any()


@pytest.mark.parametrize("rotation", ["deterministic-16", "random-16"])
def test_rotated_inputs_are_rounded_in_the_rotated_basis_and_saved_so(rotation):
    found = layer(fprop={"x": "fp8", "rotation": rotation})
    x = tokens()
    with torch.no_grad():
        expected = found(x)
    assert torch.equal(passes(found, x)[0], expected)


#: What rows, or blocks within rows, of a weight are multiplied by, so that they are further apart than E4M3 with one
#: scale holds.
SPREADS = {
    "none": torch.ones(N, 1),
    "rows": 2.0 ** torch.linspace(-14, 14, N).round()[:, None],
    "blocks": 2.0 ** (torch.arange(K) // 32 * -24.0),
}


def passes_with(backend: str, spread: str, **options) -> list[torch.Tensor]:
    """Count the products of one pass of w4a8g8 with this backend; return the output and the gradients."""
    quantized = layer(preset="w4a8g8", **PLAIN, matmul_backend=backend, **options)
    with torch.no_grad():
        quantized.weight.mul_(SPREADS[spread])
    ops.reset_matmul_counts()
    return passes(quantized, tokens())


@needs_fp8_on_cpu
@pytest.mark.parametrize(("spread", "with_weights"), [("none", "fp8"), ("rows", "fp8"), ("blocks", "dense")])
def test_scales_of_weights_are_one_or_one_a_row_or_the_products_are_dense(spread, with_weights):
    dense = passes_with("dense", spread)
    found = passes_with("fp8", spread)
    counted = {"fprop": {with_weights: 1}, "dgrad": {with_weights: 1}, "wgrad": {"fp8": 1}}
    assert ops.matmul_counts() == {**counted, "inexact_elements": 0}
    for fp8_result, expected in zip(found, dense, strict=True):
        torch.testing.assert_close(fp8_result, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("rounded", [{"rotation": "deterministic-16"}, {"grad": "rceil"}], ids=str)
def test_what_dgrad_does_to_the_gradient_beside_scaling_it_stays_as_it_is(rounded):
    options = {"grad": "fp8"} | rounded
    dense = passes_with("dense", "rows", dgrad=options)
    found = passes_with("fp8", "rows", dgrad=options)
    assert ops.matmul_counts()["dgrad"] == {"dense": 1}
    assert torch.equal(found[1], dense[1])


@needs_fp8_on_cpu
def test_operands_are_rounded_to_e4m3_once_and_a_weight_once_a_step(monkeypatch):
    quantized = layer(preset="w4a8g8", **FP8_PRODUCTS)
    converted = []
    convert = weights.WeightConversion.__call__
    monkeypatch.setattr(
        weights.WeightConversion,
        "__call__",
        lambda self, w, *rest: converted.append(w.shape) or convert(self, w, *rest),
    )
    for module, name in (
        (quantization, "dequantize_e4m3"),
        (quantization, "fake_quantize_e4m3"),
        (products, "to_fp8"),
    ):
        monkeypatch.setattr(module, name, None)

    with cached_weights(quantized):
        first = passes(quantized, tokens())
        second = passes(quantized, tokens())
        with torch.no_grad():
            assert torch.equal(quantized(tokens()), first[0])
    assert converted == [(N, K)]
    assert_same(first, second)

    passes(quantized, tokens())
    assert converted == [(N, K)] * 2  # kept for Dgrad, as there are more tokens than outputs
    passes(quantized, tokens()[: N - 1])
    assert converted == [(N, K)] * 4  # converted again for it


def scaled_grouped_mm(a, b, scale_a, recipe_a, scale_b, recipe_b, *, offs, output_dtype, use_fast_accum):
    """What `torch.nn.functional.scaled_grouped_mm` says that it computes of ``a [S, C]`` and ``b [E, C, D]``, with the
    layouts that CUDA needs; CPUs have none."""
    assert a.is_contiguous()
    assert b.mT.is_contiguous()
    assert a.shape[1] % 16 == b.shape[2] % 16 == 0
    assert recipe_a == recipe_b == F.ScalingType.RowWise
    assert offs.dtype == torch.int32
    assert not use_fast_accum
    assert scale_a.shape == a.shape[:1]
    assert scale_b.shape == (len(b), b.shape[2])
    assert scale_b.is_contiguous()
    out = torch.empty(len(a), b.shape[2], dtype=output_dtype)
    start = 0
    for expert, end in enumerate(offs.tolist()):
        left = a[start:end].double() * scale_a[start:end, None]
        right = b[expert].double() * scale_b[expert]
        out[start:end], start = left @ right, end
    return out


@pytest.fixture
def grouped_products(monkeypatch, request):
    """CPUs have FP8 products of all experts in one launch."""
    monkeypatch.setattr(F, "scaled_grouped_mm", scaled_grouped_mm)
    monkeypatch.setattr(choice, "GROUPED_FP8_HARDWARE", ("cpu",))
    select_matmul.cache_clear()
    request.addfinalizer(select_matmul.cache_clear)


def check_experts(weight: torch.Tensor, config: MXFP4RLConfig) -> dict:
    """Experts compute the same on dense and on FP8 products; return the counts of the latter."""
    generator = torch.Generator().manual_seed(3)
    x, grad, bias = (torch.randn(*size, generator=generator) for size in ((M, 64), (M, 48), (3, 48)))
    found = {}
    for backend in ("dense", "fp8"):
        ops.reset_matmul_counts()
        spec = GemmSpec(config.gemms(), matmul_backend=backend)
        leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
        state = GemmState(spec, [LayerRng(0, f"experts.{e}") for e in range(3)])
        y = quantized_linear(*leaves, state, Groups([M - 16, 0, 16]))
        y.backward(grad)
        found[backend] = [y.detach(), *(t.grad for t in leaves)]
    for fp8_result, dense in zip(found["fp8"], found["dense"], strict=True):
        torch.testing.assert_close(fp8_result, dense, rtol=1e-5, atol=1e-5 * float(dense.abs().max()))
    return ops.matmul_counts()


def weights_of_experts() -> torch.Tensor:
    return torch.randn(3, 48, 64, generator=torch.Generator().manual_seed(4))


@needs_fp8_on_cpu
@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize("grouped", [True, False])
def test_experts_are_multiplied_at_once_where_the_device_has_that_product(
    grouped, spread, monkeypatch, grouped_products
):
    if not grouped:
        monkeypatch.setattr(choice, "GROUPED_FP8_HARDWARE", ())
    rows = 2.0 ** torch.linspace(-14, 14, 48).round()[:, None] if spread else 1.0
    counts = check_experts(weights_of_experts() * rows, MXFP4RLConfig(preset="w4a8g8", **PLAIN))
    by = {True: "fp8", False: "dense"}[grouped]
    counted = {"fprop": {by: 1}, "dgrad": {by: 1 if grouped else 2}, "wgrad": {"fp8": 2}}  # of each expert with rows
    assert counts == {**counted, "inexact_elements": 0}


@needs_fp8_on_cpu
@pytest.mark.parametrize("random", [("dgrad",), ("dgrad", "wgrad")], ids=str)
def test_each_expert_rounds_its_gradients_at_random_on_fp8_products_too(random, grouped_products):
    config = MXFP4RLConfig(preset="w4a8", **dict.fromkeys(random, {"grad": "rceil+stochastic"}), **PLAIN)
    assert check_experts(weights_of_experts(), config)["dgrad"] == {"fp8": 1}


@needs_fp8_on_cpu
@pytest.mark.parametrize("preset", ["w4a8g8", "w4a4"])
def test_packed_layers_multiply_on_fp8_cores_as_trained_ones_do(preset):
    """The same elements in the same product, eager and compiled; adapters train through it."""
    trained = layer(preset=preset, backend="eager", **FP8_PRODUCTS)
    packed = MXFP4PackedLinear.from_linear(trained, trained.config.packed(), "up_proj")
    assert packed.config.preset == preset.removesuffix("g8")
    x = tokens().requires_grad_()
    ops.reset_matmul_counts()
    compiled = torch.compile(packed, backend="eager", fullgraph=True)
    for found in (packed(x), compiled(x)):
        assert torch.equal(found, trained(x))
    assert ops.matmul_counts()["fprop"] == {"fp8": 4}
    (grad,) = torch.autograd.grad(packed(x).sum(), x)
    assert_product(grad, torch.ones(M, N), packed.dequantized_weight().t())
