# SPDX-License-Identifier: Apache-2.0
"""Macro-block factors: the static one never overshoots, the dynamic one never loses."""

import numpy as np
import pytest
import torch
from tables import RULES

from hf_mxfp4.numerics import fake_quantize, quantize
from hf_mxfp4.numerics.macro import DYNAMIC_CANDIDATES, dynamic_candidates, macro_factor, static_macro


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


@pytest.mark.parametrize(("rule", "size"), list(zip(RULES, (32, 64, 128, 256), strict=True)))
def test_dynamic_search_is_never_worse_than_no_factor(rule, size):
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(16, 500, generator=generator)
    x *= torch.exp2(torch.randint(-20, 20, (16, 500), generator=generator) * (torch.arange(16) % 2)[:, None])
    scheme = {"scale_rule": rule, "macro_block": size, "macro_search": "dynamic"}
    dynamic = squared_error_per_macro_block(x, size, **scheme)
    plain = squared_error_per_macro_block(x, size, scale_rule=rule)
    assert (dynamic <= plain * (1 + 1e-5)).all()
    assert (dynamic < 0.9 * plain).double().mean() > 0.3  # and it does help
    factors = quantize(x, **scheme).macro
    assert torch.equal(factors % 16, torch.zeros_like(factors)) and len(factors.unique()) > 8


@pytest.mark.parametrize("rule", RULES)
def test_dynamic_search_beats_every_single_candidate(rule):
    """Against each factor applied by hand to the whole tensor."""
    x = torch.randn(8, 256, generator=torch.Generator().manual_seed(1))
    dynamic = squared_error_per_macro_block(x, 128, scale_rule=rule, macro_block=128, macro_search="dynamic")
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
