"""Products on 4-bit codes on the CPU, beside the float64 product of the dequantized operands."""

import itertools
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import hf_mxfp4
from hf_mxfp4.numerics import FULL, GemmScheme, LinearScheme, MXFP4Tensor, QuantScheme
from hf_mxfp4.ops import GemmSpec, PackedState, packed_linear, packed_tensor, quantize_weight
from hf_mxfp4.ops import cpu as packed_product
from hf_mxfp4.ops.cpu import product, unsupported_reason


pytestmark = pytest.mark.skipif(
    unsupported_reason(torch.float32, QuantScheme()) is not None, reason="no compiler for the CPU's functions"
)
SCHEMES = {
    "plain": QuantScheme("even"),
    "static": QuantScheme("rceil", 128, "static"),
    "blockwise": QuantScheme("even", 128, "block_mantissas"),
    "blockwise_fp8": QuantScheme("even", 128, "block_mantissas_fp8"),
    "64": QuantScheme("rceil", 64, "static"),
    "row": QuantScheme("rceil", "row", "static"),
    "fallback": QuantScheme("rceil", None, "static", 0.5),
    "fallback of macro blocks": QuantScheme("rceil", 128, "dynamic", 0.3),
}
DEFAULT = SCHEMES["blockwise_fp8"]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PARTS = ("codes", "scale", "macro", "residual_codes", "residual_scale")
#: Half the distance of neighbouring numbers, as a part of them.
ROUNDING = {torch.float32: 2**-24, torch.bfloat16: 2**-8, torch.float16: 2**-11}


@pytest.fixture(autouse=True)
def codes_of_many_rows(monkeypatch):
    """Where panels are faster, too, products of few rows are computed on the codes."""
    monkeypatch.setattr(packed_product, "most_rows", lambda: 32)


def packed(weight: torch.Tensor, scheme: QuantScheme = DEFAULT) -> MXFP4Tensor:
    return packed_tensor(quantize_weight(weight, scheme), weight.shape[-1], scheme, weight.dtype)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check(out: torch.Tensor, x: torch.Tensor, weight: MXFP4Tensor, bias: torch.Tensor | None = None) -> None:
    """Check that a product is within the rounding of float32 sums, and one of the result."""
    values = MXFP4Tensor.dequantize(weight, torch.float32).double()
    expected = x.double() @ values.t()
    terms = x.double().abs() @ values.abs().t()
    if bias is not None:
        expected = expected + bias.double()
        terms = terms + bias.double().abs()
    bound = expected.abs() * ROUNDING[out.dtype] + terms * 2**-21 + 1e-38
    assert out.dtype == x.dtype
    assert ((out.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_schemes_shapes_and_rows(scheme, dtype):
    for n_rows, (out_features, in_features) in itertools.product(
        (1, 2, 3, 5, 11), ((1, 1), (7, 33), (16, 64), (18, 576), (5, 1000), (4, 2100))
    ):
        x = random(n_rows, in_features, dtype=dtype)
        weight = packed(random(out_features, in_features), scheme)
        bias = random(out_features, dtype=dtype, seed=1)
        check(product(x, weight, bias), x, weight, bias)
        check(product(x, weight), x, weight)


def test_literal_codes_and_bytes():
    codes = torch.tensor([[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE] + [0] * 8], dtype=torch.uint8)
    scale = torch.tensor([[129]], dtype=torch.uint8)
    weight = MXFP4Tensor(codes, scale, None, None, None, 32, 1, QuantScheme(), torch.float32)
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    for dtype in DTYPES:
        found = product(torch.eye(32, dtype=dtype), weight)[:, 0]
        assert torch.equal(found, F.pad(4 * grid, (0, 16)).to(dtype)), dtype


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", ("plain", "static", "blockwise", "fallback"))
def test_all_scale_bytes(scheme, dtype):
    """A row of the weight for each byte below those whose values may leave float32, all others of it in the middle, and
    one of NaN; small inputs, for sums in range."""
    scheme = SCHEMES[scheme]
    weight = packed(random(252, 256), scheme)
    weight.scale[:, 3] = torch.tensor([*range(251), 255], dtype=torch.uint8)
    if weight.residual_scale is not None:
        weight.residual_scale[:251, 5] = torch.arange(251, dtype=torch.uint8).flip(0)
    values = MXFP4Tensor.dequantize(weight, torch.float32).double()
    for n_rows in (1, 4, 8):
        x = random(n_rows, 256, dtype=dtype) * (2**-10 if dtype == torch.float16 else 2**-14)
        expected = x.double() @ values.t()
        found = product(x, weight).double()
        largest = torch.finfo(dtype).max
        assert torch.equal(found.isnan(), expected.isnan())
        kept = expected.isfinite() & (expected.abs() < largest)
        error = (found - expected).abs()
        terms = x.double().abs() @ values.abs().t()
        bound = expected.abs() * ROUNDING[dtype] + terms * 2**-21 + 2**-24 * (largest < 1e5)
        assert (error <= bound)[kept].all()
        assert kept.float().mean() > (0.1 if dtype == torch.float16 else 0.9)
        assert (found.abs() >= largest)[~kept & ~expected.isnan()].all()


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("bad", (float("nan"), float("inf"), float("-inf")))
def test_inputs_that_are_not_finite(dtype, bad):
    weight = packed(random(20, 96))
    x = random(5, 96, dtype=dtype)
    x[2, 40] = bad
    found = product(x, weight)
    others = [0, 1, 3, 4]
    check(found[others], x[others], weight)
    row = (x.double() @ weight.dequantize(torch.float32).double().t())[2].to(dtype)
    torch.testing.assert_close(found[2], row, rtol=0, atol=0, equal_nan=True)


def test_more_rows_than_the_codes_are_for():
    weight = packed(random(24, 200))
    bias = random(24)
    x = random(packed_product.most_rows() + 1, 200)
    check(product(x, weight, bias), x, weight, bias)


def test_several_panels(monkeypatch):
    monkeypatch.setattr(packed_product, "_PANEL", 16 * 64)
    monkeypatch.setattr(packed_product, "_PANEL_ROWS", (16, 16))
    monkeypatch.setattr(packed_product, "most_rows", lambda: 0)
    weight = packed(random(50, 64))
    bias = random(50)
    x = random(2, 3, 64)
    torch.testing.assert_close(product(x, weight, bias), F.linear(x, weight.dequantize(torch.float32), bias))


def test_threads_do_not_change_bits(threads, monkeypatch):
    monkeypatch.setattr(packed_product, "_WORTH_A_THREAD", 1)
    x = random(5, 320, dtype=torch.bfloat16)
    weight = packed(random(200, 320))
    threads(1)
    expected = product(x, weight)
    for count in (2, 3):
        threads(count)
        assert torch.equal(product(x, weight), expected)


def test_strides_and_leading_axes():
    weight = packed(random(12, 64))
    bias = random(24)[::2]
    x = random(64, 6).t().reshape(2, 3, 64)
    found = product(x, weight, bias)
    assert torch.equal(found, product(x.contiguous().view(6, 64), weight, bias).view(2, 3, 12))


@pytest.mark.parametrize("shape", [(0, 64), (64,)], ids=str)
def test_no_rows_and_no_leading_axis(shape):
    assert product(random(*shape), packed(random(12, 64))).shape == (*shape[:-1], 12)


def test_inputs_and_biases_that_do_not_fit_are_refused():
    weight = packed(random(12, 64))
    x = random(3, 64)
    with pytest.raises(ValueError, match="63 columns meets a weight of 64"):
        product(x[:, 1:], weight)
    with pytest.raises(ValueError, match=r"bias is torch.float32 \[11\]"):
        product(x, weight, random(11))
    with pytest.raises(ValueError, match="bias is torch.bfloat16"):
        product(x, weight, random(12, dtype=torch.bfloat16))


def test_tensors_on_other_devices_are_refused():
    weight = packed(random(12, 64))
    x = random(3, 64)
    with pytest.raises(RuntimeError, match="bias is on meta"):
        product(x, weight, torch.empty(12, device="meta"))
    with pytest.raises(RuntimeError, match="weight is on meta"):
        product(x, replace(weight, macro=weight.macro.to("meta")))


def test_a_bias_whose_memory_was_freed_is_refused():
    bias = random(12)
    bias.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"memory of a tensor \[12\] was freed"):
        product(random(3, 64), packed(random(12, 64)), bias)


def state_of(scheme: QuantScheme) -> PackedState:
    return PackedState(GemmSpec(LinearScheme(GemmScheme(FULL, scheme))))


@pytest.mark.parametrize("rows", (3, 40), ids=["on codes", "panels"])
def test_shapes_are_checked_before_addresses_are_read(rows):
    scheme = SCHEMES["fallback of macro blocks"]
    x = random(rows, 64)
    weight = packed(random(12, 64), scheme)
    state = state_of(scheme)

    def call(x=x, bias=None, **changed):
        parts = tuple(changed.get(name, getattr(weight, name)) for name in PARTS)
        return packed_linear(x, parts, bias, state)

    assert call(bias=random(12)).shape == (rows, 12)
    for changed in (
        {"x": random(rows, 6400)},
        {"bias": random(11)},
        {"bias": random(1)},
        *({name: getattr(weight, name)[:, :0]} for name in PARTS),
        *({name: getattr(weight, name)[:1]} for name in PARTS[1:]),
        *({name: getattr(weight, name).float()} for name in PARTS),
        *({name: None} for name in PARTS[2:]),
    ):
        with pytest.raises(ValueError, match="expected"):
            call(**changed)


def test_tensors_of_a_layer_are_on_one_device():
    weight = packed(random(12, 64))
    parts = weight.codes, weight.scale, weight.macro.to("meta"), None, None
    with pytest.raises(RuntimeError, match="is on meta"):
        packed_linear(random(3, 64), parts, None, state_of(DEFAULT))


def test_a_layer_whose_tensors_are_not_contiguous():
    weight = packed(random(12, 64))
    x = random(3, 64)
    bias = random(24)[::2]
    codes = weight.codes.t().contiguous().t()
    out = packed_linear(x, (codes, *weight.parts[1:]), bias, state_of(DEFAULT))
    assert torch.equal(out, product(x, weight, bias))


@pytest.mark.parametrize("ends", ([2, 9, 5], [-1, 3, 5], [1, 3, 50], [5], [1, 2, 3, 5]))
def test_ends_of_experts_that_are_no_rows_are_refused(ends):
    weight = hf_mxfp4.quantize(random(3, 12, 64), **vars(DEFAULT))
    with pytest.raises(ValueError, match="of experts end at|need torch.uint8"):
        product(random(5, 64), weight, None, torch.tensor(ends, dtype=torch.int32))


def test_ends_of_experts_of_another_dtype_are_refused():
    weight = hf_mxfp4.quantize(random(3, 12, 64), **vars(DEFAULT))
    with pytest.raises(ValueError, match="of experts end at torch.int64"):
        product(random(5, 64), weight, None, torch.tensor([1, 2, 5]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", ("plain", "blockwise_fp8", "fallback of macro blocks"))
def test_experts(scheme, dtype):
    scheme = SCHEMES[scheme]
    counts = (2, 0, 1, 9)
    weights = [packed(random(21, 96, seed=e), scheme) for e in range(4)]
    stacked = {name: [getattr(w, name) for w in weights] for name in PARTS}
    parts = {name: None if each[0] is None else torch.stack(each) for name, each in stacked.items()}
    together = MXFP4Tensor(**parts, length=96, axis=2, scheme=scheme, dtype=dtype)
    x = random(12, 96, dtype=dtype)
    bias = random(4, 21, dtype=dtype, seed=7)
    ends = torch.tensor(counts).cumsum(0, dtype=torch.int32)
    found = product(x, together, bias, ends)
    start = 0
    for expert, count in enumerate(counts):
        own = product(x[start : start + count], weights[expert], bias[expert])
        assert torch.equal(found[start : start + count], own)
        start += count


@pytest.mark.large
def test_memory_and_undefined_behaviour(tmp_path):
    """All ways of the product in a library that stops at the first wrong access or undefined operation."""
    work = """
import itertools, torch
from test_cpu_products import SCHEMES, packed, product, random
for dtype, scheme, rows, (n, k) in itertools.product(
    (torch.bfloat16, torch.float32), SCHEMES.values(), (1, 2, 3, 5, 17, 70), ((1, 1), (7, 33), (17, 100), (3, 600))
):
    weight, x = packed(random(n, k), scheme), random(rows, k, dtype=dtype)
    product(x, weight, random(n, dtype=dtype))
    weight.scale[0, 0] = 255
    x[0, 0] = float("nan")
    product(x, weight)
print("clean")
"""
    asan = subprocess.run(["gcc", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True).stdout
    environment = {
        **os.environ,
        "HF_MXFP4_CPU": "sanitized",
        "HF_MXFP4_CACHE": str(tmp_path),
        "LD_PRELOAD": asan.strip(),
        "ASAN_OPTIONS": "detect_leaks=0",
        "PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *sys.path]),
    }
    ran = subprocess.run([sys.executable, "-c", work], env=environment, capture_output=True, text=True)
    assert ran.stdout.endswith("clean\n"), ran.stderr[-2000:]
