# SPDX-License-Identifier: Apache-2.0
"""The three-way error decomposition: exact sums, the published ratios, angles, and the error of every scale rule."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import MACROS, RULES

from hf_mxfp4.numerics import QuantScheme, decompose, decompose_scheme, fake_quantize


def gaussian_octave(rows: int = 256, columns: int = 512, seed: int = 0) -> torch.Tensor:
    """Gaussian rows, their sigma log-uniform over one octave (evenly spread, in random order): every phase between two
    powers of two counts the same."""
    generator = torch.Generator().manual_seed(seed)
    sigma = torch.exp2((torch.randperm(rows, generator=generator) + 0.5) / rows)
    return torch.randn(rows, columns, generator=generator) * sigma[:, None]


def check_exact(x: torch.Tensor, **options) -> None:
    parts = decompose(x, generator=torch.Generator().manual_seed(5), **options)
    values = fake_quantize(x.float(), generator=torch.Generator().manual_seed(5), **options)
    error = values.double() - x.double()
    for part in (parts.scale_bias, parts.deadzone, parts.grid):
        assert part.dtype == torch.float64 and part.shape == x.shape and part.isfinite().all()
    assert torch.equal(parts.scale_bias + parts.deadzone + parts.grid, error)
    assert torch.equal(parts.total, error)


#: Options of schemes; with `rceil`, whose steps are never finer than the ideal, the paper's terms are orthogonal.
OPTIONS = {
    "plain": {},
    "static": {"macro_block": 128},
    "row": {"macro_block": "row"},
    "dynamic": {"macro_block": 32, "macro_search": "dynamic"},
    "blockwise": {"macro_block": 128, "macro_search": "blockwise"},
    "tiles": {"block_rows": 32},
    "static-tiles": {"block_rows": 32, "macro_block": 64},
}
#: With these they are not.
FALLBACK = {
    "fallback": {"outlier_fallback": 0.5},
    "selective": {"outlier_fallback": 1.0, "fallback_rate": 0.3, "macro_block": 128},
    "selective-tiles": {"outlier_fallback": 0.5, "fallback_rate": 0.5, "block_rows": 32},
    "stochastic": {"rounding": "stochastic"},
}


every_scheme = pytest.mark.parametrize("options", [*OPTIONS.values(), *FALLBACK.values()], ids=[*OPTIONS, *FALLBACK])


@every_scheme
def test_components_sum_to_the_error(options):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 2, 150, generator=generator)
    x[1] *= torch.exp2(torch.randint(-60, 60, (2, 150), generator=generator))
    for rule in RULES:
        check_exact(x, scale_rule=rule, **options)


@settings(max_examples=50, deadline=None, derandomize=True, database=None)
@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(0, 34),
    columns=st.integers(1, 140),
    centre=st.integers(-149, 127),
    spread=st.integers(0, 250),
    rule=st.sampled_from(RULES),
    macro=st.sampled_from(MACROS),
    fallback=st.sampled_from([(None, None), (0.5, None), (1.0, None), (0.7, 0.3)]),
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
    check_exact(x, **vars(QuantScheme(rule, *macro, fallback[0], rounding, block_rows, fallback[1])))


@pytest.mark.parametrize("rule", RULES)
def test_every_component_by_its_definition(rule):
    """In plain float64: the deadzone below amax / 24, the grid at the ideal scale amax / 6 beside it."""
    x = torch.randn(4, 96, generator=torch.Generator().manual_seed(3))
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


def test_the_deadzone_of_plain_rceil_is_disjoint_from_the_rest():
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(4))
    parts = decompose(x)
    deadzone = parts.deadzone != 0
    assert deadzone.any() and (parts.scale_bias != 0).any() and (parts.grid != 0).any()
    assert not (deadzone & (parts.scale_bias != 0)).any()
    assert not (deadzone & (parts.grid != 0)).any()
    # The quantizer sends all of it to zero: the error there is -x.
    assert torch.equal(parts.deadzone[deadzone], -x.double()[deadzone])
    ratio = parts.energy_ratio
    cross = 2 * parts.cosine_scale_grid * math.sqrt(ratio["scale_bias"] * ratio["grid"])
    assert sum(ratio.values()) + cross == pytest.approx(1)


def test_scale_bias_vanishes_when_the_scale_is_ideal():
    """amax is 6 * 2**k in every block: rceil picks amax / 6 itself."""
    x = torch.rand(4, 128, generator=torch.Generator().manual_seed(6)) * 2 - 1
    x[:, ::32] = 1
    parts = decompose(x * 6 * torch.tensor([1.0, 2.0**-30, 2.0**30, 4.0])[:, None])
    assert not parts.scale_bias.any()
    assert parts.grid.any() and parts.deadzone.any()
    assert math.isnan(parts.cosine_scale_grid)


@pytest.mark.parametrize(
    ("options", "scale_bias", "deadzone", "grid", "cosine", "zeros"),
    [
        # arXiv 2605.20402 reports 1.725 / .026 / .703 / -.657 over the weights of a model.
        ({}, 1.736, 0.020, 0.729, -0.660, 0.111),
        ({"macro_block": 128}, 1.375, 0.023, 0.840, -0.576, 0.093),
        ({"scale_rule": "even"}, 1.754, 0.022, 0.789, -0.663, 0.096),
    ],
    ids=["rceil", "rceil-mbs128", "even"],
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


@pytest.mark.parametrize(
    ("rule", "percent"),
    [
        ("floor", {"plain": 1.334, "static": 1.216, "dynamic": 1.030, "blockwise": 0.921}),
        ("rceil", {"plain": 1.364, "static": 1.184, "dynamic": 1.095, "blockwise": 1.000}),
        ("even", {"plain": 1.260, "static": 1.175, "dynamic": 1.009, "blockwise": 0.907}),
        ("mse", {"plain": 1.250, "static": 1.174, "dynamic": 1.006, "blockwise": 0.904}),
    ],
    ids=["floor", "rceil", "even", "mse"],
)
def test_gaussian_relative_error(rule, percent):
    x = gaussian_octave(512, 512)
    for macro, expected in percent.items():
        options = {} if macro == "plain" else {"macro_block": 128, "macro_search": macro}
        out = fake_quantize(x, scale_rule=rule, **options)
        relative = float((out - x).double().square().sum() / x.double().square().sum())
        assert 100 * relative == pytest.approx(expected, rel=0.015), macro


@pytest.mark.parametrize(
    ("alpha", "percent"), [(0.25, 0.768), (0.5, 0.342), (0.75, 0.093), (1.0, 0.019)], ids=lambda value: f"{value:g}"
)
def test_gaussian_relative_error_with_outlier_fallback(alpha, percent):
    parts = decompose(gaussian_octave(512, 1024), outlier_fallback=alpha)
    assert 100 * parts.relative_mse == pytest.approx(percent, rel=0.03)


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
    assert zeros.deadzone_fraction == 0 and zeros.zero_fraction == 0 and zeros.energy == 0
    assert math.isnan(zeros.relative_mse) and math.isnan(zeros.sqnr_db)
    exact = decompose(torch.tensor([6.0, 4.0, -0.5, 0.0]))
    assert not exact.total.any() and exact.relative_mse == 0 and exact.sqnr_db == math.inf
    assert all(math.isnan(value) for value in exact.energy_ratio.values()) and len(exact.energy_ratio) == 3
    assert math.isnan(exact.cosine_scale_grid)


def test_empty():
    for shape in ((0,), (3, 0), (0, 5)):
        parts = decompose(torch.empty(shape))
        assert parts.total.shape == shape
        assert math.isnan(parts.deadzone_fraction) and math.isnan(parts.zero_fraction)


def test_axis_and_scheme():
    x = torch.randn(70, 6, generator=torch.Generator().manual_seed(8))
    by_axis, moved = decompose(x, axis=0, macro_block=32), decompose(x.t().contiguous(), macro_block=32)
    for name in ("scale_bias", "deadzone", "grid"):
        assert torch.equal(getattr(by_axis, name), getattr(moved, name).t())
    described = decompose_scheme(x, QuantScheme(macro_block=32), axis=0)
    assert torch.equal(described.grid, by_axis.grid) and torch.equal(described.total, by_axis.total)
    assert not decompose(x.requires_grad_()).total.requires_grad


def test_padding_is_not_counted():
    x = torch.randn(2, 33, generator=torch.Generator().manual_seed(9))
    parts, padded = decompose(x), decompose(torch.nn.functional.pad(x, (0, 31)))
    assert torch.equal(parts.total, padded.total[:, :33])
    assert parts.energy_ratio == pytest.approx(padded.energy_ratio)
    # The zeros of a block with a positive maximum lie in its deadzone: 62 more of 128 elements.
    assert round(padded.deadzone_fraction * 128) == round(parts.deadzone_fraction * 66) + 62
    assert padded.zero_fraction * 128 == pytest.approx(parts.zero_fraction * 66)


# ---- angles between the components, the contract's and the paper's -------------------------------------------------


def paper_terms(x, quantized, block_rows=1):
    """Scale, deadzone and grid error as arXiv 2605.20402 writes them, in float64 by blocks of 32 or tiles."""
    n, k = x.shape
    tiles = x.double().view(n // block_rows, block_rows, k // 32, 32).transpose(1, 2)
    amax = tiles.abs().amax(dim=(2, 3), keepdim=True)
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    y = tiles.abs() / (amax / 6)
    ideal = grid[(y.unsqueeze(-1) - grid).abs().argmin(dim=-1)] * tiles.sign() * (amax / 6)
    back = [t.transpose(1, 2).reshape(n, k) for t in (ideal, (tiles.abs() < amax / 24))]
    ideal, deadzone = back
    return quantized.double() - ideal, torch.where(deadzone, ideal - x, 0.0), torch.where(deadzone, 0.0, ideal - x)


def cosine(a, b):
    return float((a * b).sum() / (a.norm() * b.norm()))


@every_scheme
def test_deadzone_is_orthogonal_to_both_for_every_scheme(options):
    for rule in RULES:
        parts = decompose(gaussian_octave(64), scale_rule=rule, **options)
        assert list(parts.cosines) == ["scale_bias/deadzone", "scale_bias/grid", "deadzone/grid"]
        assert parts.cosines["scale_bias/deadzone"] == 0.0, rule
        assert parts.cosines["deadzone/grid"] == 0.0, rule
        assert parts.cosines["scale_bias/grid"] == parts.cosine_scale_grid < -0.3, rule
        assert ((parts.deadzone != 0) & ((parts.grid != 0) | (parts.scale_bias != 0))).sum() == 0, rule


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_orthogonality_of_the_papers_terms(options):
    x = gaussian_octave() * torch.exp2(4 * torch.rand(512, generator=torch.Generator().manual_seed(1)))
    for rule in RULES:
        parts = decompose(x, scale_rule=rule, **options)
        scale, deadzone, _ = paper_terms(x, fake_quantize(x, scale_rule=rule, **options), options.get("block_rows", 1))
        assert parts.paper_orthogonality == pytest.approx(cosine(scale, deadzone), abs=1e-6), rule
        assert parts.paper_orthogonality == 0.0 if rule == "rceil" else parts.paper_orthogonality < -2e-4, rule


@pytest.mark.parametrize("options", FALLBACK.values(), ids=FALLBACK)
def test_fallback_and_stochastic_rounding_break_it_for_rceil_too(options):
    parts = decompose(gaussian_octave(), generator=torch.Generator().manual_seed(3), **options)
    assert abs(parts.paper_orthogonality) > 1e-3


def test_known_values_on_gaussian_data():
    """Cosines of the paper's scale and deadzone errors: about -0.009 for `even`, -0.05 for `floor` at its worst."""
    x = gaussian_octave(1024, 1024)
    assert decompose(x, scale_rule="even").paper_orthogonality == pytest.approx(-0.009, abs=0.001)
    assert -0.06 < decompose(x, scale_rule="floor").paper_orthogonality < -0.02
    assert decompose(x).cosines["scale_bias/grid"] == pytest.approx(-0.660, abs=0.005)


def test_papers_terms_sum_to_the_error_for_every_rule():
    x = gaussian_octave(32)
    for rule in RULES:
        quantized = fake_quantize(x, scale_rule=rule)
        assert torch.allclose(sum(paper_terms(x, quantized)), quantized.double() - x.double(), atol=1e-12), rule


def test_angles_with_a_component_of_zero_are_undefined():
    x = torch.tensor([6.0, 4.0, 3.0, 1.1] * 8).view(1, 32)  # at the ideal scale, and nothing in the deadzone
    parts = decompose(x)
    assert all(math.isnan(value) for value in parts.cosines.values())
    assert math.isnan(parts.paper_orthogonality)


def test_tiles_have_their_own_deadzone():
    """Of the tile's largest magnitude, not of the row's."""
    x = torch.full((32, 32), 1.0)
    x[0, 0] = 30.0  # a quarter step is 1.25
    parts = decompose(x, block_rows=32)
    assert parts.deadzone_fraction == 1023 / 1024
    assert parts.scale_ratio.tolist() == pytest.approx([8 / 5])
    assert decompose(x).deadzone_fraction == 31 / 1024
    assert torch.equal(parts.deadzone[1:], torch.full((31, 32), -1.0, dtype=torch.float64))


def test_scheme_and_keywords_agree():
    x = gaussian_octave(40, 64)
    scheme = QuantScheme("even", 64, "static", 0.5, "nearest", 32, 0.3)
    by_name = decompose(x, scale_rule="even", macro_block=64, outlier_fallback=0.5, block_rows=32, fallback_rate=0.3)
    assert torch.equal(decompose_scheme(x, scheme).total, by_name.total)
    assert torch.equal(by_name.total, fake_quantize(x, **vars(scheme)).double() - x.double())
