# SPDX-License-Identifier: Apache-2.0
"""Angles between the error components, the contract's and the paper's."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import RULES

from hf_mxfp4.numerics import QuantScheme, decompose, decompose_scheme, fake_quantize


PAIRS = ["scale_bias/deadzone", "scale_bias/grid", "deadzone/grid"]
#: Options of schemes; with `rceil`, whose steps are never finer than the ideal, the paper's terms are orthogonal.
OPTIONS = {
    "plain": {},
    "static": {"macro_block": 128},
    "dynamic": {"macro_block": 128, "macro_search": "dynamic"},
    "blockwise": {"macro_block": 128, "macro_search": "blockwise"},
    "tiles": {"block_rows": 32},
    "static-tiles": {"block_rows": 32, "macro_block": 64},
}
FALLBACK = {
    "fallback": {"outlier_fallback": 0.5},
    "selective": {"outlier_fallback": 1.0, "fallback_rate": 0.3, "macro_block": 128},
    "selective-tiles": {"outlier_fallback": 0.5, "fallback_rate": 0.5, "block_rows": 32},
    "threshold": {"outlier_fallback": 0.5, "fallback_rate": 0.1, "fallback_threshold": 0.5},
    "stochastic": {"rounding": "stochastic"},
}


def gaussian(rows=256, columns=512, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator) * torch.exp2(torch.rand(rows, 1, generator=generator))


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


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("options", [*OPTIONS.values(), *FALLBACK.values()], ids=[*OPTIONS, *FALLBACK])
def test_deadzone_is_orthogonal_to_both_for_every_scheme(options, rule):
    parts = decompose(gaussian(64), scale_rule=rule, **options)
    assert list(parts.cosines) == PAIRS
    assert parts.cosines["scale_bias/deadzone"] == 0.0
    assert parts.cosines["deadzone/grid"] == 0.0
    assert parts.cosines["scale_bias/grid"] == parts.cosine_scale_grid < -0.3
    assert ((parts.deadzone != 0) & ((parts.grid != 0) | (parts.scale_bias != 0))).sum() == 0


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_orthogonality_of_the_papers_terms(options, rule):
    x = gaussian() * torch.exp2(4 * torch.rand(512, generator=torch.Generator().manual_seed(1)))
    parts = decompose(x, scale_rule=rule, **options)
    scale, deadzone, _ = paper_terms(x, fake_quantize(x, scale_rule=rule, **options), options.get("block_rows", 1))
    assert parts.paper_orthogonality == pytest.approx(cosine(scale, deadzone), abs=1e-6)
    if rule == "rceil":
        assert parts.paper_orthogonality == 0.0
    else:
        assert parts.paper_orthogonality < -2e-4


@pytest.mark.parametrize("options", FALLBACK.values(), ids=FALLBACK)
def test_fallback_and_stochastic_rounding_break_it_for_rceil_too(options):
    parts = decompose(gaussian(), generator=torch.Generator().manual_seed(3), **options)
    assert abs(parts.paper_orthogonality) > 1e-3


def test_known_values_on_gaussian_data():
    """Cosines of the paper's scale and deadzone errors: about -0.009 for `even`, -0.05 for `floor` at its worst."""
    x = gaussian(1024, 1024)
    assert decompose(x, scale_rule="even").paper_orthogonality == pytest.approx(-0.009, abs=0.001)
    assert -0.06 < decompose(x, scale_rule="floor").paper_orthogonality < -0.02
    assert decompose(x).cosines["scale_bias/grid"] == pytest.approx(-0.660, abs=0.005)


@pytest.mark.parametrize("rule", RULES)
def test_papers_terms_sum_to_the_error_for_every_rule(rule):
    x = gaussian(32)
    quantized = fake_quantize(x, scale_rule=rule)
    assert torch.allclose(sum(paper_terms(x, quantized)), quantized.double() - x.double(), atol=1e-12)


def test_angles_with_a_component_of_zero_are_undefined():
    x = torch.tensor([6.0, 4.0, 3.0, 1.1] * 8).view(1, 32)  # at the ideal scale, and nothing in the deadzone
    parts = decompose(x)
    assert all(math.isnan(value) for value in parts.cosines.values())
    assert math.isnan(parts.paper_orthogonality)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("options", [*OPTIONS.values(), *FALLBACK.values()], ids=[*OPTIONS, *FALLBACK])
def test_sum_is_exact_for_every_scheme(options, rule):
    x = gaussian(70, 100)
    parts = decompose(x, scale_rule=rule, generator=torch.Generator().manual_seed(1), **options)
    quantized = fake_quantize(x, scale_rule=rule, generator=torch.Generator().manual_seed(1), **options)
    error = quantized.double() - x.double()
    assert torch.equal(parts.total, error)
    assert torch.equal(parts.scale_bias + parts.grid + parts.deadzone, error)


@given(
    rows=st.integers(0, 40),
    columns=st.integers(1, 100),
    rule=st.sampled_from(RULES),
    options=st.sampled_from([*OPTIONS.values(), *FALLBACK.values()]),
    exponent=st.integers(-60, 60),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
def test_sum_is_exact_over_shapes_and_scales(rows, columns, rule, options, exponent, dtype, seed):
    x = (gaussian(rows, columns, seed) * 2.0**exponent).to(dtype)
    parts = decompose(x, scale_rule=rule, generator=torch.Generator().manual_seed(1), **options)
    quantized = fake_quantize(x.float(), scale_rule=rule, generator=torch.Generator().manual_seed(1), **options)
    assert torch.equal(parts.total, quantized.double() - x.double())


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
    x = gaussian(40, 64)
    scheme = QuantScheme("even", 64, "static", 0.5, "nearest", 32, 0.3)
    by_name = decompose(x, scale_rule="even", macro_block=64, outlier_fallback=0.5, block_rows=32, fallback_rate=0.3)
    assert torch.equal(decompose_scheme(x, scheme).total, by_name.total)
    above = decompose_scheme(x, scheme, fallback_threshold=1.0)
    assert not torch.equal(above.total, by_name.total)
    error = fake_quantize(x, **vars(scheme), fallback_threshold=1.0).double() - x.double()
    assert torch.equal(above.total, error)
