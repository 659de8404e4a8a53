# SPDX-License-Identifier: Apache-2.0
"""Products of codes on FP4 tensor cores, and of MXFP8 inputs with them: operands against torchao, the NVFP4 export and
literal values, and layers with a stand-in for `scaled_mm` that does what PyTorch documents, as on hardware that is not
here."""

import copy
import importlib
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from same_bits import assert_same
from torch import nn
from torch.nn.functional import ScalingType, SwizzleType
from torchao.prototype.mx_formats.utils import from_blocked, to_blocked

from hf_mxfp4 import MXFP4Linear, MXFP4PackedLinear, MXFP4RLConfig, cached_weights, numerics, ops, quantize
from hf_mxfp4.checkpoint.formats import FORMATS
from hf_mxfp4.ops import compiled_linear, matmul_counts, quantized_linear, select_matmul, to_fp4


choice, fp4 = (importlib.import_module(f"hf_mxfp4.ops.{name}") for name in ("choice", "fp4"))
GRID = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
#: The scheme of w4a4, whose codes become NVFP4, and one of codes in MXFP4.
MANTISSAS = {"scale_rule": "even", "macro_block": 128, "macro_search": "block_mantissas"}
PLAIN = {"scale_rule": "rceil", "macro_block": None}
#: Options of a layer whose product is one of MXFP8 and codes.
MXFP8 = {"preset": "w4a8", "fprop": {"x": "mxfp8"}}
#: Tokens (more than are decoded), outputs and inputs.
M = 300
N = 48
K = 160


def stand_in(a, b, scale_a, recipe_a, scale_b, recipe_b, swizzle_a, swizzle_b, *, output_dtype):
    """What `torch.nn.functional.scaled_mm` says it does, and refuses: ``a [M, K/2]``, ``b [K/2, N]`` column-major, of
    MXFP8 with K for K/2."""
    k = a.shape[1] * (1 if a.dtype == torch.float8_e4m3fn else 2)
    n = b.shape[1]
    assert a.is_contiguous()
    assert b.t().is_contiguous()
    assert k % 32 == 0
    assert n % 16 == 0
    assert output_dtype == torch.bfloat16
    assert (recipe_a, swizzle_a) == (recipe_b, swizzle_b)

    def values(elements, scale):
        assert elements.dtype == a.dtype
        size = 32
        dtype = torch.float8_e8m0fnu
        factor = 1.0
        if isinstance(scale, list):
            assert recipe_a == [ScalingType.BlockWise1x16, ScalingType.TensorWise]
            assert swizzle_a == [SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE]
            size = 16
            dtype = torch.float8_e4m3fn
            (scale, factor) = scale
            assert factor.dtype == torch.float32
            assert factor.numel() == 1
        else:
            assert (recipe_a, swizzle_a) == (ScalingType.BlockWise1x32, SwizzleType.SWIZZLE_32_4_4)
        rows = elements.shape[0]
        blocks = k // size
        assert scale.dtype == dtype
        assert scale.numel() == -(-rows // 128) * 128 * (-(-blocks // 4) * 4)
        scale = from_blocked(scale.view(torch.uint8), rows, blocks).view(dtype).double()
        if elements.dtype == torch.float8_e4m3fn:
            return elements.double() * scale.repeat_interleave(size, dim=1)
        codes = elements.view(torch.uint8)
        codes = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1).long()
        return GRID[codes & 7] * (1 - 2 * (codes >> 3)) * scale.repeat_interleave(size, dim=1) * factor

    return (values(a, scale_a) @ values(b.t(), scale_b).t()).to(output_dtype)


@pytest.fixture
def blackwell(monkeypatch):
    """A device with FP4 products, but for its arithmetic the CPU; the fixture sets another architecture."""
    ops.reset_matmul_counts()
    fp4.problem.cache_clear()
    monkeypatch.setattr(F, "scaled_mm", stand_in)
    yield lambda name: monkeypatch.setattr(choice, "hardware_of", lambda device: name)
    fp4.problem.cache_clear()


def matrix(rows: int, columns: int, seed: int = 0, spread: int = 4) -> torch.Tensor:
    """Normal values whose blocks have scales of ``spread`` binades."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns // 32, 32, generator=generator)
    return (x * torch.randint(spread, (rows, columns // 32, 1), generator=generator).exp2()).flatten(1).bfloat16()


# ---- operands -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 1), (128, 4), (130, 7), (300, 20)], ids=str)
def test_swizzled_scales_are_those_of_torchao(shape):
    scale = torch.randint(256, shape, generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    assert torch.equal(fp4.swizzle_scales(scale), to_blocked(scale))


def test_scales_of_literal_blocks():
    """Of 2^e (1 + m/4), e from the top on: 448 is the largest E4M3 number, 2^-9 the smallest, 2^-6 the last normal."""
    exponents = torch.tensor([[0, 0, 0, -13, -14, -14, -15, -15, -17, -127, 128]])
    mantissas = torch.tensor([[3, 2, 0, 3, 3, 0, 2, 0, 0, 0, 1]])
    byte = (exponents + 127).to(torch.uint8)
    fields = F.pad(mantissas, (0, 1)).view(1, 3, 4)
    macro = (fields << torch.tensor([0, 2, 4, 6])).sum(-1).to(torch.uint8)
    packed = quantize(torch.ones(1, 11 * 32), **MANTISSAS)
    made = to_fp4(replace(packed, scale=byte, macro=macro), "nvfp4")
    scale = from_blocked(made.scale.view(torch.uint8), 1, 22).view(torch.float8_e4m3fn).float()[0, ::2]
    assert made.factor.tolist() == [[2.0**-8]]
    assert made.misfits == 0
    assert scale[:-1].tolist() == [448, 384, 256, 0.0546875, 0.02734375, 2**-6, 0.01171875, 2**-7, 2**-9, 0]
    assert scale[-1].isnan()


@pytest.mark.parametrize(
    ("exponent", "mantissa", "fits"),
    [(-17, 0, True), (-17, 1, False), (-16, 2, True), (-16, 3, False), (-15, 3, True), (-18, 0, False)],
)
def test_which_scales_fit(exponent, mantissa, fits):
    packed = quantize(torch.ones(2, 64), **MANTISSAS)
    packed.scale[:] = torch.tensor([[127, 127], [127, 127 + exponent]])
    packed.macro[:] = torch.tensor([[0], [mantissa << 2]])
    assert [to_fp4(packed, "nvfp4", by_rows).misfits.item() for by_rows in (False, True)] == [not fits, not fits]
    packed.scale[1] = 127 + exponent  # the second row alone is small
    made = to_fp4(packed, "nvfp4", by_rows=True)
    assert made.misfits == 0
    assert made.factor.tolist() == [[2.0**-8], [2.0 ** (exponent - 8)]]


def test_factors_and_their_reciprocals_are_normal():
    packed = quantize(torch.ones(2, 64), **MANTISSAS)
    packed.scale[:] = torch.tensor([[254, 254], [3, 3]])
    assert to_fp4(packed, "nvfp4", by_rows=True).factor.tolist() == [[2.0**119], [2.0**-126]]


@pytest.mark.parametrize("options", [MANTISSAS, PLAIN], ids=["mantissas", "plain"])
def test_an_nvfp4_operand_is_what_the_export_writes(options):
    packed = quantize(matrix(130, K), **options)
    nvfp4 = FORMATS["nvfp4"]
    parts = {"weight": packed.codes, "weight_scale": packed.scale, "weight_macro": packed.macro}
    parts = {name: part for name, part in parts.items() if part is not None}
    expected = nvfp4.encode(parts, nvfp4.top_exponent(parts))
    found = to_fp4(packed, "nvfp4")
    assert torch.equal(found.elements.view(torch.uint8), expected["weight"])
    assert torch.equal(found.scale.view(torch.uint8), to_blocked(expected["weight_scale"].view(torch.uint8)))
    assert 1 / found.factor.item() == expected["weight_global_scale"].item()


@pytest.mark.parametrize(("recipe", "by_rows"), [("mxfp4", False), ("nvfp4", False), ("nvfp4", True)])
def test_a_product_of_codes_is_that_of_the_values(blackwell, recipe, by_rows):
    options = PLAIN if recipe == "mxfp4" else MANTISSAS
    a = quantize(matrix(M, K), **options)
    b = quantize(matrix(N, K, seed=1), **options)
    found = fp4.fp4_product(to_fp4(a, recipe, by_rows), to_fp4(b, recipe))
    expected = a.dequantize(torch.float64) @ b.dequantize(torch.float64).t()
    assert torch.equal(found, expected.bfloat16())
    assert fp4.problem(recipe, torch.device("cpu")) is None


def test_torch_accepts_the_operands():
    """By the function that gives the shape of a result, which needs no GPU. That of torch 2.13 counts two codes of the
    other recipe as one, so that it asks for half of the scales."""
    a, b = (quantize(matrix(rows, K), **MANTISSAS).map(lambda part: part.to("meta")) for rows in (M, N))
    assert fp4.fp4_product(to_fp4(a, "nvfp4"), to_fp4(b, "nvfp4")).shape == (M, N)
    elements, byte = (part.to("meta") for part in numerics.quantize_mxfp8(matrix(M, K)))
    assert fp4.fp4_product(to_fp4((elements, byte), "mxfp8"), to_fp4(b, "mxfp8")).shape == (M, N)


@pytest.mark.parametrize("options", [PLAIN, {**MANTISSAS, "macro_search": "block_mantissas_fp8"}], ids=["plain", "3"])
def test_a_weight_in_mxfp8_has_the_values_of_its_codes(blackwell, options):
    weight = quantize(matrix(N, K, seed=1), **options)
    x = numerics.quantize_mxfp8(matrix(M, K))
    found = fp4.fp4_product(to_fp4(x, "mxfp8"), to_fp4(weight, "mxfp8"))
    expected = numerics.dequantize_mxfp8(*x, torch.float64) @ weight.dequantize(torch.float64).t()
    assert torch.equal(found, expected.bfloat16())
    assert fp4.problem("mxfp8", torch.device("cpu")) is None


# ---- layers ---------------------------------------------------------------------------------------------------------


def layer(n=N, k=K, dtype=torch.bfloat16, **options) -> MXFP4Linear:
    torch.manual_seed(0)
    config = MXFP4RLConfig(**{"preset": "w4a4", **options})
    return MXFP4Linear.from_linear(nn.Linear(k, n, dtype=dtype), config)


def passes(layer: MXFP4Linear, x: torch.Tensor, product=quantized_linear) -> list[torch.Tensor]:
    """The output and the gradients of a layer, of its function or of its operator."""
    x = x.clone().requires_grad_()
    y = product(x, layer.weight, layer.bias, layer.state)
    grad = matrix(M, N + 16, seed=2)[:, :N].view(y.shape)
    return [y.detach(), *torch.autograd.grad(y, (x, layer.weight, layer.bias), grad)]


def assert_as_dense(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Both are bfloat16, and their sums were rounded in another order."""
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("product", [quantized_linear, compiled_linear], ids=["eager", "operator"])
@pytest.mark.parametrize(
    "options", [{}, {"macro_search": "block_mantissas_fp8"}, PLAIN], ids=["four levels", "three levels", "plain"]
)
def test_a_layer_computes_as_with_dense_products(blackwell, options, product):
    x = matrix(M, K).view(2, M // 2, K)
    expected = passes(layer(matmul_backend="dense", **options), x)
    blackwell("sm_100")
    ops.reset_matmul_counts()

    found = passes(layer(**options), x, product)

    assert matmul_counts()["fprop"] == {"fp4": 1}
    assert_as_dense(found[0], expected[0])
    assert_same(found[1:], expected[1:])


@pytest.mark.parametrize("product", [quantized_linear, compiled_linear], ids=["eager", "operator"])
@pytest.mark.parametrize("options", [{}, {"macro_block": None}], ids=["three levels", "plain"])
def test_layers_multiply_mxfp8_inputs_with_codes(blackwell, options, product):
    x = matrix(M, K).view(2, M // 2, K)
    expected = passes(layer(matmul_backend="dense", **MXFP8, **options), x)
    blackwell("sm_100")
    ops.reset_matmul_counts()

    found = passes(layer(**MXFP8, **options), x, product)

    assert matmul_counts()["fprop"] == {"mxfp8": 1}
    assert_as_dense(found[0], expected[0])
    assert_same(found[1:], expected[1:])


@pytest.mark.parametrize(("options", "name"), [({}, "fp4"), (PLAIN, "fp4"), (MXFP8, "mxfp8")], ids=str)
def test_packed_layers_multiply_their_codes(blackwell, options, name):
    x = matrix(M, K)
    trained = layer(**options)
    packed = MXFP4PackedLinear.from_linear(trained, trained.config.packed(), "layer")
    expected = copy.deepcopy(packed)(x)
    blackwell("sm_100")
    ops.reset_matmul_counts()

    found = packed(x)

    assert matmul_counts()["fprop"] == {name: 1}
    assert_as_dense(found, expected)


def test_an_mxfp8_product_of_few_rows_is_dense(blackwell):
    blackwell("sm_100")
    layer(**MXFP8)(matrix(256, K))
    assert matmul_counts()["fprop"] == {"dense": 1}


def test_mxfp8_products_that_are_wrong_are_dense(blackwell, monkeypatch):
    blackwell("sm_100")
    monkeypatch.setattr(F, "scaled_mm", lambda *arguments, **options: stand_in(*arguments, **options) * 2)
    layer(**MXFP8)(matrix(M, K))
    assert matmul_counts()["fprop"] == {"dense": 1}


def test_tokens_of_other_sizes_have_factors_of_their_own(blackwell):
    blackwell("sm_100")
    x = matrix(M, K)
    x[1:] *= 2.0**-30
    y = layer()(x)
    assert_as_dense(y, layer(matmul_backend="dense")(x))
    assert matmul_counts()["fprop"] == {"fp4": 1}


def test_tokens_with_blocks_out_of_range_have_a_dense_product(blackwell):
    blackwell("sm_100")
    x = matrix(M, K) * 2.0**-30
    x[5, :32] *= 2.0**30
    assert torch.equal(layer()(x), layer(matmul_backend="dense")(x))
    assert matmul_counts()["fprop"] == {"dense": 1}


@pytest.mark.parametrize("options", [{}, PLAIN], ids=["nvfp4", "mxfp4"])
def test_nan_and_infinite_inputs_are_nan_rows(blackwell, options):
    blackwell("sm_100")
    x = matrix(M, K)
    x[3, 5] = torch.nan
    x[290, 0] = torch.inf
    x[7] = 0
    y = layer(**options)(x)
    assert matmul_counts()["fprop"] == {"fp4": 1}
    assert y.isnan().any(1).nonzero().flatten().tolist() == [3, 290]
    assert y[[3, 290]].isnan().all()
    assert torch.equal(y[7], layer().bias)


def test_a_weight_is_converted_once_in_a_scope_and_products_without_gradients_are_the_same(blackwell):
    blackwell("sm_100")
    trained = layer()
    x = matrix(M, K)
    y = trained(x).detach()
    before = ops.weight_quantizations()["fprop"]
    with cached_weights(trained), torch.no_grad():
        for _ in range(2):
            assert torch.equal(trained(x), y)
    assert ops.weight_quantizations()["fprop"] == before + 1
    assert matmul_counts()["fprop"] == {"fp4": 3}


@pytest.mark.parametrize(
    ("options", "rows", "reason"),
    [
        ({}, 256, "256 rows are too few"),
        ({"n": 32, "k": 48}, M, "a weight of 32 x 48"),
        ({"n": 24, "k": 64}, M, "a weight of 24 x 64"),
        ({"dtype": torch.float32}, M, "no output in torch.float32"),
    ],
    ids=str,
)
def test_why_a_product_is_not_in_fp4(blackwell, options, rows, reason):
    blackwell("sm_100")
    asked = layer(matmul_backend="fp4", **options)
    with pytest.warns(UserWarning, match=reason):
        asked(torch.ones(rows, asked.in_features, dtype=asked.weight.dtype))
    assert "fp4" not in matmul_counts()["fprop"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"preset": "w4a16"}, "forward operands in 4 bits"),
        ({"outlier_fallback": 1.0}, "no residuals and macro factors"),
        ({"macro_search": "static"}, "no residuals and macro factors"),
        ({"fprop": {"rotation": "deterministic-32"}}, "without rotation"),
    ],
    ids=str,
)
def test_a_scheme_without_fp4_products_refuses_the_backend(options, reason):
    with pytest.raises(ValueError, match=f"matmul_backend='fp4' has no effect: .*{reason}"):
        layer(matmul_backend="fp4", **options)
    assert select_matmul("fprop", layer(**options).config.gemms(), "sm_100").name != "fp4"


def raises(*arguments, **options):
    raise NotImplementedError("MXFP4 scaling supported on ROCM and CUDA+FBGEMM_GENAI only")


def doubles(*arguments, **options):
    return stand_in(*arguments, **options) * 2


@pytest.mark.parametrize(("broken", "problem"), [(raises, "FBGEMM_GENAI"), (doubles, "are wrong")])
def test_a_recipe_that_fails_its_check_is_replaced_by_the_other(blackwell, monkeypatch, broken, problem):
    def one_recipe(a, b, scale_a, *others, **options):
        is_nvfp4 = isinstance(scale_a, list)
        product = stand_in if is_nvfp4 else broken
        return product(a, b, scale_a, *others, **options)

    blackwell("sm_100")
    monkeypatch.setattr(F, "scaled_mm", one_recipe)
    assert problem in fp4.problem("mxfp4", torch.device("cpu"))
    layer(**PLAIN)(matrix(M, K))
    assert matmul_counts()["fprop"] == {"fp4": 1}


def test_products_are_dense_and_say_so_where_every_recipe_fails_its_check(blackwell, monkeypatch):
    blackwell("sm_100")
    monkeypatch.setattr(F, "scaled_mm", doubles)
    with pytest.warns(UserWarning, match="nvfp4 products are wrong"):
        layer(matmul_backend="fp4")(matrix(M, K))
    assert matmul_counts()["fprop"] == {"dense": 1}


@pytest.mark.parametrize(
    ("hardware", "requested", "name"),
    [
        ("sm_100", "auto", "fp4"),
        ("sm_120", "fp4", "fp4"),
        ("sm_100", "fp8", "fp8"),
        ("sm_100", "dense", "dense"),
        ("sm_90", "fp4", "fp8"),
        ("sm_80", "fp4", "dense"),
        ("cpu", "fp4", "dense"),
    ],
)
def test_what_multiplies_where(hardware, requested, name):
    scheme = layer(macro_search="block_mantissas_fp8").config.gemms()
    assert select_matmul("fprop", scheme, hardware, requested=requested).name == name
    assert select_matmul("dgrad", scheme, hardware, requested=requested).name == "dense"


@pytest.mark.parametrize(
    ("hardware", "requested", "name"),
    [("sm_100", "auto", "mxfp8"), ("sm_100", "dense", "dense"), ("sm_90", "auto", "dense"), ("cpu", "auto", "dense")],
)
def test_where_mxfp8_inputs_are_multiplied_with_codes(hardware, requested, name):
    assert select_matmul("fprop", layer(**MXFP8).config.gemms(), hardware, requested=requested).name == name
