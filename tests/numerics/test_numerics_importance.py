# SPDX-License-Identifier: Apache-2.0
"""Searches whose squared errors are weighted by the importance of each element."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_mxfp4.numerics import QuantScheme, apply_scheme, fake_quantize, quantize


SEARCHING = {
    "mse": {"scale_rule": "mse"},
    "mse-static": {"scale_rule": "mse", "macro_block": 128},
    "dynamic": {"macro_block": 128, "macro_search": "dynamic"},
    "dynamic-even-row": {"scale_rule": "even", "macro_block": "row", "macro_search": "dynamic"},
    "dynamic-mse": {"scale_rule": "mse", "macro_block": 64, "macro_search": "dynamic"},
    "blockwise": {"scale_rule": "even", "macro_block": 128, "macro_search": "blockwise"},
    "blockwise-mse": {"scale_rule": "mse", "macro_block": 128, "macro_search": "blockwise"},
}
NOT_SEARCHING = [
    {},
    {"scale_rule": "even", "outlier_fallback": 0.5},
    {"macro_block": 128},
    {"macro_search": "dynamic"},  # of no macro blocks
]


def searching():
    return pytest.mark.parametrize("options", SEARCHING.values(), ids=SEARCHING)


def gaussian(rows=64, columns=300, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator) * torch.exp2(torch.rand(rows, 1, generator=generator))


def uneven(columns=300, seed=1):
    return torch.rand(columns, generator=torch.Generator().manual_seed(seed)) ** 6


def weighted_error(quantized, x, importance):
    return ((quantized.double() - x.double()).square() * importance.double()).sum(dim=-1)


@searching()
@pytest.mark.parametrize("block_rows", [1, 32])
def test_weighted_error_is_never_worse(options, block_rows):
    """Row by row of blocks, but for what cutting squares to multiples of 2**-23 leaves undecided."""
    x, importance = gaussian(), uneven()
    without = weighted_error(fake_quantize(x, block_rows=block_rows, **options), x, importance)
    with_it = weighted_error(fake_quantize(x, block_rows=block_rows, importance=importance, **options), x, importance)
    if block_rows == 32:
        without, with_it = (error.view(2, 32).sum(dim=-1) for error in (without, with_it))
    slack = 2.0**-21 * x.double().square().sum() / len(without)
    assert (with_it <= without + slack).all()
    if block_rows == 1:  # few macro blocks of tiles leave little to choose
        assert with_it.sum() < 0.999 * without.sum()


@searching()
def test_equal_importance_changes_no_bit(options):
    x = gaussian(8)
    expected = quantize(x, outlier_fallback=0.5, **options)
    for value in (1.0, 1e-30, 7.3, 1e300):
        importance = torch.full((300,), value, dtype=torch.float64)
        actual = quantize(x, outlier_fallback=0.5, importance=importance, **options)
        for name in ("codes", "scale", "residual_codes", "residual_scale"):
            assert torch.equal(getattr(actual, name), getattr(expected, name)), value
        assert expected.macro is None or torch.equal(actual.macro, expected.macro), value


@searching()
def test_quantize_and_fake_quantize_agree(options):
    x, importance = gaussian(5), uneven()
    values = fake_quantize(x, importance=importance, outlier_fallback=0.5, **options)
    assert torch.equal(quantize(x, importance=importance, outlier_fallback=0.5, **options).dequantize(), values)
    scheme = QuantScheme(outlier_fallback=0.5, **options)
    assert torch.equal(apply_scheme(x, scheme, importance=importance), values)
    assert not torch.equal(apply_scheme(x, scheme), values)


@searching()
def test_only_the_ratios_count(options):
    x, importance = gaussian(8), uneven()
    expected = fake_quantize(x, importance=importance, **options)
    for scale in (2.0**40, 2.0**-40):
        assert torch.equal(fake_quantize(x, importance=importance * scale, **options), expected)
    assert torch.equal(fake_quantize(x, importance=importance.double(), **options), expected)


def test_the_important_element_decides():
    """At scale 1 the largest, 7.25, becomes 6 and 1.5 stays; at scale 2 they become 8 and 2 (a tie)."""
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 1] = 7.25, 1.5
    large, small = torch.full((32,), 1e-6), torch.full((32,), 1e-6)
    large[0], small[1] = 1.0, 1.0
    assert fake_quantize(x, scale_rule="mse", importance=large)[0, :2].tolist() == [8.0, 2.0]
    assert fake_quantize(x, scale_rule="mse", importance=small)[0, :2].tolist() == [6.0, 1.5]


def test_columns_without_importance_do_not_count():
    x = gaussian(16, 32)
    x[:, 8] = x.abs().amax(dim=1)  # the block maximum, important itself
    importance = torch.zeros(32)
    importance[:9] = uneven(9)
    changed = x.clone()
    changed[:, 9:] *= 0.3
    scales = [quantize(t, scale_rule="mse", importance=importance).scale.tolist() for t in (x, changed)]
    assert scales[0] == scales[1]
    free = [quantize(t, scale_rule="mse").scale.tolist() for t in (x, changed)]
    assert free[0] != free[1], "unweighted, they do count"


@searching()
def test_other_axes(options):
    x, importance = gaussian(300, 16), uneven()
    along_first = fake_quantize(x, axis=0, importance=importance, **options)
    assert torch.equal(along_first, fake_quantize(x.T, importance=importance, **options).T)
    three = gaussian(4, 300).view(2, 2, 300)
    flat = fake_quantize(three.view(4, 300), importance=importance, **options)
    assert torch.equal(fake_quantize(three, importance=importance, **options).view(4, 300), flat)


@given(
    columns=st.integers(1, 200),
    rows=st.integers(0, 40),
    name=st.sampled_from(sorted(SEARCHING)),
    block_rows=st.sampled_from([1, 32]),
    exponent=st.integers(-130, 120),
    spread=st.integers(0, 200),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=40, deadline=None, derandomize=True, database=None)
def test_any_scale_of_data_and_weights(columns, rows, name, block_rows, exponent, spread, seed):
    x = gaussian(rows, columns, seed) * 2.0**exponent
    importance = torch.exp2(spread * (torch.rand(columns, generator=torch.Generator().manual_seed(seed)) - 0.5))
    options = {"importance": importance, "block_rows": block_rows, **SEARCHING[name]}
    values = fake_quantize(x, **options)
    assert values.isfinite().all()
    assert torch.equal(quantize(x, **options).dequantize(), values)


def test_non_finite_blocks_stay_nan():
    x = gaussian(2, 64)
    x[0, 3], x[1, 40] = math.nan, math.inf
    values = fake_quantize(x, scale_rule="mse", importance=uneven(64))
    assert values.isnan().view(2, 2, 32).all(dim=-1).tolist() == [[True, False], [False, True]]


def test_empty_axis():
    assert fake_quantize(torch.empty(3, 0), scale_rule="mse", importance=torch.empty(0)).shape == (3, 0)


@pytest.mark.parametrize("options", NOT_SEARCHING, ids=str)
def test_refused_where_nothing_is_searched(options):
    for call in (fake_quantize, quantize):
        with pytest.raises(ValueError, match="importance has no effect on mxfp4.*searches nothing"):
            call(torch.ones(2, 32), importance=torch.ones(32), **options)


@pytest.mark.parametrize(
    ("importance", "message"),
    [
        (torch.ones(31), r"shape \(32,\).*\(31,\)"),
        (torch.ones(1, 32), r"shape \(32,\).*\(1, 32\)"),
        ([1.0] * 32, r"shape \(32,\).*list"),
        (torch.full((32,), -1.0), "negative or non-finite"),
        (torch.tensor([1.0] * 31 + [math.nan]), "negative or non-finite"),
        (torch.tensor([1.0] * 31 + [math.inf]), "negative or non-finite"),
        (torch.zeros(32), "zero everywhere"),
    ],
    ids=["short", "matrix", "list", "negative", "nan", "inf", "zero"],
)
def test_bad_importance_is_refused(importance, message):
    with pytest.raises(ValueError, match=message):
        fake_quantize(torch.ones(2, 32), scale_rule="mse", importance=importance)
