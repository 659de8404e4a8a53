# SPDX-License-Identifier: Apache-2.0
"""The fused C++ functions: the bits of the eager reference, over schemes, dtypes, shapes and special values."""

import dataclasses
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from pairwise import pairwise_params
from tables import RULES

import hf_mxfp4
from hf_mxfp4 import numerics
from hf_mxfp4.backends import backend_for, cpu, rotate_rows
from hf_mxfp4.numerics import ROTATION_SIZES, MXFP4Tensor, QuantScheme
from mxfp4_kernels import cpu as library


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
def test_bits_of_the_reference(rule, macro, alpha, dtype):
    scheme = QuantScheme(rule, *macro, alpha)
    for columns in (1, 33, 128, 300):
        x = special_values(dtype, columns)
        assert_same_bits(cpu.fake_quantize(x, scheme), numerics.apply_scheme(x, scheme))
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
        assert_same_parts(cpu.quantize(x, scheme, 1), numerics.quantize(x, **vars(scheme)))


def test_ties_of_errors_go_to_the_first_blocks_of_each_row():
    x = torch.randn(1, 32, generator=torch.Generator().manual_seed(0)).repeat(3, 21)
    scheme = QuantScheme(outlier_fallback=1.0, fallback_rate=0.2)
    chosen = cpu.quantize(x, scheme, 1).residual_scale.bool()
    assert chosen.tolist() == [[True] * 5 + [False] * 16] * 3  # ceil(.2 * 21)


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


def test_threads_change_nothing(threads):
    x = torch.randn(37, 40_000).bfloat16()
    scheme, results = QuantScheme("rceil", 128, "dynamic", 0.5), []
    for count in (1, 3, 8, 50):
        threads(count)
        packed = cpu.quantize(x, scheme, 1)
        results.append((cpu.fake_quantize(x, scheme), packed.codes, packed.macro, cpu.dequantize(packed, x.dtype)))
    for result in results[1:]:
        assert all(map(torch.equal, result, results[0]))


def test_the_threads_are_those_that_torch_has(monkeypatch):
    """No second OpenMP is loaded, and no more threads run than torch was told to use."""
    path = Path(library.load()[0]._name)
    assert not path.exists() or b"libgomp" not in path.read_bytes()
    x, asked = torch.randn(64, 40_000), []
    function = library.load()[0].mxfp4_quantize
    monkeypatch.setattr(library.load()[0], "mxfp4_quantize", lambda *a: asked.append(a[5]) or function(*a))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    cpu.fake_quantize(x, QuantScheme())
    cpu.fake_quantize(x[:1, :64], QuantScheme())
    assert asked == [7, 1]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_does_not_wait_for_threads_of_its_parent():
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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", ROTATION_SIZES)
def test_rotations_have_the_bits_of_the_reference(size, dtype, monkeypatch):
    monkeypatch.setattr(cpu, "_WORTH_A_THREAD", 64)
    x = special_values(dtype, 384)
    expected = numerics.rotate(x.float(), size)
    assert expected.isnan().any() and expected.isinf().any()
    for out in DTYPES:
        assert_same_bits(cpu.rotate(x, size, out), expected.to(out))
    assert_same_bits(cpu.rotate(x.t().contiguous().t(), size), expected)
    assert_same_bits(cpu.rotate(x[:, 128:256], size), expected[:, 128:256])
    assert cpu.rotate(x[:0], size).shape == (0, 384)
    with pytest.raises(ValueError, match="rows of 72 elements cannot be rotated in blocks of"):
        cpu.rotate(torch.randn(2, 72), size)


def test_rotations_of_other_lengths_are_padded_and_signs_and_gradients_are_eager():
    x = torch.randn(3, 72, dtype=torch.bfloat16)
    padded = torch.nn.functional.pad(x.float(), (0, 56))
    for backend in ("auto", "cpu", "eager"):
        assert_same_bits(rotate_rows(x, 64, backend), numerics.rotate(padded, 64))
    assert_same_bits(rotate_rows(x, 64, dtype=torch.bfloat16), numerics.rotate(padded, 64).bfloat16())
    signs = numerics.random_signs(128, seed=1)
    assert_same_bits(rotate_rows(x, 64, signs=signs), numerics.rotate(padded, 64, signs=signs))
    wide, grad = torch.randn(2, 64, requires_grad=True), torch.randn(2, 64)
    rotate_rows(wide, 64).backward(grad)
    torch.testing.assert_close(wide.grad, numerics.unrotate(grad, 64))


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


def test_the_public_functions_run_on_the_fused_backend(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("the eager reference was called")

    x = torch.randn(4, 64)
    expected = numerics.fake_quantize(x)
    monkeypatch.setattr(numerics, "quantize", refuse)
    monkeypatch.setattr("hf_mxfp4.backends.dispatch.apply_scheme", refuse)
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


def test_large_eager_tensors_go_through_in_portions():
    x = torch.randn(600, 1000)
    for options in ({"macro_block": 128, "outlier_fallback": 0.5}, {"macro_block": "row"}):
        assert torch.equal(hf_mxfp4.fake_quantize(x, backend="eager", **options), numerics.fake_quantize(x, **options))


NOT_PLAIN = {
    "negated": torch._neg_view,
    "zero": lambda x: torch._efficientzerotensor(x.shape, dtype=x.dtype),
    "negated columns": lambda x: torch._neg_view(x.t().contiguous().t()),
}


@pytest.mark.parametrize("make", NOT_PLAIN.values(), ids=NOT_PLAIN)
def test_tensors_whose_memory_says_something_else(make):
    x, scheme = torch.randn(6, 64, generator=torch.Generator().manual_seed(0)), QuantScheme("rceil", 32)
    plain = make(x) + 0.0
    expected = numerics.apply_scheme(plain, scheme)
    for quantize in (
        lambda x: hf_mxfp4.fake_quantize(x, **vars(scheme)),
        lambda x: hf_mxfp4.quantize(x, **vars(scheme)).dequantize(),
        lambda x: cpu.fake_quantize(x, scheme),
        lambda x: cpu.quantize(x, scheme, 1).dequantize(),
        lambda x: torch.ops.hf_mxfp4.fake_quantize(x, str(scheme), "auto"),
    ):
        assert torch.equal(quantize(make(x)), expected)
    assert torch.equal(rotate_rows(make(x), 64), rotate_rows(plain, 64))


def test_transforms_of_functions_run_eagerly():
    x = torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(0))
    expected = numerics.fake_quantize(x)
    assert torch.equal(torch.vmap(hf_mxfp4.fake_quantize)(x), expected)
    assert torch.equal(torch.func.jvp(hf_mxfp4.fake_quantize, (x,), (x,))[0], expected)
    assert torch.equal(torch.vmap(torch.vmap(lambda x: hf_mxfp4.fake_quantize(x)), 1, 1)(x), expected)
    assert torch.equal(torch.vmap(lambda x: hf_mxfp4.quantize(x).dequantize())(x), expected)
    assert torch.equal(torch.func.jvp(lambda x: hf_mxfp4.quantize(x).dequantize(), (x,), (x,))[0], expected)
    assert torch.equal(torch.vmap(lambda x: rotate_rows(x, 64))(x), numerics.rotate(x, 64))


@pytest.mark.parametrize("size", [0, 100])
def test_freed_storage_is_an_error(size):
    x = torch.randn(40, 64)
    packed = cpu.quantize(x, QuantScheme(), 1)
    for storage in (x, packed.codes):
        storage.untyped_storage().resize_(size)
    calls = (
        lambda: cpu.fake_quantize(x, QuantScheme()),
        lambda: cpu.fake_quantize(x[:, ::2], QuantScheme()),
        lambda: cpu.quantize(x, QuantScheme(), 1),
        lambda: cpu.quantize(x, QuantScheme(), 0),
        lambda: cpu.dequantize(packed, x.dtype),
        lambda: cpu.rotate(x, 64),
        lambda: hf_mxfp4.fake_quantize(x),
    )
    for call in calls:
        with pytest.raises(RuntimeError, match="was freed|out of bounds for storage"):
            call()


@pytest.mark.parametrize(
    ("scheme", "change", "message"),
    [
        (QuantScheme(), {"length": 6400}, r"codes .* \[3, 32\]; .* need torch.uint8 \[3, 3200\]"),
        (QuantScheme(), {"scale": torch.zeros(3, 1, dtype=torch.uint8)}, r"scale .* need torch.uint8 \[3, 2\]"),
        (QuantScheme(), {"scale": torch.zeros(2, 2, dtype=torch.uint8)}, r"scale .* need torch.uint8 \[3, 2\]"),
        (QuantScheme(), {"scale": torch.zeros(3, 2)}, r"scale .* is torch.float32"),
        (QuantScheme("rceil", 32), {"macro": None}, "macro .* is missing"),
        (QuantScheme(), {"scheme": QuantScheme("rceil", 32)}, "macro .* is missing"),
        (QuantScheme(outlier_fallback=1.0), {"residual_scale": torch.zeros(3, 0, dtype=torch.uint8)}, "residual_scale"),
        (QuantScheme(outlier_fallback=1.0), {"scheme": QuantScheme()}, "residual_codes .* need none"),
    ],
    ids=["length", "blocks", "rows", "dtype", "no macro", "scheme", "residual", "no residual"],
)
def test_parts_that_do_not_fit_together_are_refused(scheme, change, message):
    tensor = hf_mxfp4.quantize(torch.randn(3, 64), **vars(scheme))
    wrong = dataclasses.replace(tensor, **change)
    with pytest.raises(ValueError, match=message):
        wrong.dequantize()
    parts = wrong.codes, wrong.scale, wrong.macro, wrong.residual_codes, wrong.residual_scale
    with pytest.raises(ValueError, match=message):
        torch.ops.hf_mxfp4.dequantize(*parts, wrong.length, str(wrong.scheme), torch.float32, "auto")


@pytest.mark.large
@pytest.mark.parametrize("variant", ("avx2", "portable"))
@pytest.mark.parametrize("name", ("test_cpu_fused.py", "test_cpu_products.py"))
def test_other_instructions(name, variant, tmp_path):
    """The tests of a file in a process whose library has fewer instructions."""
    environment = {**os.environ, "HF_MXFP4_CPU": variant, "HF_MXFP4_CACHE": str(tmp_path)}
    file = str(Path(__file__).with_name(name))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not large", file]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0 and " passed" in ran.stdout and " skipped" not in ran.stdout, ran.stdout[-2000:]
