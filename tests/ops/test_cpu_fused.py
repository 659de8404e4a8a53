# SPDX-License-Identifier: Apache-2.0
"""The fused C++ functions: the bits of the eager reference, over schemes, dtypes, shapes and special values."""

import itertools
import os
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pairwise import pairwise_params
from tables import RULES

import hf_mxfp4
from hf_mxfp4 import numerics
from hf_mxfp4.backends import backend_for, cpu
from hf_mxfp4.backends.cpu import library
from hf_mxfp4.backends.cpu.threads import in_threads, openmp_parallel
from hf_mxfp4.numerics import MXFP4Tensor, QuantScheme


pytestmark = pytest.mark.skipif(library.load()[0] is None, reason=f"no fused CPU functions: {library.load()[1]}")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MACROS = (
    (None, "static"),
    (32, "static"),
    (128, "static"),
    (256, "dynamic"),
    (128, "dynamic"),
    (128, "blockwise"),
    ("row", "static"),
    ("row", "dynamic"),
)
ALPHAS = (None, 0.3, 1.0)
SCHEMES = [
    QuantScheme(rule, macro, search, alpha) for rule, (macro, search), alpha in itertools.product(RULES, MACROS, ALPHAS)
]
every_option = pytest.mark.parametrize(
    ("rule", "macro", "alpha", "dtype"), pairwise_params(RULES, MACROS, ALPHAS, DTYPES)
)


def special_values(dtype: torch.dtype, columns: int) -> torch.Tensor:
    """Rows over the whole exponent range of the dtype, and rows that hold what needs care."""
    generator = torch.Generator().manual_seed(columns)
    info = torch.finfo(dtype)
    low, high = (-24, 16) if dtype == torch.float16 else (-149, 128)
    exponents = torch.randint(low, high, (40, 1), generator=generator).double()
    x = torch.randn(40, columns, generator=generator).double() * torch.exp2(exponents)
    x = x.clamp(-info.max, info.max).to(dtype)
    x[0, 0] = float("nan")
    x[1, -1] = float("-inf")
    x[2] = 0.0
    x[3] = info.max
    x[4, 0] = -info.max
    x[5] = info.smallest_normal
    x[6, ::2] = -0.0
    x[7] = info.smallest_normal / 8  # subnormal
    return x


def assert_same_bits(out: torch.Tensor, expected: torch.Tensor):
    assert out.dtype == expected.dtype and out.shape == expected.shape
    integers = torch.int32 if out.dtype == torch.float32 else torch.int16
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(out.nan_to_num(1.0).view(integers), expected.nan_to_num(1.0).view(integers))


def assert_same_parts(packed: MXFP4Tensor, expected: MXFP4Tensor):
    for name in ("codes", "scale", "macro", "residual_codes", "residual_scale"):
        ours, theirs = getattr(packed, name), getattr(expected, name)
        assert (ours is None) == (theirs is None), name
        assert ours is None or torch.equal(ours, theirs), name


@every_option
def test_fake_quantize_has_the_bits_of_the_reference(rule, macro, alpha, dtype):
    scheme = QuantScheme(rule, *macro, alpha)
    for columns in (1, 33, 128, 300):
        x = special_values(dtype, columns)
        assert_same_bits(cpu.fake_quantize(x, scheme), numerics.apply_scheme(x, scheme))


@every_option
def test_packed_tensors_have_the_bits_of_the_reference(rule, macro, alpha, dtype):
    scheme = QuantScheme(rule, *macro, alpha)
    for columns in (1, 33, 300):
        x = special_values(dtype, columns)
        packed, expected = cpu.quantize(x, scheme, 1), numerics.quantize(x, **vars(scheme))
        assert_same_parts(packed, expected)
        assert (packed.length, packed.axis, packed.scheme, packed.dtype) == (columns, 1, scheme, dtype)
        for out in DTYPES:
            assert_same_bits(cpu.dequantize(packed, out), expected.dequantize(out))


@pytest.mark.parametrize(("rule", "macro", "alpha", "dtype"), pairwise_params(RULES, MACROS, ALPHAS[1:], DTYPES))
def test_selective_fallback_has_the_bits_of_the_reference(rule, macro, alpha, dtype):
    for rate, columns in ((0.05, 1), (0.3, 33), (0.1, 300), (0.9, 300)):
        scheme = QuantScheme(rule, *macro, alpha, fallback_rate=rate)
        x = special_values(dtype, columns)
        expected = numerics.apply_scheme(x, scheme)
        assert_same_bits(cpu.fake_quantize(x, scheme), expected)
        assert_same_bits(cpu.quantizer(dtype, scheme, columns)(x), expected)
        assert_same_parts(cpu.quantize(x, scheme, 1), numerics.quantize(x, **vars(scheme)))


def test_selection_of_nothing_and_of_values_without_errors():
    scheme = QuantScheme(outlier_fallback=1.0, fallback_rate=0.5)
    assert cpu.fake_quantize(torch.zeros(0, 64), scheme).shape == (0, 64)
    on_grid = torch.tensor([[6.0, 4.0, -3.0, -0.0] * 8])
    assert_same_bits(cpu.fake_quantize(on_grid, scheme), numerics.apply_scheme(on_grid, scheme))
    assert torch.equal(cpu.quantize(on_grid, scheme, 1).residual_scale, torch.zeros(1, 1, dtype=torch.uint8))


def test_ties_of_errors_go_to_the_first_blocks_of_each_row():
    x = torch.randn(1, 32, generator=torch.Generator().manual_seed(0)).repeat(3, 21)
    scheme = QuantScheme(outlier_fallback=1.0, fallback_rate=0.2)
    chosen = cpu.quantize(x, scheme, 1).residual_scale.bool()
    assert chosen.tolist() == [[True] * 5 + [False] * 16] * 3  # ceil(.2 * 21)


def test_sums_of_errors_under_a_rate_are_those_of_the_values():
    x = torch.randn(40, 300, generator=torch.Generator().manual_seed(0)) ** 3
    for text in ("rceil+of1@0.1", "even+mbs128-blockwise+of0.5@0.3"):
        scheme = numerics.parse_scheme(text)
        sums, _ = cpu.error_sums(x, scheme)
        error = numerics.apply_scheme(x, scheme).double() - x.double()
        total = sums.deadzone + sums.scale_bias + 2 * sums.scale_dot_grid + sums.grid
        assert total == pytest.approx(error.square().sum().item(), rel=1e-9)


def test_every_code_and_scale_byte_dequantizes_as_the_reference_says():
    codes = torch.tensor([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE] * 2, dtype=torch.uint8).repeat(256, 1)
    scale = torch.arange(256, dtype=torch.uint8)[:, None]
    tensor = numerics.MXFP4Tensor(codes, scale, None, None, None, 32, 1, QuantScheme(), torch.float32)
    for dtype in DTYPES:
        assert_same_bits(cpu.dequantize(tensor, dtype), tensor.dequantize(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_bit_patterns_of_an_element(dtype):
    if dtype == torch.float32:
        bits = torch.arange(0, 2**32, 2**17 + 7).sub(2**31).to(torch.int32)
    else:
        bits = torch.arange(2**16).sub(2**15).to(torch.int16)
    x = torch.zeros(len(bits), 32, dtype=dtype)
    x[:, 0] = bits.view(dtype)
    x[:, 1] = x[:, 0] / 3
    for scheme in (QuantScheme(), QuantScheme("even", 128, "static", 0.5)):
        assert_same_bits(cpu.fake_quantize(x, scheme), numerics.apply_scheme(x, scheme))


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 5),
    columns=st.integers(1, 400),
    scheme=st.sampled_from(SCHEMES),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**31),
    spread=st.integers(0, 40),
)
def test_any_shape_and_spread(rows, columns, scheme, dtype, seed, spread):
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-spread, spread + 1, (rows, columns), generator=generator)
    x = (torch.randn(rows, columns, generator=generator) * torch.exp2(exponents.float())).clamp(-6e4, 6e4).to(dtype)
    assert_same_bits(cpu.fake_quantize(x, scheme), numerics.apply_scheme(x, scheme))


def test_threads_change_nothing():
    x = torch.randn(37, 40_000).bfloat16()
    scheme = QuantScheme("rceil", 128, "dynamic", 0.5)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 3, 8):
            torch.set_num_threads(threads)
            results.append((cpu.fake_quantize(x, scheme), cpu.quantize(x, scheme, 1)))
    finally:
        torch.set_num_threads(before)
    for values, packed in results[1:]:
        assert torch.equal(values, results[0][0])
        assert torch.equal(packed.codes, results[0][1].codes) and torch.equal(packed.macro, results[0][1].macro)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_starts_threads_of_its_own():
    x = torch.randn(64, 40_000)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        expected = cpu.fake_quantize(x, QuantScheme())  # the parent's threads are there now
        child = os.fork()
        if child == 0:
            found = cpu.fake_quantize(x, QuantScheme())
            torch.set_num_threads(1)  # torch's own functions would wait for the threads that the fork left behind
            os._exit(0 if torch.equal(found, expected) else 1)
        deadline = time.monotonic() + 60
        while (status := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
            time.sleep(0.01)
    finally:
        torch.set_num_threads(before)
    assert status == (child, 0)


@pytest.fixture(params=["openmp", "pool"])
def threads(request, monkeypatch):
    if request.param == "pool":
        monkeypatch.setattr("hf_mxfp4.backends.cpu.threads._openmp", None)
    elif openmp_parallel() is None:
        pytest.skip("torch computes without GOMP_parallel here")


@pytest.mark.usefixtures("threads")
def test_an_error_in_a_thread_reaches_the_caller():
    before = torch.get_num_threads()

    def work(first, last):
        if first:
            raise RuntimeError("in a thread")

    try:
        torch.set_num_threads(2)
        with pytest.raises(RuntimeError, match="in a thread"):
            in_threads(work, count=10, cost=2**22)
    finally:
        torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("count", [1, 2, 7, 1000])
def test_the_ranges_make_up_all_rows(count):
    before, spans = torch.get_num_threads(), []
    try:
        torch.set_num_threads(5)
        in_threads(lambda first, last: spans.append((first, last)), count=count, cost=2**30)
    finally:
        torch.set_num_threads(before)
    spans.sort()
    assert spans[0][0] == 0 and spans[-1][1] == count and len(spans) == min(5, count)
    assert all(a[1] == b[0] for a, b in zip(spans, spans[1:], strict=False))


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_axes_and_strides_and_the_input_left_alone(axis):
    base = torch.randn(96, 2 * 70)
    x = base[:, ::2]
    before = base.clone()
    out = hf_mxfp4.fake_quantize(x, axis=axis, macro_block=128)
    assert torch.equal(out, numerics.fake_quantize(x, axis=axis, macro_block=128))
    packed = hf_mxfp4.quantize(x, axis=axis, macro_block=128)
    assert torch.equal(packed.dequantize(), out)
    assert torch.equal(base, before)


@pytest.mark.parametrize("shape", [(0, 64), (3, 0), (0,), (64,), (2, 3, 4, 33)])
def test_empty_vector_and_many_axes(shape):
    x = torch.randn(shape)
    out = hf_mxfp4.fake_quantize(x, macro_block=128, outlier_fallback=0.5)
    assert torch.equal(out, numerics.fake_quantize(x, macro_block=128, outlier_fallback=0.5))
    assert torch.equal(hf_mxfp4.quantize(x, macro_block=128).dequantize(), numerics.fake_quantize(x, macro_block=128))


def test_the_public_functions_run_on_the_fused_backend(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("the eager reference was called")

    x = torch.randn(4, 64)
    expected = numerics.fake_quantize(x)
    monkeypatch.setattr(numerics, "quantize", refuse)
    monkeypatch.setattr("hf_mxfp4.backends.select.apply_scheme", refuse)
    monkeypatch.setattr("hf_mxfp4.numerics.packed.dequantize", refuse)
    assert torch.equal(hf_mxfp4.fake_quantize(x), expected)
    assert torch.equal(hf_mxfp4.quantize(x).dequantize(), expected)
    with pytest.raises(AssertionError, match="eager reference"):
        hf_mxfp4.fake_quantize(x, backend="eager")


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"rounding": "stochastic"}, "stochastic"),
        ({"block_rows": 32}, "block_rows"),
    ],
    ids=["stochastic", "tiles"],
)
def test_what_is_not_fused_runs_eagerly_and_is_refused_by_name(options, word):
    x = torch.randn(64, 64)
    assert word in backend_for("cpu", x.dtype, QuantScheme(**options), "auto")[1]
    assert hf_mxfp4.fake_quantize(x, **options).shape == x.shape
    for function in (hf_mxfp4.fake_quantize, hf_mxfp4.quantize):
        with pytest.raises(ValueError, match=f"backend='cpu' cannot quantize here.*{word}"):
            function(x, backend="cpu", **options)


def test_importance_is_the_reference_s():
    x = torch.randn(8, 128)
    options = {"scale_rule": "mse", "importance": torch.rand(128) + 0.1}
    assert torch.equal(hf_mxfp4.fake_quantize(x, **options), numerics.fake_quantize(x, **options))
    assert torch.equal(hf_mxfp4.quantize(x, **options).codes, numerics.quantize(x, **options).codes)
    with pytest.raises(ValueError, match="takes no generator"):
        hf_mxfp4.fake_quantize(x, backend="cpu", **options)


def test_large_eager_tensors_go_through_in_portions():
    x = torch.randn(600, 1000)
    for options in ({"macro_block": 128, "outlier_fallback": 0.5}, {"macro_block": "row"}):
        assert torch.equal(hf_mxfp4.fake_quantize(x, backend="eager", **options), numerics.fake_quantize(x, **options))


@every_option
def test_error_sums_are_those_of_the_decomposition(rule, macro, alpha, dtype):
    scheme = QuantScheme(rule, *macro, alpha)
    generator = torch.Generator().manual_seed(5)
    x = (torch.randn(24, 300, generator=generator) * torch.exp2(torch.arange(24.0) / 2 - 6)[:, None]).to(dtype)
    x[3] = 0
    sums, bins = cpu.error_sums(x, scheme)
    parts = numerics.decompose_scheme(x, scheme)
    wide = x.double()
    expected = {
        "energy": wide.square().sum(),
        "scale_bias": parts.scale_bias.square().sum(),
        "deadzone": parts.deadzone.square().sum(),
        "grid": parts.grid.square().sum(),
        "scale_dot_grid": (parts.scale_bias * parts.grid).sum(),
        "quantized_dot": ((parts.total + wide) * wide).sum(),
        "deadzone_count": parts.deadzone_fraction * x.numel(),
        "zero_count": parts.zero_fraction * x.numel(),
        "blocks": len(parts.scale_ratio),
        "gamma_sum": parts.scale_ratio.sum(),
        "delta_sum": parts.scale_ratio_log2.sum(),
        "gamma_square_sum": parts.scale_ratio.square().sum(),
        "delta_square_sum": parts.scale_ratio_log2.square().sum(),
        "not_finite": 0,
    }
    for name, value in expected.items():
        assert getattr(sums, name) == pytest.approx(float(value), rel=1e-10, abs=1e-300), name
    assert sum(bins) == sums.blocks


def test_error_sums_count_blocks_that_are_not_finite_and_do_not_depend_on_threads():
    x = torch.randn(64, 20_000)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(cpu.error_sums(x, QuantScheme("even", 128)))
    finally:
        torch.set_num_threads(before)
    assert results[0] == results[1] == results[2]
    x[5, 7], x[6, 9] = float("nan"), float("inf")
    assert cpu.error_sums(x, QuantScheme())[0].not_finite == 2
