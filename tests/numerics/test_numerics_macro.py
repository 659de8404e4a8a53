# SPDX-License-Identifier: Apache-2.0
"""Macro-block factors: the static one never overshoots, the dynamic one never loses; two mantissa bits per block."""

import math

import numpy as np
import pytest
import torch
from tables import RULES

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.numerics import E2M1_MAGNITUDES, fake_quantize, quantize
from hf_mxfp4.numerics.macro import (
    DYNAMIC_CANDIDATES,
    dynamic_candidates,
    macro_factor,
    mantissa_factor,
    pack_mantissas,
    static_macro,
    unpack_mantissas,
)


def grid_top(amax: torch.Tensor) -> torch.Tensor:
    """6 * 2**k, the smallest one that is at least amax (float64)."""
    mantissa, exponent = torch.frexp(amax.double())  # mantissa in [1/2, 1)
    return torch.where(mantissa <= 0.75, 0.75, 1.5).double() * torch.exp2(exponent.double())


def squared_error_per_macro_block(x: torch.Tensor, size: int, **scheme) -> torch.Tensor:
    error = (fake_quantize(x, **scheme).double() - x.double()).square()
    return torch.nn.functional.pad(error, (0, -x.shape[-1] % size)).unflatten(-1, (-1, size)).sum(-1)


def test_factor_of_every_byte():
    for dtype in (torch.uint8, torch.int32):
        factors = macro_factor(torch.arange(256, dtype=torch.int32).to(dtype))
        assert factors.dtype == torch.float32
        assert factors.tolist() == [1 + byte / 256 for byte in range(256)]


def test_static_factor_of_every_bfloat16_mantissa():
    """A product of eight by nine bits is exact: f * amax stays at or below the top, within one 256th of it."""
    exponents = torch.tensor([-124, -60, -1, 0, 1, 60, 126])[:, None]
    amax = ((128 + torch.arange(128)) / 128 * torch.exp2(exponents.double())).float()
    factor = macro_factor(static_macro(amax))
    product, top = factor.double() * amax.double(), grid_top(amax)
    assert (product <= top).all()
    assert (product > top * (1 - 1 / 256)).all()
    assert torch.equal((factor * amax).double(), product)
    # The next larger byte would overshoot.
    assert (((factor + 1 / 256).double() * amax.double() > top) | (factor == 2 - 1 / 256)).all()


def test_static_factor_of_every_float32_mantissa():
    """Over all 2**23 mantissas the product exceeds the top by less than one unit in the last place."""
    for start in range(0, 1 << 23, 1 << 20):
        amax = (torch.arange(start, start + (1 << 20), dtype=torch.int32) + 0x3F800000).view(torch.float32)
        m8 = static_macro(amax)
        assert int(m8.min()) >= 0 and int(m8.max()) <= 255
        ratio = macro_factor(m8).double() * amax.double() / grid_top(amax)
        assert float(ratio.max()) <= 1 + 2.0**-23
        assert float(ratio.min()) > 1 - 1 / 256


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


def test_dynamic_candidates_are_sixteenths():
    assert DYNAMIC_CANDIDATES == 16
    factors = macro_factor(dynamic_candidates(torch.ones(3))).tolist()
    assert factors == [[1 + candidate / 16] * 3 for candidate in range(16)]


@pytest.mark.parametrize("rule", RULES)
def test_dynamic_search_beats_every_single_candidate(rule):
    """Against each factor applied by hand to the whole tensor."""
    x = torch.randn(8, 256, generator=torch.Generator().manual_seed(1))
    dynamic = squared_error_per_macro_block(x, 128, scale_rule=rule, macro_block=128, macro_search="dynamic")
    factors = quantize(x, scale_rule=rule, macro_block=128, macro_search="dynamic").macro
    assert not (factors % 16).any() and len(factors.unique()) > 4
    for candidate in range(16):
        factor = 1 + candidate / 16
        error = (fake_quantize(x * factor, scale_rule=rule) / factor - x).double().square()
        assert (dynamic <= error.unflatten(-1, (-1, 128)).sum(-1) * (1 + 1e-5)).all(), factor


def test_dynamic_search_does_not_depend_on_the_scale_of_the_data():
    x = torch.randn(4, 256, generator=torch.Generator().manual_seed(2))
    factors = quantize(x, macro_block=128, macro_search="dynamic").macro
    for exponent in (-90, -40, 40, 110):
        assert torch.equal(quantize(x * 2.0**exponent, macro_block=128, macro_search="dynamic").macro, factors)


def test_one_large_macro_block_does_not_disturb_its_neighbours():
    x = torch.randn(1, 384, generator=torch.Generator().manual_seed(3))
    x[:, 128:256] *= 2.0**100
    for search in ("static", "dynamic"):
        out = fake_quantize(x, macro_block=128, macro_search=search)
        for start in (0, 128, 256):
            part = fake_quantize(x[:, start : start + 128], macro_block=128, macro_search=search)
            assert torch.equal(out[:, start : start + 128], part)


def test_factors_are_applied_in_float32():
    """In bfloat16, 1 + 1 / 256 would be 1."""
    x = torch.full((32,), 2.0 * 0.995, dtype=torch.float32)
    packed = quantize(x, macro_block=32, scale_rule="floor")
    assert packed.macro.item() % 2 == 1
    assert packed.dequantize()[0].item() == pytest.approx(x[0].item(), rel=1 / 256)
    assert packed.dequantize()[0] < x[0] * (1 + 1 / 256)


@pytest.mark.parametrize("options", [{"macro_search": "dynamic"}, {"scale_rule": "mse", "macro_block": None}], ids=str)
def test_searches_do_not_depend_on_the_order_of_summation(options):
    """Reversing the elements of every block reverses every sum; the choices must stay the same."""
    x = torch.randn(512, 1024, generator=torch.Generator().manual_seed(0))
    options = {"macro_block": 128, **options}
    there = fake_quantize(x, **options)
    back = fake_quantize(x.flip(-1), **options).flip(-1)
    assert torch.equal(there, back)


@pytest.mark.parametrize("search", ["dynamic", "blockwise"])
def test_rows_of_a_large_tensor_choose_as_they_do_alone(search):
    # So large that its candidates are computed in portions of rows.
    x = torch.randn(24, 16, 512)
    options = {"scale_rule": "even", "macro_block": 128, "macro_search": search}
    alone = torch.stack([fake_quantize(rows, **options) for rows in x])
    assert torch.equal(fake_quantize(x, **options), alone)


# ---- two mantissa bits per block, in the byte of a macro block ------------------------------------------------------


BLOCKWISE = {"macro_block": 128, "macro_search": "blockwise"}
OFFSETS = {"rceil": None, "floor": (0,), "mse": (0, 1, -1)}


def gaussian(rows=256, columns=512, seed=0):
    generator = torch.Generator().manual_seed(seed)
    spread = torch.exp2(torch.rand(rows, 1, generator=generator))
    return torch.randn(rows, columns, generator=generator) * spread


def to_grid(y):
    """Nearest E2M1 value in plain Python, ties to the even code."""
    magnitude = min(abs(y), 6.0)
    code = min(range(8), key=lambda c: (abs(E2M1_MAGNITUDES[c] - magnitude), c % 2))
    return math.copysign(E2M1_MAGNITUDES[code], y)


def reference_block(block, rule):
    """Least squared error over mantissas (and exponents, for mse), by brute force in float64."""
    best = None
    for m in range(4):
        g = np.float32(1 + m / 4)
        z = [float(np.float32(v) / g) for v in block]
        exponent = math.frexp(max(abs(v) for v in z))[1] - 1
        if rule == "rceil":
            candidates = [math.ceil(math.log2(max(abs(v) for v in z) / 6))]
        else:
            candidates = [exponent - 2 + offset for offset in OFFSETS[rule]]
        errors = []
        for e in candidates:
            values = [to_grid(v / 2.0**e) * 2.0**e * float(g) for v in z]
            errors.append((sum((a - b) ** 2 for a, b in zip(values, block, strict=True)), values))
        error, values = min(errors, key=lambda pair: pair[0])
        if best is None or error < best[0] * (1 - 1e-6):
            best = (error, values)
    return best[1]


@pytest.mark.parametrize("rule", ["rceil", "floor", "mse"])
def test_equals_a_brute_force_search(rule):
    x = gaussian(rows=4, columns=128)
    expected = [[v for b in range(4) for v in reference_block(row[32 * b : 32 * b + 32], rule)] for row in x.tolist()]
    assert torch.equal(fake_quantize(x, scale_rule=rule, **BLOCKWISE), torch.tensor(expected))


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


def test_both_operands_of_a_model_get_it():
    config = MXFP4RLConfig(macro_search="block_mantissas")
    assert config.weight_scheme.macro_search == config.activation_scheme.macro_search == "blockwise"
    assert MXFP4RLConfig.from_dict(config.to_dict()) == config


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
