# SPDX-License-Identifier: Apache-2.0
"""The fused C++ rotation: the bits of the eager reference, and where it is taken."""

import os
import subprocess
import sys

import pytest
import torch
from test_cpu_fused import special_values

from hf_mxfp4 import numerics
from hf_mxfp4.backends import cpu
from hf_mxfp4.backends import select as backends
from hf_mxfp4.backends.cpu import functions, library, rotation
from hf_mxfp4.numerics import ROTATION_SIZES


pytestmark = pytest.mark.skipif(library.load()[0] is None, reason=f"no fused CPU functions: {library.load()[1]}")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """The same bits, zeros of either sign told apart, where there is no NaN."""
    assert actual.dtype == expected.dtype and torch.equal(actual.isnan(), expected.isnan())
    kept = ~expected.isnan()
    assert torch.equal(actual[kept], expected[kept])
    assert torch.equal(actual[kept].signbit(), expected[kept].signbit())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", ROTATION_SIZES)
def test_bits_of_the_reference(size, dtype):
    x = special_values(dtype, 384)
    expected = numerics.rotate(x.float(), size)
    assert expected.isnan().any() and expected.isinf().any()
    for out in DTYPES:
        assert_same(cpu.rotate(x, size, out), expected.to(out))
    assert_same(cpu.rotate(x.t().contiguous().t(), size), expected)
    assert_same(cpu.rotate(x[:, 128:256], size), expected[:, 128:256])
    assert cpu.rotate(x[:0], size).shape == (0, 384)


def test_threads_share_out_whole_blocks(threads, monkeypatch):
    monkeypatch.setattr(functions, "WORTH_A_THREAD", 64)
    threads(3)
    x = torch.randn(7, 640)
    assert_same(cpu.rotate(x, 128), numerics.rotate(x, 128))


def test_sizes_that_do_not_divide_are_refused():
    for size in (48, 32):
        with pytest.raises(ValueError, match=f"rows of 72 elements cannot be rotated in blocks of {size}"):
            cpu.rotate(torch.randn(2, 72), size)


def test_other_lengths_are_padded_and_other_backends_and_signs_are_eager(monkeypatch):
    x = torch.randn(3, 72, dtype=torch.bfloat16)
    expected = numerics.rotate(torch.nn.functional.pad(x.float(), (0, 56)), 64)
    calls = []
    original = cpu.rotate
    monkeypatch.setattr(cpu, "rotate", lambda *arguments: calls.append(arguments) or original(*arguments))
    for backend, count in (("auto", 1), ("cpu", 2), ("eager", 2), ("triton", 2)):
        assert_same(backends.rotate_rows(x, 64, backend), expected)
        assert len(calls) == count
    assert_same(backends.rotate_rows(x, 64, dtype=torch.bfloat16), expected.bfloat16())
    signs = numerics.random_signs(128, seed=1)
    padded = torch.nn.functional.pad(x.float(), (0, 56))
    assert_same(backends.rotate_rows(x, 64, signs=signs), numerics.rotate(padded, 64, signs=signs))
    assert_same(backends.rotate_rows(x.double(), 64), numerics.rotate(padded.double(), 64))
    assert len(calls) == 3


def test_gradients_are_those_of_the_reference():
    x = torch.randn(2, 64, requires_grad=True)
    y = backends.rotate_rows(x, 64)
    grad = torch.randn(2, 64)
    y.backward(grad)
    torch.testing.assert_close(x.grad, numerics.unrotate(grad, 64))


def test_a_library_that_computes_otherwise_is_not_taken(monkeypatch):
    rotation._agrees_with_the_reference.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(numerics, "rotate", lambda x, size: x)
        assert not cpu.takes_rotation(torch.ones(1, 64))
    rotation._agrees_with_the_reference.cache_clear()
    assert cpu.takes_rotation(torch.ones(1, 64)) and not cpu.takes_rotation(torch.ones(1, 64, dtype=torch.float64))


@pytest.mark.large
@pytest.mark.parametrize("variant", ("avx2", "portable"))
def test_other_instructions(variant, tmp_path):
    """This file in a process whose library has fewer instructions."""
    environment = {**os.environ, "HF_MXFP4_CPU": variant, "HF_MXFP4_CACHE": str(tmp_path)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not large", __file__]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0 and " passed" in ran.stdout and " skipped" not in ran.stdout, ran.stdout[-2000:]
