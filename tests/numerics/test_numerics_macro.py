# SPDX-License-Identifier: Apache-2.0
"""Macro-block factors: the static one never overshoots, the dynamic one never loses; two mantissa bits per block."""

import math

import numpy as np
import pytest
import torch

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.numerics import fake_quantize, quantize
from hf_mxfp4.numerics.corrections import (
    dynamic_candidates,
    mantissa_factor,
    pack_mantissas,
    static_macro,
    unpack_mantissas,
)


@pytest.mark.parametrize("exponent", [-120, 0, 126])
def test_static_byte_is_that_of_the_correctly_rounded_quotient(exponent):
    """All 2**23 mantissas. A product with a rounded reciprocal differs on some of them, most where 1 / amax is
    subnormal."""
    for start in range(0, 1 << 23, 1 << 20):
        amax = (torch.arange(start, start + (1 << 20), dtype=torch.int32) + 0x3F800000).view(torch.float32)
        amax *= 2.0**exponent
        quotient = np.float32(6) / amax.numpy()
        assert np.array_equal(static_macro(amax).numpy(), (quotient.view(np.int32) >> 15) & 0xFF)


def test_maxima_without_a_factor():
    # Below 2**-126 the quotient 6 / amax is infinite, whose mantissa bits are zero.
    assert static_macro(torch.tensor([0.0, 2.0**-149, 2.0**-130])).tolist() == [0] * 3
    large = torch.tensor([2.0**127, 3.4e38, float("inf"), float("nan")])
    assert static_macro(large).tolist() == [0] * 4
    assert dynamic_candidates(large).flatten().tolist() == [0] * 64


@pytest.mark.parametrize("search", ["dynamic", "blockwise"])
def test_rows_of_a_large_tensor_choose_as_they_do_alone(search):
    # So large that its candidates are computed in portions of rows.
    x = torch.randn(24, 16, 512)
    options = {"scale_rule": "even", "macro_block": 128, "macro_search": search}
    alone = torch.stack([fake_quantize(rows, **options) for rows in x])
    assert torch.equal(fake_quantize(x, **options), alone)


# ---- two mantissa bits per block, in the byte of a macro block ------------------------------------------------------


BLOCKWISE = {"macro_block": 128, "macro_search": "blockwise"}


def gaussian(rows=256, columns=512, seed=0):
    generator = torch.Generator().manual_seed(seed)
    spread = torch.exp2(torch.rand(rows, 1, generator=generator))
    return torch.randn(rows, columns, generator=generator) * spread


def test_literal_block_mantissas_and_bytes():
    """Blocks that are the grid times 1, 1.25, 1.5 and 1.75 are exact, and the byte says so: 0b11_10_01_00."""
    grid = torch.tensor([0.5, -1.0, 1.5, -2.0, 3.0, -4.0, 6.0, 0.0]).repeat(4)
    x = torch.cat([grid * g for g in (1.0, 1.25, 1.5, 1.75)])
    packed = quantize(x, **BLOCKWISE)
    assert packed.macro.tolist() == [0b11100100]
    assert packed.scale.tolist() == [127, 127, 127, 127]
    assert torch.equal(packed.dequantize(), x)


def test_packing_all_bytes():
    every = torch.arange(256, dtype=torch.uint8)
    fields = unpack_mantissas(every)
    assert fields[:8].tolist() == [0, 0, 0, 0, 1, 0, 0, 0]
    assert torch.equal(pack_mantissas(fields).to(torch.uint8), every)
    assert mantissa_factor(torch.arange(4)).tolist() == [1.0, 1.25, 1.5, 1.75]


def test_values_are_exact_in_bfloat16():
    quantized = fake_quantize(gaussian(), **BLOCKWISE)
    assert torch.equal(quantized.bfloat16().float(), quantized)


def test_a_bad_block_spoils_itself_alone():
    x = gaussian(1, 256)
    clean = fake_quantize(x, **BLOCKWISE)
    for bad in (math.nan, math.inf):
        spoiled = x.clone()
        spoiled[0, 40] = bad
        result = fake_quantize(spoiled, **BLOCKWISE)
        assert result[0, 32:64].isnan().all()
        keep = torch.ones(256, dtype=torch.bool)
        keep[32:64] = False
        assert torch.equal(result[0, keep], clean[0, keep])
    assert quantize(spoiled, **BLOCKWISE).macro[0, 0] & 0b1100 == 0


@pytest.mark.parametrize("size", [32, 64, 256, "row"])
def test_other_macro_sizes_are_refused(size):
    with pytest.raises(ValueError, match="'blockwise' needs macro_block=128"):
        fake_quantize(torch.ones(2, 256), macro_block=size, macro_search="blockwise")
    with pytest.raises(ValueError, match="'block_mantissas' needs macro_block=128"):
        MXFP4RLConfig(macro_block=size, macro_search="blockwise")


def test_a_candidate_that_leaves_float32_counts_as_the_largest_number():
    # 0.97 * 2**128: with mantissa 2 it rounds to 6 * 2**125 * 1.5 = 1.125 * 2**128, stored as the largest float, error
    # 0.03; with mantissa 1 to 3 * 2**126 * 1.25 = 0.9375 * 2**128, error 0.0325.
    x = torch.full((1, 128), 0.97 * 2.0**128, dtype=torch.float64).float()
    packed = quantize(x, macro_block=128, macro_search="blockwise")
    assert packed.macro.tolist() == [[0b10101010]]
    assert torch.equal(packed.dequantize(), torch.full_like(x, torch.finfo(torch.float32).max))
    # 0.95: the error of mantissa 1 is 0.0125, that of the largest float 0.05.
    x = torch.full((1, 128), 0.95 * 2.0**128, dtype=torch.float64).float()
    packed = quantize(x, macro_block=128, macro_search="blockwise")
    assert packed.macro.tolist() == [[0b01010101]]
    assert packed.dequantize()[0, 0].item() == 0.9375 * 2.0**128
