# SPDX-License-Identifier: Apache-2.0
"""Stochastic rounding, rotations and both directions of the compiled kernels against the eager functions on the CPU."""

import pytest
import torch
from compiled import report_of

import mxfp4_kernels
from hf_mxfp4 import numerics
from hf_mxfp4.numerics.rng import counted_uniform


pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@pytest.mark.timeout(1000)
@pytest.mark.parametrize(("what", "cases"), [("stochastic", 125), ("rotated", 123), ("both", 124), ("whole_rows", 123)])
def test_compiled_kernels_equal_eager_bit_for_bit(what, cases):
    report = report_of("kernels/run_variants.py", what, "cuda", timeout=900)
    assert report["mismatches"] == []
    assert report["cases"] == {what: cases}


def test_more_than_2_to_the_31_elements_in_both_directions():
    rows, cols = 2**16 + 32, 2**15
    x = torch.randn(rows, cols, device="cuda", dtype=torch.bfloat16)
    options = {"rounding": ("stochastic", "nearest"), "seed": (7, None), "rotation": (None, 16)}
    values, transposed = mxfp4_kernels.fake_quantize_both(x, **options)
    blocks = x[-32:].cpu()
    nearest = numerics.fake_quantize(blocks)
    assert (values[-32:].cpu().float() - nearest.float()).abs().max() <= blocks.float().abs().max() / 2
    for column in (0, 2**14, cols - 1):
        rotated = numerics.rotate(x[:, column].cpu().float(), 16)
        assert torch.equal(transposed[column].cpu(), numerics.fake_quantize(rotated).bfloat16())


@pytest.mark.parametrize("seed", [0, 2**64 - 1])
def test_a_gpu_draws_what_the_cpu_draws(seed):
    on_cpu = counted_uniform((3, 1001), seed, 1, "cpu")
    assert torch.equal(counted_uniform((3, 1001), seed, 1, "cuda").cpu(), on_cpu)
