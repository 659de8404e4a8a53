# SPDX-License-Identifier: Apache-2.0
"""The fused C++ functions: the bits of the eager reference, and how their library is compiled, kept and checked."""

import dataclasses
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from processes import code, run
from same_bits import assert_same
from tables import MACROS, RULES, pairwise_params

import hf_mxfp4
from hf_mxfp4 import numerics
from hf_mxfp4.numerics import ROTATION_SIZES, QuantScheme
from hf_mxfp4.ops import backend_for, cpu, rotate_rows
from mxfp4_kernels import cpu as library


pytestmark = pytest.mark.skipif(library.load()[0] is None, reason=f"no fused CPU functions: {library.load()[1]}")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ALPHAS = (None, 0.3, 1.0)


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
    assert out.dtype == expected.dtype
    assert out.shape == expected.shape
    integers = torch.int32 if out.dtype == torch.float32 else torch.int16
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(out.nan_to_num(1.0).view(integers), expected.nan_to_num(1.0).view(integers))


@pytest.mark.parametrize(("rule", "macro", "alpha", "dtype"), pairwise_params(RULES, MACROS, ALPHAS, DTYPES))
def test_bits_of_the_reference(rule, macro, alpha, dtype):
    scheme = QuantScheme(rule, *macro, alpha)
    for columns in (1, 33, 128, 300):
        x = special_values(dtype, columns)
        assert_same_bits(cpu.fake_quantize(x, scheme), numerics.apply_scheme(x, scheme))
        packed = cpu.quantize(x, scheme, 1)
        expected = numerics.quantize(x, **vars(scheme))
        assert_same(packed.parts, expected.parts)
        assert (packed.length, packed.axis, packed.scheme, packed.dtype) == (columns, 1, scheme, dtype)
        for out in DTYPES:
            assert_same_bits(cpu.dequantize(packed, out), expected.dequantize(out))


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_the_callers_default_dtype_and_device_change_nothing(dtype):
    """As `vllm` sets the first; "meta" stands for a GPU."""
    layer = hf_mxfp4.layers.MXFP4PackedLinear.from_linear(
        torch.nn.Linear(256, 64), hf_mxfp4.MXFP4RLConfig(mode="packed")
    )
    x = torch.randn(64, 256)
    packed = hf_mxfp4.quantize(x)
    y = layer(x)
    signs = numerics.random_signs(16, 3)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        with torch.device("meta"):
            assert cpu.library_problem.__wrapped__() is None
            assert_same(hf_mxfp4.quantize(x).parts, packed.parts)
            assert torch.equal(packed.dequantize(torch.float32).square(), hf_mxfp4.fake_quantize(x).square())
            assert torch.equal(layer(x), y)
            assert torch.equal(numerics.random_signs(16, 3), signs)
    finally:
        torch.set_default_dtype(before)


def test_threads_change_nothing(threads):
    x = torch.randn(37, 40_000).bfloat16()
    scheme = QuantScheme("even", 128, "block_mantissas_fp8", 0.5)
    expected = numerics.quantize(x, **vars(scheme))
    for count in (1, 3, 8, 50):
        threads(count)
        packed = cpu.quantize(x, scheme, 1)
        assert_same(packed.parts, expected.parts)
        assert torch.equal(cpu.fake_quantize(x, scheme), expected.dequantize())
        assert torch.equal(cpu.dequantize(packed, x.dtype), expected.dequantize())


def test_the_threads_are_those_that_torch_has(monkeypatch):
    """No second OpenMP is loaded, and no more threads run than torch was told to use."""
    path = Path(library.load()[0]._name)
    assert not path.exists() or b"libgomp" not in path.read_bytes()
    x = torch.randn(64, 40_000)
    asked = []
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
    monkeypatch.setattr(library, "_WORTH_A_THREAD", 64)
    x = special_values(dtype, 384)
    expected = numerics.rotate(x.float(), size)
    assert expected.isnan().any()
    assert expected.isinf().any()
    assert_same_bits(library.rotate(x, size), expected)
    assert_same_bits(library.rotate(x.t().contiguous().t(), size), expected)
    assert_same_bits(library.rotate(x[:, 128:256], size), expected[:, 128:256])
    assert library.rotate(x[:0], size).shape == (0, 384)
    with pytest.raises(ValueError, match="rows of 72 elements cannot be rotated in blocks of"):
        library.rotate(torch.randn(2, 72), size)


def test_rotations_of_other_lengths_are_padded_and_signs_and_gradients_are_eager():
    x = torch.randn(3, 72, dtype=torch.bfloat16)
    padded = torch.nn.functional.pad(x.float(), (0, 56))
    for backend in ("auto", "cpu", "eager"):
        assert_same_bits(rotate_rows(x, 64, backend), numerics.rotate(padded, 64))
    signs = numerics.random_signs(128, seed=1)
    assert_same_bits(rotate_rows(x, 64, signs=signs), numerics.rotate(padded, 64, signs=signs))
    wide = torch.randn(2, 64, requires_grad=True)
    grad = torch.randn(2, 64)
    rotate_rows(wide, 64).backward(grad)
    torch.testing.assert_close(wide.grad, numerics.unrotate(grad, 64))


def test_the_public_functions_run_on_the_fused_backend(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("the eager reference was called")

    x = torch.randn(4, 64)
    strided = torch.randn(96, 140)[:, ::2]
    expected = numerics.fake_quantize(x)
    by_axis = numerics.fake_quantize(strided, axis=0)
    monkeypatch.setattr(numerics, "quantize", refuse)
    monkeypatch.setattr("hf_mxfp4.ops.quantization.apply_scheme", refuse)
    monkeypatch.setattr(numerics.MXFP4Tensor, "_values", refuse)
    assert torch.equal(hf_mxfp4.fake_quantize(x), expected)
    assert torch.equal(hf_mxfp4.quantize(x).dequantize(), expected)
    assert torch.equal(hf_mxfp4.fake_quantize(strided, axis=0), by_axis)
    assert torch.equal(hf_mxfp4.quantize(strided, axis=0).dequantize(), by_axis)
    with pytest.raises(AssertionError, match="eager reference"):
        hf_mxfp4.fake_quantize(x, backend="eager")


@pytest.mark.parametrize(
    ("options", "word"), [({"rounding": "stochastic"}, "stochastic"), ({"block_rows": 32}, "rows")]
)
def test_what_is_not_fused_runs_eagerly_and_is_refused_by_name(options, word):
    x = torch.randn(64, 64)
    assert word in backend_for("cpu", x.dtype, QuantScheme(**options), "auto")[1]
    assert hf_mxfp4.fake_quantize(x, **options).shape == x.shape
    for function in (hf_mxfp4.fake_quantize, hf_mxfp4.quantize):
        with pytest.raises(ValueError, match=f"backend='cpu' cannot quantize here.*{word}"):
            function(x, backend="cpu", **options)


NOT_PLAIN = {
    "negated": torch._neg_view,
    "zero": lambda x: torch._efficientzerotensor(x.shape, dtype=x.dtype),
    "negated columns": lambda x: torch._neg_view(x.t().contiguous().t()),
}


@pytest.mark.parametrize("make", NOT_PLAIN.values(), ids=NOT_PLAIN)
def test_tensors_whose_memory_says_something_else(make):
    x = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    scheme = QuantScheme("rceil", 32)
    plain = make(x) + 0.0
    expected = numerics.apply_scheme(plain, scheme)
    for quantize in (
        lambda x: hf_mxfp4.fake_quantize(x, **vars(scheme)),
        lambda x: cpu.quantize(x, scheme, 1).dequantize(),
        lambda x: torch.ops.hf_mxfp4.fake_quantize(x, str(scheme), "auto"),
    ):
        assert torch.equal(quantize(make(x)), expected)
    assert torch.equal(rotate_rows(make(x), 64), rotate_rows(plain, 64))


@pytest.mark.parametrize("size", [0, 100])
def test_freed_storage_is_an_error(size):
    x = torch.randn(40, 64)
    packed = cpu.quantize(x, QuantScheme(), 1)
    for storage in (x, packed.codes):
        storage.untyped_storage().resize_(size)
    calls = (
        lambda: cpu.fake_quantize(x, QuantScheme()),
        lambda: cpu.fake_quantize(x[:, ::2], QuantScheme()),
        lambda: cpu.quantize(x, QuantScheme(), 0),
        lambda: cpu.dequantize(packed, x.dtype),
        lambda: library.rotate(x, 64),
    )
    for call in calls:
        with pytest.raises(RuntimeError, match="was freed|out of bounds for storage"):
            call()


@pytest.mark.parametrize(
    ("scheme", "change", "message"),
    [
        (QuantScheme(), {"length": 6400}, r"codes .* \[3, 32\]; .* need torch.uint8 \[3, 3200\]"),
        (QuantScheme(), {"scale": torch.zeros(3, 1, dtype=torch.uint8)}, r"scale .* need torch.uint8 \[3, 2\]"),
        (QuantScheme(), {"scale": torch.zeros(3, 2)}, r"scale .* is torch.float32"),
        (QuantScheme("rceil", 32), {"macro": None}, "macro .* is missing"),
        (QuantScheme(), {"scheme": QuantScheme("rceil", 32)}, "macro .* is missing"),
        (QuantScheme(outlier_fallback=1.0), {"residual_scale": torch.zeros(3, 0, dtype=torch.uint8)}, "residual_scale"),
        (QuantScheme(outlier_fallback=1.0), {"scheme": QuantScheme()}, "residual_codes .* need none"),
    ],
    ids=["length", "blocks", "dtype", "no macro", "scheme", "residual", "no residual"],
)
def test_parts_that_do_not_fit_together_are_refused(scheme, change, message):
    tensor = hf_mxfp4.quantize(torch.randn(3, 64), **vars(scheme))
    wrong = dataclasses.replace(tensor, **change)
    with pytest.raises(ValueError, match=message):
        wrong.dequantize()
    with pytest.raises(ValueError, match=message):
        torch.ops.hf_mxfp4.dequantize(*wrong.parts, wrong.length, str(wrong.scheme), torch.float32, "auto")


@pytest.mark.large
@pytest.mark.parametrize("variant", ("avx2", "portable"))
@pytest.mark.parametrize("name", ("test_cpu.py", "test_cpu_products.py"))
def test_other_instructions(name, variant, tmp_path):
    """The tests of a file in a process whose library has fewer instructions."""
    environment = {**os.environ, "HF_MXFP4_CPU": variant, "HF_MXFP4_CACHE": str(tmp_path)}
    file = str(Path(__file__).with_name(name))
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not large", file]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-2000:]
    assert " passed" in ran.stdout
    assert " skipped" not in ran.stdout


PRINT_BACKEND = """
import torch
from hf_mxfp4.numerics import QuantScheme, apply_scheme
from hf_mxfp4.ops import backend_for
from hf_mxfp4.ops.quantization import fake_quantize
x = torch.randn(8, 128)
assert torch.equal(fake_quantize(x, QuantScheme()), apply_scheme(x, QuantScheme()))
print(*backend_for("cpu", x.dtype, QuantScheme(), "auto"))
"""


def backend_in_a_new_process(**variables) -> tuple[str, str]:
    """What a process prints and logs."""
    environment = {**os.environ, **{name: str(value) for name, value in variables.items()}}
    result = run(code(PRINT_BACKEND), environment=environment)
    assert result.returncode == 0, result.stderr
    return result.stdout, "".join(line for line in result.stderr.splitlines() if line.startswith("[hf_mxfp4]"))


def script(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def compiler(tmp_path) -> Path:
    """A compiler that takes no time: it gives the library of this process."""
    return script(tmp_path / "c++", f'#!/bin/sh\nfor target; do :; done\ncp {library.load()[0]._name} "$target"\n')


def test_without_a_compiler_everything_runs_eagerly_with_one_warning(tmp_path):
    out, log = backend_in_a_new_process(CXX="", PATH=tmp_path, HF_MXFP4_CACHE=tmp_path / "cache")
    assert out.startswith("eager no C++ compiler was found")
    assert log.count("runs eagerly") == 1
    assert "install g++ or clang++" in log


def test_a_compiler_that_fails_is_named_and_leaves_nothing(tmp_path):
    broken = script(tmp_path / "c++", "#!/bin/sh\necho no luck >&2\nexit 1\n")
    out, _ = backend_in_a_new_process(CXX=broken, HF_MXFP4_CACHE=tmp_path / "cache")
    assert out.startswith("eager")
    assert str(broken) in out
    assert "no luck" in out
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_library_that_computes_otherwise_is_not_used(tmp_path):
    wrong = tmp_path / "wrong"
    wrong.mkdir()
    for source in library.SOURCES:
        (wrong / source.name).write_text(source.read_text().replace("6291456.0f", "12582912.0f"))
    arguments = f'$(echo "$@" | sed "s,{library.SOURCES[0].parent},{wrong},g") -O0'  # most of the time is optimization
    quick = script(tmp_path / "c++", f"#!/bin/sh\nexec {shutil.which('c++')} {arguments}\n")
    out, log = backend_in_a_new_process(CXX=quick, HF_MXFP4_CACHE=tmp_path / "cache")
    assert out.startswith("eager")
    assert "disagree with the reference" in out
    assert f"delete {next((tmp_path / 'cache').iterdir())}" in log


def test_a_library_that_multiplies_otherwise_is_not_used(monkeypatch):
    product = cpu.product
    assert cpu.library_problem.__wrapped__() is None
    monkeypatch.setattr(cpu, "product", lambda *args, **options: product(*args, **options) * 1.01)
    assert "disagree with the reference" in cpu.library_problem.__wrapped__()


def test_the_library_is_compiled_once_kept_and_replaced_where_it_is_damaged(tmp_path, compiler):
    cache = tmp_path / "cache"
    assert backend_in_a_new_process(HF_MXFP4_CACHE=cache, CXX=compiler)[0].startswith("cpu None")
    (compiled,) = cache.iterdir()
    assert cache.stat().st_mode & 0o777 == 0o700
    out, log = backend_in_a_new_process(HF_MXFP4_CACHE=cache, CXX="", PATH="")
    assert out.startswith("cpu None")
    assert not log
    compiled.write_bytes(compiled.read_bytes()[:500])
    assert backend_in_a_new_process(HF_MXFP4_CACHE=cache, CXX="", PATH="")[0].startswith("eager no C++ compiler")
    assert backend_in_a_new_process(HF_MXFP4_CACHE=cache, CXX=compiler)[0].startswith("cpu None")
    assert list(cache.iterdir()) == [compiled]
    assert compiled.stat().st_size > 500


def test_threads_may_compile_it_at_the_same_time(tmp_path, compiler, monkeypatch):
    monkeypatch.setenv("CXX", str(script(tmp_path / "slow", f'#!/bin/sh\nsleep 0.2\nexec {compiler} "$@"\n')))
    (tmp_path / "cache").mkdir()
    with ThreadPoolExecutor(2) as pool:
        found = set(pool.map(lambda key: library._compile(tmp_path / "cache", key), ["key", "key"]))
    assert len(found) == 1
    assert set((tmp_path / "cache").iterdir()) == found


def test_what_is_not_private_is_not_loaded(tmp_path, compiler, monkeypatch):
    """What lies in the folder is run as code; the folder that nobody chose is made private."""
    monkeypatch.delenv("HF_MXFP4_CACHE", raising=False)
    cache = tmp_path / "hf_mxfp4"
    cache.mkdir()
    cache.chmod(0o775)
    assert backend_in_a_new_process(XDG_CACHE_HOME=tmp_path, CXX=compiler)[0].startswith("cpu None")
    assert cache.stat().st_mode & 0o777 == 0o700
    (compiled,) = cache.iterdir()
    compiled.chmod(0o722)
    assert backend_in_a_new_process(HF_MXFP4_CACHE=cache, CXX="", PATH="")[0].startswith("eager no C++ compiler")
    compiled.chmod(0o700)
    cache.chmod(0o777)
    assert backend_in_a_new_process(HF_MXFP4_CACHE=cache, CXX="", PATH="")[0].startswith("eager no C++ compiler")


def test_without_a_usable_folder_a_temporary_one_serves_with_a_warning(tmp_path, compiler):
    (tmp_path / "cache").touch()
    out, log = backend_in_a_new_process(HF_MXFP4_CACHE=tmp_path / "cache", CXX=compiler, TMPDIR=tmp_path)
    assert out.startswith("cpu None")
    assert log.count("the compiled CPU functions are not kept") == 1
    assert not list(tmp_path.glob("hf_mxfp4-*")), "a temporary folder is left"
