# SPDX-License-Identifier: Apache-2.0
"""Sums of error statistics: literal values, an oracle that knows nothing of blocks, merging and chunking; and random
data to measure."""

import dataclasses
import json
import math

import pytest
import torch
from tables import gaussian

from hf_mxfp4.lab import ErrorStatistics, error_statistics, sample
from hf_mxfp4.lab.errors import statistics as module
from hf_mxfp4.numerics import QuantScheme, apply_scheme, decompose_scheme, parse_scheme


RCEIL = QuantScheme()
TEXTS = ("rceil", "floor", "even", "mse", "rceil+mbs128", "rceil+mbsrow", "rceil+mbs128-dynamic+of0.5")
SCHEMES = [parse_scheme(text) for text in (*TEXTS, "even+mbs128-blockwise")]


def assert_close(a: ErrorStatistics, b: ErrorStatistics):
    for field in dataclasses.fields(ErrorStatistics):
        mine = getattr(a, field.name)
        theirs = getattr(b, field.name)
        if isinstance(mine, float):
            assert mine == pytest.approx(theirs, rel=1e-11, abs=1e-12), field.name
        else:
            assert mine == theirs, field.name


def test_a_block_by_hand():
    # amax 7: s* = 7/6, s = 2. 7 -> 8 (ideal 7); 2 -> 2 (ideal 1.5 * 7/6 = 1.75); 0.25 < 7/24 -> 0.
    x = torch.zeros(1, 32)
    x[0, :3] = torch.tensor([7.0, 2.0, 0.25])
    s = error_statistics(x, RCEIL)
    assert (s.elements, s.blocks, s.deadzone_count, s.zero_count) == (32, 1, 30, 1)
    assert s.energy == 49 + 4 + 0.0625
    assert s.scale_bias == 1 + 0.0625
    assert s.deadzone == 0.0625
    assert s.grid == 0.0625
    assert s.total == 1 + 0.0625
    assert s.scale_dot_grid == -0.0625
    assert s.quantized_dot == 7 * 8 + 2 * 2
    assert s.unmasked_scale == s.scale_bias
    assert s.unmasked_deadzone == 0.0625
    assert s.unmasked_dot == 0
    assert s.gamma_mean == pytest.approx(12 / 7, rel=1e-15)
    assert s.gamma_variance == pytest.approx(0, abs=1e-15)
    assert s.delta_mean == pytest.approx(math.log2(12 / 7), rel=1e-15)
    # delta = 0.778: bin (0.778 + 2) * 16 = 44.4
    assert s.histogram == tuple(int(i == 44) for i in range(64))
    assert s.relative_mse == pytest.approx(1.0625 / 53.0625)
    assert s.sqnr_db == pytest.approx(10 * math.log10(53.0625 / 1.0625))
    assert s.energy_ratio == pytest.approx({"scale_bias": 1, "deadzone": 1 / 17, "grid": 1 / 17})
    assert s.cosine_scale_grid == pytest.approx(-0.0625 / math.sqrt(1.0625 * 0.0625))
    assert s.gain == pytest.approx(60 / 53.0625)
    assert s.floor_relative_mse == pytest.approx((0.0625 + 0.0625) / 53.0625)
    assert (s.deadzone_fraction, s.zero_fraction) == (30 / 32, 1 / 32)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_against_whole_tensors(scheme):
    """The same quantities from Q, from a Q* found by trying all grid points, and from the mask |x| < amax / 24."""
    x = gaussian(24, 96, seed=1) * torch.logspace(-3, 3, 24).unsqueeze(1)
    s = error_statistics(x, scheme)
    wide = x.double()
    quantized = apply_scheme(x, scheme).double()
    blocks = wide.view(24, 3, 32)
    amax = blocks.abs().amax(-1, keepdim=True)
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    nearest = (blocks.abs().unsqueeze(-1) - grid * (amax / 6).unsqueeze(-1)).abs().argmin(-1)
    ideal = (grid[nearest] * (amax / 6) * blocks.sign()).view_as(wide)
    hidden = (blocks.abs() < amax / 24).view_as(wide)
    error = quantized - wide
    scale = quantized - ideal
    rest = ideal - wide
    expected = {
        "energy": wide.square().sum(),
        "total": error.square().sum(),
        "deadzone": error[hidden].square().sum(),
        "scale_bias": scale[~hidden].square().sum(),
        "grid": rest[~hidden].square().sum(),
        "scale_dot_grid": (scale * rest)[~hidden].sum(),
        "quantized_dot": (quantized * wide).sum(),
        "unmasked_scale": scale.square().sum(),
        "unmasked_deadzone": rest[hidden].square().sum(),
        "unmasked_dot": (scale * rest)[hidden].sum(),
    }
    for name, value in expected.items():
        assert getattr(s, name) == pytest.approx(float(value), rel=1e-5, abs=1e-9 * s.energy), name
    assert s.deadzone_count == int(hidden.sum())
    assert s.zero_count == int(((quantized == 0) & (wide != 0)).sum())
    parts = decompose_scheme(x, scheme)
    assert s.energy_ratio == pytest.approx(parts.energy_ratio, rel=1e-12)
    assert s.gain == pytest.approx(float(((parts.total + x.double()) * x.double()).sum()) / parts.energy, rel=1e-12)
    assert s.gamma_mean == pytest.approx(float(parts.scale_ratio.mean()), rel=1e-12)
    assert s.delta_variance == pytest.approx(float(parts.scale_ratio_log2.var(correction=0)), rel=1e-9)
    assert sum(s.histogram) == s.blocks == parts.scale_ratio.numel()


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_chunks_merge_to_the_whole(scheme, monkeypatch):
    x = gaussian(48, 512, seed=2)
    whole = error_statistics(x, scheme)
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 512)
    assert_close(error_statistics(x, scheme), whole)
    assert_close(error_statistics(x[:17], scheme) + error_statistics(x[17:], scheme), whole)


def test_axes_and_layouts():
    x = gaussian(4, 64, 96, seed=5)
    along_last = sum((error_statistics(part, RCEIL) for part in x), ErrorStatistics())
    assert_close(error_statistics(x, RCEIL), along_last)
    assert_close(error_statistics(x.transpose(1, 2), RCEIL, axis=1), along_last)
    assert_close(error_statistics(x.transpose(1, 2).contiguous(), RCEIL, axis=1), along_last)
    assert_close(error_statistics(x[0, 0], RCEIL), error_statistics(x[:1, 0], RCEIL))


def test_tiles_do_not_straddle_matrices(monkeypatch):
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 32 * 64)
    x = gaussian(3, 40, 64, seed=6)
    scheme = QuantScheme(block_rows=32)
    s = error_statistics(x, scheme)
    error = apply_scheme(x, scheme).double() - x.double()
    assert s.total == pytest.approx(float(error.square().sum()), rel=1e-12)
    assert s.blocks == 3 * 2 * 2
    parts = [decompose_scheme(part, scheme) for part in x]
    assert s.deadzone_count == round(sum(part.deadzone_fraction for part in parts) * 40 * 64)


def test_all_zero_and_empty_tensors():
    for x in (torch.zeros(4, 64), torch.zeros(0, 64), torch.zeros(4, 0)):
        s = error_statistics(x, RCEIL)
        assert (s.elements, s.blocks, s.total) == (x.numel(), 0, 0.0)
        assert math.isnan(s.relative_mse)
        assert math.isnan(s.sqnr_db)
        assert math.isnan(s.gain)
        assert math.isnan(s.gamma_mean)
        assert math.isnan(s.delta_variance)
        assert all(math.isnan(value) for value in (*s.energy_ratio.values(), *s.paper_cosines.values()))
    assert error_statistics(torch.zeros(0, 64), RCEIL) == ErrorStatistics()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_is_refused(bad):
    x = gaussian(4, 64)
    x[2, 5] = bad
    with pytest.raises(ValueError, match="NaN or infinity"):
        error_statistics(x, RCEIL)


def test_json_round_trip_is_exact():
    s = error_statistics(gaussian(16, 64), QuantScheme("even"))
    assert ErrorStatistics.from_dict(json.loads(json.dumps(s.to_dict()))) == s


@pytest.mark.parametrize("distribution", ["gaussian", "laplace", "student-t", "uniform", "outliers"])
def test_samples(distribution):
    x = sample(distribution, 2**16 - 5, seed=3)
    assert x.shape == (64, 1024)
    assert x.dtype == torch.float32
    assert x.isfinite().all()
    assert torch.equal(x, sample(distribution, 2**16, seed=3))
    assert not torch.equal(x, sample(distribution, 2**16, seed=4))


def test_samples_leave_the_global_generator_alone():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    sample("gaussian", 1024, seed=3)
    assert torch.equal(torch.rand(3), expected)


def test_eight_channels_have_outliers():
    sizes = sample("outliers", 2**16, seed=3).square().mean(dim=0).sqrt()
    assert int((sizes > 10).sum()) == 8


def test_standard_deviations_of_rows_are_spread_over_an_octave():
    largest = sample("uniform", 2**16, seed=3).abs().amax(dim=-1)
    assert 0.97 < largest.min() < 1.1
    assert 1.9 < largest.max() <= 2.0
