# SPDX-License-Identifier: Apache-2.0
"""Counted random numbers, and stochastic rounding by a seed."""

import math

import pytest
import torch

from hf_mxfp4 import fake_quantize as fastest
from hf_mxfp4.numerics import QuantScheme, apply_scheme, fake_quantize, quantize
from hf_mxfp4.numerics.rng import counted_uniform


WORD = 2**32 - 1


def philox(counter: tuple[int, ...], key: tuple[int, int]) -> list[int]:
    """Philox4x32-10 in Python's integers, as Random123's `philox.h` states it."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        first, second = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (second >> 32) ^ c1 ^ k0, second & WORD, (first >> 32) ^ c3 ^ k1, first & WORD
        k0, k1 = (k0 + 0x9E3779B9) & WORD, (k1 + 0xBB67AE85) & WORD
    return [c0, c1, c2, c3]


def test_known_answers_of_random123():
    assert philox((0,) * 4, (0, 0)) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert philox((WORD,) * 4, (WORD, WORD)) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    counter = 0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344
    assert philox(counter, (0xA4093822, 0x299F31D0)) == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1, 2**32, 0xA4093822299F31D0, 2**64 - 1])
@pytest.mark.parametrize("draw", [0, 1])
def test_numbers_are_those_of_the_definition(seed, draw):
    actual = counted_uniform((2, 3, 9), seed, draw, "cpu")
    assert actual.dtype == torch.float32
    for row in range(6):
        for column in range(9):
            counter = row * 3 + column // 4
            word = philox((counter, 0, draw, 0), (seed & WORD, seed >> 32))[column % 4]
            assert actual.view(6, 9)[row, column].item() == (word >> 8) * 2.0**-24


def test_counters_beyond_32_bits():
    from hf_mxfp4.numerics.rng import _philox

    for counter in (2**32 - 1, 2**32, 5 * 2**40 + 17):
        words = _philox(torch.tensor([counter]), 2**63 + 5, 1)
        assert [int(w) for w in words] == philox((counter & WORD, counter >> 32, 1, 0), (5, 2**31))


def test_portions_do_not_matter():
    whole = counted_uniform((3, 40_000), 3, 0, "cpu")  # more than one portion
    assert torch.equal(whole[:2], counted_uniform((2, 40_000), 3, 0, "cpu"))
    assert torch.equal(whole[0, :8], counted_uniform((1, 40_000), 3, 0, "cpu")[0, :8])
    assert counted_uniform((0, 8), 3, 0, "cpu").shape == (0, 8)
    assert counted_uniform((4, 0), 3, 0, "cpu").shape == (4, 0)


def test_the_mean_is_unbiased():
    n = 40_000
    y = torch.tensor([0.1, 0.3, 0.75, 1.2, 2.7, 3.1, 5.3, 5.9, -0.05, -2.2])
    x = y.repeat(n, 1)
    x = torch.cat([x, torch.full((n, 1), 6.0), torch.zeros(n, 21)], dim=1)  # scale 1 in every block
    out = fake_quantize(x, rounding="stochastic", seed=12)[:, : len(y)].double()
    z = (out.mean(0) - y.double()) / (out.std(0) / math.sqrt(n))
    assert z.abs().max() < 4.0
    assert (out.std(0) > 0).all()


@pytest.mark.parametrize(
    "scheme",
    [
        QuantScheme("rceil", None, "static", 0.5, "stochastic"),
        QuantScheme("mse", 64, "dynamic", 0.3, "stochastic"),
        QuantScheme("even", 128, "static", 1.0, "stochastic", 32),
        QuantScheme("even", 128, "blockwise", None, "stochastic"),
        QuantScheme("floor", "row", "static", 0.5, "stochastic", fallback_rate=0.2),
    ],
    ids=str,
)
@pytest.mark.parametrize("axis", [0, -1])
def test_codes_give_the_values_and_a_seed_repeats(scheme, axis):
    x = torch.randn(35, 70, generator=torch.Generator().manual_seed(0))
    values = apply_scheme(x, scheme, axis=axis, seed=9)
    assert torch.equal(values, apply_scheme(x, scheme, axis=axis, seed=9))
    packed = quantize(x, **vars(scheme), axis=axis, seed=9)
    assert torch.equal(packed.dequantize().view(torch.int32), values.view(torch.int32))
    assert not torch.equal(values, apply_scheme(x, scheme, axis=axis, seed=10))
    assert torch.equal(values, fastest(x, **vars(scheme), axis=axis, seed=9))


def test_rows_are_counted_over_all_leading_axes():
    x = torch.randn(6, 70, generator=torch.Generator().manual_seed(1))
    flat = fake_quantize(x, rounding="stochastic", seed=4)
    assert torch.equal(fake_quantize(x.view(2, 3, 70), rounding="stochastic", seed=4).view(6, 70), flat)
    assert torch.equal(fake_quantize(x[:2], rounding="stochastic", seed=4), flat[:2])
    assert torch.equal(fake_quantize(x.t(), rounding="stochastic", seed=4, axis=0), flat.t())


def test_the_residual_has_numbers_of_its_own():
    a, b = (counted_uniform((4, 64), 1, draw, "cpu") for draw in (0, 1))
    assert (a != b).all()


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"seed": 1}, ValueError, "seed has no effect on rounding='nearest'"),
        ({"seed": -1, "rounding": "stochastic"}, ValueError, "seed=-1 must be in"),
        ({"seed": 2**64, "rounding": "stochastic"}, ValueError, "must be in"),
        ({"seed": 1.0, "rounding": "stochastic"}, TypeError, "float"),
        ({"seed": True, "rounding": "stochastic"}, TypeError, "bool"),
        ({"seed": 1, "generator": torch.Generator(), "rounding": "stochastic"}, ValueError, "not both"),
    ],
)
@pytest.mark.parametrize("function", [fake_quantize, quantize, fastest])
def test_wrong_seeds_raise(function, options, error, words):
    with pytest.raises(error, match=words):
        function(torch.ones(2, 32), **options)
