# SPDX-License-Identifier: Apache-2.0
"""Known tensors, known codes, scales and factors, worked out by hand; and which blocks get the residual pass."""

import math
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch
from tables import RULES, gaussian

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.numerics import fake_quantize, quantize, unpack_codes


def below(value: float) -> float:
    return float(np.nextafter(np.float32(value), np.float32(0)))


def above(value: float) -> float:
    return float(np.nextafter(np.float32(value), np.float32(np.inf)))


def block(*values: float) -> torch.Tensor:
    """One block of 32: ``values``, then zeros."""
    return torch.tensor([*values, *[0.0] * (32 - len(values))], dtype=torch.float32)


# Block maximum -> (scale byte, code of the maximum) under rceil, floor, even, mse.
MAXIMA = {
    "1": (1.0, [(125, 6), (125, 6), (125, 6), (125, 6)]),
    "5-a-tie": (5.0, [(127, 6), (127, 6), (127, 6), (127, 6)]),
    "6": (6.0, [(127, 7), (127, 7), (127, 7), (127, 7)]),
    "just-above-6": (above(6.0), [(128, 5), (127, 7), (127, 7), (127, 7)]),
    "6.01": (6.01, [(128, 5), (127, 7), (127, 7), (127, 7)]),
    "just-below-7": (below(7.0), [(128, 5), (127, 7), (127, 7), (127, 7)]),
    # 7 is half way between 3 * 2 and 4 * 2, and as far from 6 as from 8: the mse rule keeps its first candidate.
    "7": (7.0, [(128, 6), (127, 7), (128, 6), (127, 7)]),
    "7.5": (7.5, [(128, 6), (127, 7), (128, 6), (128, 6)]),
    "just-below-8": (below(8.0), [(128, 6), (127, 7), (128, 6), (128, 6)]),
    "largest-float32": (torch.finfo(torch.float32).max, [(253, 5), (252, 7), (253, 5), (252, 7)]),
    "largest-bfloat16": (torch.finfo(torch.bfloat16).max, [(253, 5), (252, 7), (253, 5), (252, 7)]),
    "1.5*2**127": (1.5 * 2.0**127, [(252, 7), (252, 7), (252, 7), (252, 7)]),
    "2**-126": (2.0**-126, [(0, 4), (0, 4), (0, 4), (0, 4)]),
    "2**-149": (2.0**-149, [(0, 0), (0, 0), (0, 0), (0, 0)]),
    "2**-128": (2.0**-128, [(0, 1), (0, 1), (0, 1), (0, 1)]),
    "2**-129-a-tie": (2.0**-129, [(0, 0), (0, 0), (0, 0), (0, 0)]),
}


@pytest.mark.parametrize("column", range(4), ids=RULES)
def test_scale_and_code_of_a_block_maximum(column):
    for name, (amax, expected) in MAXIMA.items():
        byte, code = expected[column]
        packed = quantize(block(amax, -amax), scale_rule=RULES[column])
        assert packed.scale.tolist() == [byte], name
        assert unpack_codes(packed.codes, 32).tolist() == [code, code + 8 if code else 0, *[0] * 30], name


@pytest.mark.parametrize("rule", RULES)
def test_every_tie_in_one_block(rule):
    x = block(6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5, -6)
    packed = quantize(x, scale_rule=rule)
    assert packed.scale.tolist() == [127]
    assert packed.codes.tolist() == [0x07, 0x22, 0x44, 0x66, 0xA0, 0xCA, 0xEC, 0xFE, *[0] * 8]
    assert fake_quantize(x, scale_rule=rule)[:16].tolist() == [6, 0, 1, 1, 2, 2, 4, 4, 0, -1, -1, -2, -2, -4, -4, -6]


def test_mse_prefers_clipping_when_it_saves_the_small_elements():
    # At scale 1 the quarters vanish (31 / 16 of squared error); at 1/2 only the 4 loses 1.
    x = torch.tensor([4.0] + [0.25] * 31)
    packed = quantize(x, scale_rule="mse")
    assert packed.scale.tolist() == [126]
    assert packed.codes.tolist() == [0x17] + [0x11] * 15
    assert packed.dequantize().tolist() == [3.0] + [0.25] * 31


# amax of the macro block -> byte: the top eight mantissa bits of 6 / amax.
MACRO_BYTES = {
    1.0: 128,  # 6 = 1.5 * 4
    1.5: 0,
    3.0: 0,
    3.5: 182,  # 1.7142857: 0.7142857 * 256 = 182.86
    4.0: 128,
    4.5: 85,  # 1.3333333: 85.33
    5.0: 51,  # 1.2: 51.2
    6.0: 0,
    6.03125: 253,  # 0.9948187 = 1.9896373 / 2: 253.35
    7.0: 182,
    1.25 * 2.0**126: 51,
    1.5 * 2.0**126: 0,
    2.0**127: 0,
    3.4e38: 0,
    2.0**-130: 0,  # 6 / amax is infinite
    0.0: 0,
}


def test_static_macro_byte():
    assert {amax: int(quantize(block(amax), macro_block=128).macro) for amax in MACRO_BYTES} == MACRO_BYTES
    assert not quantize(block(3.4e38), macro_block=128, macro_search="dynamic").macro.any()


def test_dynamic_macro_takes_the_best_sixteenth():
    # Nothing to gain on grid points: the first factor, 1, wins the tie.
    assert quantize(block(4.0, -4.0), macro_block=32, macro_search="dynamic").macro.tolist() == [0]
    x = torch.tensor([5.0, 2.5] * 16)  # times 1.2: on the grid; times 1.1875: 5.9375, 2.96875
    packed = quantize(x, macro_block=32, macro_search="dynamic")
    assert packed.macro.tolist() == [48]
    assert packed.dequantize()[:2].tolist() == [float(np.float32(v) / np.float32(1.1875)) for v in (6, 3)]


@pytest.mark.parametrize(("alpha", "expected"), [(None, [4.0, 0.5]), (0.5, [4.5, 0.375]), (1.0, [5.0, 0.25])], ids=str)
def test_outlier_fallback(alpha, expected):
    # Pass 1 at scale 1: 5 -> 4, 0.3 -> 0.5. Pass 2 at scale 1/4: 1 -> 4/4, -0.2 -> -1/4.
    x = block(5.0, 0.3)
    packed = quantize(x, outlier_fallback=alpha)
    assert packed.scale.tolist() == [127]
    assert packed.codes[0] == 0x16
    if alpha is not None:
        assert packed.residual_scale.tolist() == [125]
        assert packed.residual_codes[0] == 0xA6
    assert fake_quantize(x, outlier_fallback=alpha)[:2].tolist() == expected


def test_outlier_fallback_shares_the_macro_factor():
    # f = 1.5: z = 6, 4.5; pass 1 keeps 6 and makes 4; the residual 0.5 is a grid point of pass 2 at 2**-3.
    packed = quantize(block(4.0, 3.0), macro_block=128, outlier_fallback=1.0)
    assert packed.macro.tolist() == [128]
    assert packed.residual_scale.tolist() == [124]
    assert packed.residual_codes[0] == 0x60
    assert packed.dequantize()[:2].tolist() == [4.0, 3.0]


@pytest.mark.parametrize("exponent", [-120, 0, 126])
def test_static_byte_is_that_of_the_correctly_rounded_quotient(exponent):
    """A product with a rounded reciprocal differs on some mantissas, most where 1 / amax is subnormal."""
    amax = (torch.arange(0, 1 << 23, 41, dtype=torch.int32) + 0x3F800000).view(torch.float32) * 2.0**exponent
    x = torch.zeros(len(amax), 32)
    x[:, 0] = amax
    quotient = np.float32(6) / amax.numpy()
    expected = (quotient.view(np.int32) >> 15) & 0xFF
    assert np.array_equal(quantize(x, macro_block=32).macro[:, 0].numpy(), expected)


@pytest.mark.parametrize("search", ["dynamic", "block_mantissas"])
def test_rows_of_a_large_tensor_choose_as_they_do_alone(search):
    # So large that its candidates are computed in portions of rows.
    x = torch.randn(24, 16, 512)
    options = {"scale_rule": "even", "macro_block": 128, "macro_search": search}
    alone = torch.stack([fake_quantize(rows, **options) for rows in x])
    assert torch.equal(fake_quantize(x, **options), alone)


BLOCKWISE = {"macro_block": 128, "macro_search": "block_mantissas"}


def test_literal_block_mantissas_and_bytes():
    """Blocks that are the grid times 1, 1.25, 1.5 and 1.75 are exact, and the byte says so: 0b11_10_01_00."""
    grid = torch.tensor([0.5, -1.0, 1.5, -2.0, 3.0, -4.0, 6.0, 0.0]).repeat(4)
    x = torch.cat([grid * g for g in (1.0, 1.25, 1.5, 1.75)])
    packed = quantize(x, **BLOCKWISE)
    assert packed.macro.tolist() == [0b11100100]
    assert packed.scale.tolist() == [127, 127, 127, 127]
    assert torch.equal(packed.dequantize(), x)
    # Bytes of both kinds of mantissas are read alike.
    scheme = replace(packed.scheme, macro_search="block_mantissas_fp8")
    assert torch.equal(replace(packed, scheme=scheme).dequantize(), x)


def test_literal_three_levels():
    """Blocks whose best mantissa is 3, the grid times 1.75 and .875 beside 10.5, and what 0 to 2 do to them."""
    grid = torch.tensor([0.5, -1.0, 1.5, -2.0, 3.0, -4.0, 6.0, 0.0]).repeat(4)
    small = torch.full((32,), 0.875)
    small[0] = 10.5
    x = torch.cat([grid * 1.75, small, grid * 1.5, grid * 1.25])
    assert quantize(x, scale_rule="even", **BLOCKWISE).macro.tolist() == [0b01_10_11_11]
    options = {"scale_rule": "even", "macro_block": 128, "macro_search": "block_mantissas_fp8"}
    packed = quantize(x, **options)
    assert packed.macro.tolist() == [0b01_10_00_01]
    assert packed.scale.tolist() == [128, 128, 127, 127]
    expected = x.clone()
    expected[:32] = torch.tensor([1.25, -1.25, 2.5, -3.75, 5.0, -7.5, 10.0, 0.0]).repeat(4)
    expected[32:64] = 1.0
    expected[32] = 12.0
    assert torch.equal(packed.dequantize(), expected)
    assert torch.equal(fake_quantize(x, **options), expected)


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


@pytest.mark.parametrize("name", ["block_mantissas", "block_mantissas_fp8"])
@pytest.mark.parametrize("size", [32, 64, 256, "row"])
def test_other_macro_sizes_are_refused(size, name):
    with pytest.raises(ValueError, match=f"'{name}' needs macro_block=128"):
        fake_quantize(torch.ones(2, 256), macro_block=size, macro_search=name)
    with pytest.raises(ValueError, match=f"'{name}' needs macro_block=128"):
        MXFP4RLConfig(macro_block=size, macro_search=name)


def test_a_candidate_that_leaves_float32_counts_as_the_largest_number():
    # 0.97 * 2**128: with mantissa 2 it rounds to 6 * 2**125 * 1.5 = 1.125 * 2**128, stored as the largest float, error
    # 0.03; with mantissa 1 to 3 * 2**126 * 1.25 = 0.9375 * 2**128, error 0.0325.
    x = torch.full((1, 128), 0.97 * 2.0**128, dtype=torch.float64).float()
    packed = quantize(x, macro_block=128, macro_search="block_mantissas")
    assert packed.macro.tolist() == [[0b10101010]]
    assert torch.equal(packed.dequantize(), torch.full_like(x, torch.finfo(torch.float32).max))
    # 0.95: the error of mantissa 1 is 0.0125, that of the largest float 0.05.
    x = torch.full((1, 128), 0.95 * 2.0**128, dtype=torch.float64).float()
    packed = quantize(x, macro_block=128, macro_search="block_mantissas")
    assert packed.macro.tolist() == [[0b01010101]]
    assert packed.dequantize()[0, 0].item() == 0.9375 * 2.0**128
