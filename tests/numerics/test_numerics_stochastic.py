# SPDX-License-Identifier: Apache-2.0
"""Stochastic rounding: reproducible, unbiased, and only ever to a neighbour; by a generator, or by counted numbers."""

import pytest
import torch

from hf_mxfp4 import fake_quantize as fastest
from hf_mxfp4.numerics import E2M1_MAGNITUDES, QuantScheme, apply_scheme, fake_quantize, quantize
from hf_mxfp4.numerics.formats import round_stochastic
from hf_mxfp4.numerics.rng import counted_uniform


WORD = 2**32 - 1
SCHEMES = {
    "plain": {},
    "mbs128": {"macro_block": 128},
    "mbs64-dynamic": {"macro_block": 64, "macro_search": "dynamic"},
    "of": {"outlier_fallback": 0.5},
    "mse-mbs-row-of": {"scale_rule": "mse", "macro_block": "row", "outlier_fallback": 1.0},
}
every_scheme = pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES.keys())


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def stochastic(x: torch.Tensor, seed: int, **scheme) -> torch.Tensor:
    return fake_quantize(x, rounding="stochastic", generator=seeded(seed), **scheme)


@every_scheme
def test_same_seed_same_result(scheme):
    x = torch.randn(8, 150, generator=seeded(0))
    first = stochastic(x, 7, **scheme)
    assert torch.equal(first, stochastic(x, 7, **scheme))
    assert not torch.equal(first, stochastic(x, 8, **scheme))
    assert torch.equal(first, quantize(x, rounding="stochastic", generator=seeded(7), **scheme).dequantize())


def test_without_a_generator_the_global_one_is_used():
    x = torch.randn(8, 64, generator=seeded(0))
    torch.manual_seed(3)
    first = fake_quantize(x, rounding="stochastic")
    assert not torch.equal(first, fake_quantize(x, rounding="stochastic"))
    torch.manual_seed(3)
    assert torch.equal(first, fake_quantize(x, rounding="stochastic"))


def test_only_the_two_neighbours_are_reached():
    points = torch.tensor(sorted({sign * magnitude for magnitude in E2M1_MAGNITUDES for sign in (1, -1)}))
    y = torch.linspace(-6, 6, 385)
    draws = round_stochastic(y.expand(2000, -1).clone(), seeded(0))
    index = torch.searchsorted(points, y, right=True) - 1
    below = points[index]
    above = torch.where(below == y, below, points[(index + 1).clamp(max=len(points) - 1)])
    assert ((draws == below) | (draws == above)).all()
    # Both of them, where there are two and neither is rare.
    both = torch.minimum(y - below, above - y) > 0.1 * (above - below)
    assert ((draws == below).any(0) & (draws == above).any(0))[both].all()
    assert both.sum() > 250


@pytest.mark.parametrize("draw", [0.0, 1 - 2.0**-24], ids=["smallest", "largest"])
def test_the_extreme_draws_stay_on_the_grid(draw, monkeypatch):
    monkeypatch.setattr(torch, "rand", lambda shape, **_: torch.full(tuple(shape), draw))
    y = torch.tensor([0.01, 0.4, 0.9, 1.1, 1.6, 2.5, 3.5, 4.5, 5.9, 6.0, 7.0])
    below = torch.tensor([0.0, 0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 4.0, 6.0, 6.0])
    above = torch.tensor([0.5, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 6.0, 6.0, 6.0])
    for sign in (1, -1):
        assert torch.equal(round_stochastic(sign * y), sign * (above if draw else below))


def test_probability_is_the_distance_to_the_other_neighbour():
    y = torch.tensor([0.1, 0.6, 1.3, 1.9, 2.2, 3.75, 4.5, 5.5])
    above = torch.tensor([0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 6.0])
    probability = torch.tensor([0.2, 0.2, 0.6, 0.8, 0.2, 0.75, 0.25, 0.75], dtype=torch.float64)
    n = 100_000
    frequency = (round_stochastic(y.expand(n, -1).clone(), seeded(9)) == above).double().mean(0)
    assert ((frequency - probability).abs() < 5 * (probability * (1 - probability) / n).sqrt()).all()


@pytest.mark.parametrize(
    ("scheme", "gain", "relative_mse"),
    [
        ({}, 1.0, 0.0278),
        ({"macro_block": 128}, 1.0, 0.0240),
        ({"scale_rule": "floor"}, 0.987, 0.0249),
    ],
    ids=["rceil", "rceil-mbs128", "floor-shrinks"],
)
def test_gain_and_error_on_gaussian_data(scheme, gain, relative_mse):
    sigma = torch.exp2((torch.randperm(1024, generator=seeded(1)) + 0.5) / 1024)
    x = torch.randn(1024, 512, generator=seeded(2)) * sigma[:, None]
    out = stochastic(x, 3, **scheme).double()
    energy = x.double().square().sum()
    assert float((out * x).sum() / energy) == pytest.approx(gain, abs=0.002)
    assert float((out - x).square().sum() / energy) == pytest.approx(relative_mse, rel=0.015)


# ---- counted numbers, by a seed ----


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
def test_numbers_are_those_of_the_definition(seed):
    for draw in (0, 1):
        actual = counted_uniform((2, 3, 9), seed, draw, "cpu")
        assert actual.dtype == torch.float32
        key = seed & WORD, seed >> 32
        words = [
            [philox((row * 3 + column // 4, 0, draw, 0), key)[column % 4] for column in range(9)] for row in range(6)
        ]
        assert actual.view(6, 9).tolist() == [[(word >> 8) * 2.0**-24 for word in row] for row in words]


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
def test_codes_give_the_values_and_a_seed_repeats(scheme):
    x = torch.randn(35, 70, generator=seeded(0))
    for axis in (0, -1):
        values = apply_scheme(x, scheme, axis=axis, seed=9)
        assert torch.equal(values, apply_scheme(x, scheme, axis=axis, seed=9))
        packed = quantize(x, **vars(scheme), axis=axis, seed=9)
        assert torch.equal(packed.dequantize().view(torch.int32), values.view(torch.int32))
        assert not torch.equal(values, apply_scheme(x, scheme, axis=axis, seed=10))
        assert torch.equal(values, fastest(x, **vars(scheme), axis=axis, seed=9))


def test_rows_are_counted_over_all_leading_axes():
    x = torch.randn(6, 70, generator=seeded(1))
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
def test_wrong_seeds_raise(options, error, words):
    for function in (fake_quantize, quantize, fastest):
        with pytest.raises(error, match=words):
            function(torch.ones(2, 32), **options)
