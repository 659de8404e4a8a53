# SPDX-License-Identifier: Apache-2.0
"""Stochastic rounding: reproducible, unbiased, and only ever to a neighbour."""

import pytest
import torch

from hf_mxfp4.numerics import E2M1_MAGNITUDES, fake_quantize, quantize
from hf_mxfp4.numerics.formats.e2m1 import round_stochastic


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


def test_one_generator_gives_new_draws_every_time():
    x, generator = torch.randn(8, 64, generator=seeded(0)), seeded(1)
    draws = [fake_quantize(x, rounding="stochastic", generator=generator) for _ in range(3)]
    assert not torch.equal(draws[0], draws[1]) and not torch.equal(draws[1], draws[2])


@every_scheme
def test_scales_and_factors_are_those_of_rounding_to_nearest(scheme):
    x = torch.randn(8, 150, generator=seeded(0))
    packed, nearest = quantize(x, rounding="stochastic", generator=seeded(1), **scheme), quantize(x, **scheme)
    assert torch.equal(packed.scale, nearest.scale)
    assert packed.macro is None or torch.equal(packed.macro, nearest.macro)


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


def test_beyond_the_grid_it_saturates():
    y = torch.tensor([6.0, 6.1, 7.9, 100.0, 3e38])
    assert torch.equal(round_stochastic(torch.cat([y, -y]), seeded(0)), torch.tensor([6.0] * 5 + [-6.0] * 5))


def test_grid_points_stay_where_they_are():
    points = torch.tensor([sign * magnitude for magnitude in E2M1_MAGNITUDES for sign in (1, -1)])
    draws = round_stochastic(points.expand(5000, -1).clone(), seeded(0))
    assert torch.equal(draws, points.expand(5000, -1))


@pytest.mark.parametrize("draw", [0.0, 1 - 2.0**-24], ids=["smallest", "largest"])
def test_the_extreme_draws_stay_on_the_grid(draw, monkeypatch):
    monkeypatch.setattr(torch, "rand", lambda shape, **_: torch.full(tuple(shape), draw))
    y = torch.tensor([0.01, 0.4, 0.9, 1.1, 1.6, 2.5, 3.5, 4.5, 5.9, 6.0, 7.0])
    below = torch.tensor([0.0, 0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 4.0, 6.0, 6.0])
    above = torch.tensor([0.5, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 6.0, 6.0, 6.0])
    for sign in (1, -1):
        assert torch.equal(round_stochastic(sign * y), sign * (above if draw else below))


@pytest.mark.parametrize(
    "scheme",
    [{}, {"scale_rule": "rceil", "macro_block": 128}, {"outlier_fallback": 1.0}],
    ids=["plain", "mbs128", "of1"],
)
def test_the_mean_of_many_draws_is_the_input(scheme):
    x = torch.randn(64, generator=seeded(5))
    draws = stochastic(x.expand(40_000, -1), 6, **scheme).double()
    mean, spread = draws.mean(0), draws.std(0)
    # 5 sigma on each of 64 elements; the last term is the float32 rounding of the factor.
    bound = 5 * spread / 40_000**0.5 + 1e-6 * x.abs()
    assert ((mean - x.double()).abs() <= bound).all()
    assert (spread > 0).double().mean() > 0.9


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
    x = torch.randn(1024, 1024, generator=seeded(2)) * sigma[:, None]
    out = stochastic(x, 3, **scheme).double()
    energy = x.double().square().sum()
    assert float((out * x).sum() / energy) == pytest.approx(gain, abs=0.002)
    assert float((out - x).square().sum() / energy) == pytest.approx(relative_mse, rel=0.015)


@pytest.mark.parametrize("draw", [0.0, 0.5, 1 - 2.0**-24], ids=["least", "middle", "largest"])
def test_grid_points_stay_whatever_is_drawn(monkeypatch, draw):
    monkeypatch.setattr(torch, "rand", lambda shape, **options: torch.full(tuple(shape), draw))
    points = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.5, -6.0])
    assert torch.equal(round_stochastic(points.clone()), points)
