# SPDX-License-Identifier: Apache-2.0
"""Factors and block mantissas worked out by hand; and which blocks get the residual pass."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from tables import RULES

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.numerics import decompose, dequantize, fake_quantize, quantize


@pytest.mark.parametrize("exponent", [-120, 0, 126])
def test_static_byte_is_that_of_the_correctly_rounded_quotient(exponent):
    """A product with a rounded reciprocal differs on some mantissas, most where 1 / amax is subnormal."""
    amax = (torch.arange(0, 1 << 23, 41, dtype=torch.int32) + 0x3F800000).view(torch.float32) * 2.0**exponent
    x = torch.zeros(len(amax), 32)
    x[:, 0] = amax
    quotient = np.float32(6) / amax.numpy()
    expected = (quotient.view(np.int32) >> 15) & 0xFF
    assert np.array_equal(quantize(x, macro_block=32).macro[:, 0].numpy(), expected)


@pytest.mark.parametrize("search", ["dynamic", "blockwise"])
def test_rows_of_a_large_tensor_choose_as_they_do_alone(search):
    # So large that its candidates are computed in portions of rows.
    x = torch.randn(24, 16, 512)
    options = {"scale_rule": "even", "macro_block": 128, "macro_search": search}
    alone = torch.stack([fake_quantize(rows, **options) for rows in x])
    assert torch.equal(fake_quantize(x, **options), alone)


BLOCKWISE = {"macro_block": 128, "macro_search": "blockwise"}


def test_literal_block_mantissas_and_bytes():
    """Blocks that are the grid times 1, 1.25, 1.5 and 1.75 are exact, and the byte says so: 0b11_10_01_00."""
    grid = torch.tensor([0.5, -1.0, 1.5, -2.0, 3.0, -4.0, 6.0, 0.0]).repeat(4)
    x = torch.cat([grid * g for g in (1.0, 1.25, 1.5, 1.75)])
    packed = quantize(x, **BLOCKWISE)
    assert packed.macro.tolist() == [0b11100100]
    assert packed.scale.tolist() == [127, 127, 127, 127]
    assert torch.equal(packed.dequantize(), x)
    for name in ("block_mantissas", "block_mantissas_fp8", "blockwise", "blockwise_fp8"):  # their bytes are read alike
        options = {"length": 128, "macro": packed.macro, "macro_block": 128, "macro_search": name}
        assert torch.equal(dequantize(packed.codes, packed.scale, **options), x)


def test_values_of_block_mantissas_are_exact_in_bfloat16():
    quantized = fake_quantize(gaussian(), **BLOCKWISE)
    assert torch.equal(quantized.bfloat16().float(), quantized)


@pytest.mark.parametrize("rule", RULES)
def test_values_of_three_levels_are_e4m3_numbers_and_those_of_four_are_not(rule):
    """Over one power of two per row, by the E4M3 of torch and of ml_dtypes; blocks are up to 32 times apart."""
    x = gaussian(64, 512) * torch.exp2(torch.randint(-2, 4, (64, 16)).float()).repeat_interleave(32, dim=1)
    for search, exact in (("block_mantissas_fp8", True), ("block_mantissas", False)):
        values = fake_quantize(x, scale_rule=rule, macro_block=128, macro_search=search)
        top = torch.exp2(values.abs().amax(dim=1, keepdim=True).log2().floor() - 7)
        rows = values / top
        assert torch.equal(rows.to(torch.float8_e4m3fn).float(), rows) == exact
        assert bool((rows.numpy().astype(ml_dtypes.float8_e4m3fn).astype(np.float32) == rows.numpy()).all()) == exact
        assert quantize(x, scale_rule=rule, macro_block=128, macro_search=search).macro.unique().numel() > 50


def test_a_bad_block_spoils_the_mantissa_of_itself_alone():
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


@pytest.mark.parametrize(
    ("short", "name"), [("blockwise", "block_mantissas"), ("blockwise_fp8", "block_mantissas_fp8")]
)
@pytest.mark.parametrize("size", [32, 64, 256, "row"])
def test_other_macro_sizes_are_refused(size, short, name):
    with pytest.raises(ValueError, match=f"'{name}' needs macro_block=128"):
        fake_quantize(torch.ones(2, 256), macro_block=size, macro_search=short)
    with pytest.raises(ValueError, match=f"'{name}' needs macro_block=128"):
        MXFP4RLConfig(macro_block=size, macro_search=short)


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


def gaussian(rows=64, columns=256, seed=0):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def chosen(x, **options):
    """Mask ``[rows, blocks]`` of the blocks that two passes and one tell apart."""
    one = fake_quantize(x, **{k: v for k, v in options.items() if not k.startswith(("outlier", "fallback"))})
    return (fake_quantize(x, **options) != one).unflatten(-1, (-1, 32)).any(dim=-1)


def test_ties_go_to_the_first():
    block = gaussian(1, 32)
    x = block.repeat(3, 8)
    mask = chosen(x, outlier_fallback=0.5, fallback_rate=0.25)
    assert mask.tolist() == [[True, True] + [False] * 6] * 3
    x[1, 160:192] *= 3
    mask = chosen(x, outlier_fallback=0.5, fallback_rate=0.25)
    assert mask.nonzero()[:, 1].tolist() == [0, 1, 0, 5, 0, 1]


def test_number_of_blocks_is_that_of_the_decimal_rate():
    rates, totals = (0.1, 0.1, 0.3, 0.7, 0.5, 0.07, 1 / 3), (30, 31, 10, 10, 1, 100, 3)
    masks = [
        chosen(gaussian(1, 32 * total), outlier_fallback=0.5, fallback_rate=rate)
        for rate, total in zip(rates, totals, strict=True)
    ]
    assert [int(mask.sum()) for mask in masks] == [3, 4, 3, 7, 1, 7, 1]


def test_out_of_range_errors_saturate():
    """Far from 1 the errors of blocks are no longer told apart; first blocks win, and nothing fails."""
    for power in (-140, -120, -90, 80, 110, 120):
        x = gaussian(8) * 2.0**power
        mask = chosen(x, outlier_fallback=1.0, fallback_rate=0.25)
        assert mask.sum() <= 16, power
        assert fake_quantize(x, outlier_fallback=1.0, fallback_rate=0.25).isfinite().all(), power


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fallback_rate": 0.1}, "fallback_rate=0.1.*outlier_fallback=None"),
        *(({"outlier_fallback": 0.5, "fallback_rate": r}, f"fallback_rate={r!r} must") for r in (0, 1.0, True, "0.1")),
    ],
    ids=str,
)
def test_rates_that_are_refused(options, message):
    for call in (fake_quantize, quantize, decompose):
        with pytest.raises(ValueError, match=message):
            call(torch.ones(2, 32), **options)
