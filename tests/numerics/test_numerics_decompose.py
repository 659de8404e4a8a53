# SPDX-License-Identifier: Apache-2.0
"""The three-way error decomposition: exact sums, the published ratios, angles, and the error of every scale rule."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import MACROS, RULES, gaussian

from hf_mxfp4.numerics import QuantScheme, decompose, decompose_scheme, fake_quantize


def gaussian_octave(rows: int = 256, columns: int = 512, seed: int = 0) -> torch.Tensor:
    """Gaussian rows, their sigma log-uniform over one octave (evenly spread, in random order): every phase between two
    powers of two counts the same."""
    generator = torch.Generator().manual_seed(seed)
    sigma = torch.exp2((torch.randperm(rows, generator=generator) + 0.5) / rows)
    return torch.randn(rows, columns, generator=generator) * sigma[:, None]


@settings(max_examples=20, deadline=None, derandomize=True, database=None)
@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(0, 34),
    columns=st.integers(1, 140),
    centre=st.integers(-149, 127),
    spread=st.integers(0, 250),
    rule=st.sampled_from(RULES),
    macro=st.sampled_from(MACROS),
    fallback=st.sampled_from([None, 0.5, 1.0, 0.7]),
    rounding=st.sampled_from(["nearest", "stochastic"]),
    block_rows=st.sampled_from([1, 32]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_components_sum_to_the_error_at_any_magnitude(
    seed, rows, columns, centre, spread, rule, macro, fallback, rounding, block_rows, dtype
):
    generator = torch.Generator().manual_seed(seed)
    exponent = centre - (torch.rand(rows, columns, generator=generator) * spread).floor()
    mantissa = 1 + torch.rand(rows, columns, generator=generator)
    sign = torch.randint(0, 2, (rows, columns), generator=generator) * 2 - 1
    largest = torch.finfo(dtype).max
    x = (sign * mantissa.double() * torch.exp2(exponent.double())).clamp(-largest, largest).to(dtype)
    assert x.isfinite().all()
    options = vars(QuantScheme(rule, *macro, fallback, rounding, block_rows))
    torch.manual_seed(5)
    parts = decompose(x, **options)
    torch.manual_seed(5)
    error = fake_quantize(x.float(), **options).double() - x.double()
    for part in (parts.scale_bias, parts.deadzone, parts.grid):
        assert part.dtype == torch.float64
        assert part.shape == x.shape
        assert part.isfinite().all()
    assert torch.equal(parts.scale_bias + parts.deadzone + parts.grid, error)
    assert torch.equal(parts.total, error)


@pytest.mark.parametrize("rule", RULES)
def test_every_component_by_its_definition(rule):
    """In plain float64: the deadzone below amax / 24, the grid at the ideal scale amax / 6 beside it."""
    x = gaussian(4, 96, seed=3)
    parts = decompose(x, scale_rule=rule)
    blocks = x.double().view(4, 3, 32)
    ideal_scale = blocks.abs().amax(-1, keepdim=True) / 6
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    magnitude = blocks.abs() / ideal_scale
    nearest = grid[(magnitude.unsqueeze(-1) - grid).abs().argmin(-1)]
    ideal = (blocks.sign() * nearest * ideal_scale).view(4, 96)
    deadzone = (magnitude < 0.25).view(4, 96)
    quantized = fake_quantize(x, scale_rule=rule).double()

    def close(part, expected):
        torch.testing.assert_close(part, torch.where(deadzone, 0, expected), rtol=0, atol=1e-6)

    close(parts.grid, ideal - x.double())
    close(parts.scale_bias, quantized - ideal)
    assert torch.equal(parts.deadzone, torch.where(deadzone, quantized - x.double(), 0))
    assert parts.deadzone_fraction == deadzone.double().mean().item()
    assert parts.zero_fraction == (quantized == 0).double().mean().item()
    energy = {name: float(getattr(parts, name).square().sum()) for name in ("scale_bias", "deadzone", "grid")}
    whole = float((quantized - x.double()).square().sum())
    assert parts.energy_ratio == pytest.approx({name: value / whole for name, value in energy.items()})
    assert parts.relative_mse == pytest.approx(whole / float(x.double().square().sum()))
    assert parts.sqnr_db == pytest.approx(-10 * math.log10(parts.relative_mse))
    cosine = float((parts.scale_bias * parts.grid).sum()) / math.sqrt(energy["scale_bias"] * energy["grid"])
    assert parts.cosine_scale_grid == pytest.approx(cosine)


@pytest.mark.parametrize(
    ("options", "scale_bias", "deadzone", "grid", "cosine", "zeros"),
    [
        # arXiv 2605.20402 reports 1.725 / .026 / .703 / -.657 over the weights of a model.
        ({}, 1.736, 0.020, 0.729, -0.660, 0.111),
        ({"macro_block": 128}, 1.375, 0.023, 0.840, -0.576, 0.093),
        ({"scale_rule": "even"}, 1.754, 0.022, 0.789, -0.663, 0.096),
    ],
    ids=str,
)
def test_gaussian_reference_values(options, scale_bias, deadzone, grid, cosine, zeros):
    parts = decompose(gaussian_octave(1024, 1024), **options)
    ratio = parts.energy_ratio
    assert ratio["scale_bias"] == pytest.approx(scale_bias, rel=0.01)
    assert ratio["deadzone"] == pytest.approx(deadzone, abs=0.0007)  # the reference has two digits
    assert ratio["grid"] == pytest.approx(grid, rel=0.01)
    assert parts.cosine_scale_grid == pytest.approx(cosine, rel=0.01)
    assert parts.deadzone_fraction == pytest.approx(0.078, rel=0.01)
    assert parts.zero_fraction == pytest.approx(zeros, rel=0.015)


def test_bad_input():
    for bad in (math.nan, math.inf, -math.inf):
        x = torch.ones(2, 64)
        x[1, 5] = bad
        with pytest.raises(ValueError, match="NaN or infinity"):
            decompose(x)
    with pytest.raises(TypeError, match="int64"):
        decompose(torch.arange(4))
    with pytest.raises(ValueError, match="scalar"):
        decompose(torch.tensor(1.0))
    with pytest.raises(ValueError, match="scale_rule='ceil'"):
        decompose(torch.ones(4), scale_rule="ceil")


def test_zeros_and_exact_input_have_no_ratios():
    zeros = decompose(torch.zeros(2, 40))
    assert not zeros.total.any()
    assert zeros.deadzone_fraction == 0
    assert zeros.zero_fraction == 0
    assert zeros.energy == 0
    assert math.isnan(zeros.relative_mse)
    assert math.isnan(zeros.sqnr_db)
    exact = decompose(torch.tensor([6.0, 4.0, -0.5, 0.0]))
    assert not exact.total.any()
    assert exact.relative_mse == 0
    assert exact.sqnr_db == math.inf
    assert all(math.isnan(value) for value in exact.energy_ratio.values())
    assert len(exact.energy_ratio) == 3
    assert math.isnan(exact.cosine_scale_grid)


def test_axis_and_scheme():
    x = gaussian(70, 6, seed=8)
    by_axis = decompose(x, axis=0, macro_block=32)
    moved = decompose(x.t().contiguous(), macro_block=32)
    for name in ("scale_bias", "deadzone", "grid"):
        assert torch.equal(getattr(by_axis, name), getattr(moved, name).t())
    scheme = QuantScheme("even", 64, "static", 0.5, "nearest", 32)
    error = fake_quantize(x, axis=0, **vars(scheme)).double() - x.double()
    assert torch.equal(decompose_scheme(x, scheme, axis=0).total, error)
    assert not decompose(x.requires_grad_()).total.requires_grad


def test_tiles_have_their_own_deadzone():
    """Of the tile's largest magnitude, not of the row's."""
    x = torch.full((32, 32), 1.0)
    x[0, 0] = 30.0  # a quarter step is 1.25
    parts = decompose(x, block_rows=32)
    assert parts.deadzone_fraction == 1023 / 1024
    assert parts.scale_ratio.tolist() == pytest.approx([8 / 5])
    assert decompose(x).deadzone_fraction == 31 / 1024
    assert torch.equal(parts.deadzone[1:], torch.full((31, 32), -1.0, dtype=torch.float64))


def test_scale_ratio_is_literal():
    x = torch.zeros(4, 32)
    x[0, 0], x[1, 0], x[2, 0] = 6.0, 4.0, 7.0  # scales 1, 1 and 2 under rceil; the last block is empty
    parts = decompose(x)
    assert parts.scale_ratio.tolist() == pytest.approx([1.0, 1.5, 12 / 7])
    assert parts.scale_ratio_log2.tolist() == pytest.approx([0.0, math.log2(1.5), math.log2(12 / 7)])
    assert decompose(x, scale_rule="floor").scale_ratio.tolist() == pytest.approx([1.0, 1.5, 6 / 7])
