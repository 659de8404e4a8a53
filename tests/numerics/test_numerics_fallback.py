# SPDX-License-Identifier: Apache-2.0
"""Selective outlier fallback: which blocks get the residual pass, and the threshold that follows a rate."""

import copy
import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import RULES

from hf_mxfp4.numerics import FallbackThreshold, QuantScheme, apply_scheme_delayed, decompose, fake_quantize, quantize
from hf_mxfp4.numerics.fallback import (
    LARGEST_ERROR,
    SMALLEST_ERROR,
    block_errors,
    blocks_at_rate,
    select_share,
    share_threshold,
)


MACROS = [
    {},
    {"macro_block": 128},
    {"macro_block": 64, "macro_search": "dynamic"},
    {"macro_block": 128, "macro_search": "blockwise"},
]


def gaussian(rows=64, columns=256, seed=0):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def heavy(rows=64, columns=256, seed=0):
    """Rows of very different power, as activations have them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator) * torch.randn(rows, 1, generator=generator).exp()


def chosen(x, **options):
    """Mask of the blocks that two passes and one tell apart."""
    one = fake_quantize(x, **{k: v for k, v in options.items() if not k.startswith(("outlier", "fallback"))})
    return (fake_quantize(x, **options) != one).view(-1, 32).any(dim=-1)


def measured_errors(x, **options):
    """Squared error of every block, in float64."""
    return (fake_quantize(x, **options).double() - x.double()).square().view(-1, 32).sum(dim=-1)


# ---- selection -----------------------------------------------------------------------------------------------------


def test_relative_error_on_gaussian_data():
    x = gaussian(1024, 1024)
    for rate, relative_mse in ((0.1, 0.982), (0.2, 0.824), (0.3, 0.684), (0.5, 0.441)):
        quantized = fake_quantize(x, macro_block=128, outlier_fallback=1.0, fallback_rate=rate)
        measured = 100 * float((quantized - x).square().sum() / x.square().sum())
        assert measured == pytest.approx(relative_mse, rel=0.015), rate


@pytest.mark.parametrize(("rule", "options"), list(zip(RULES, MACROS, strict=True)))
def test_criterion_is_the_squared_error(rule, options):
    """A threshold of 1.001 of a block's own error leaves it out, 0.999 of it takes it in; a share takes the largest."""
    x = heavy(2)
    errors = measured_errors(x, scale_rule=rule, **options)
    mask = chosen(x, scale_rule=rule, outlier_fallback=0.5, fallback_rate=0.2, **options)
    # The criterion cuts squares to 2**-23 of the block's power of two.
    assert mask.sum() == 4 and errors[mask].min() >= errors[~mask].max() * (1 - 1e-4)
    for block in (0, 5, 11):
        for factor, expected in ((1.001, False), (0.999, True)):
            threshold = float(errors[block]) * factor
            selective = {"outlier_fallback": 1.0, "fallback_rate": 0.5, "fallback_threshold": threshold}
            mask = chosen(x, scale_rule=rule, **selective, **options)
            assert mask[block] == expected
            assert torch.equal(mask, errors > threshold)


@pytest.mark.parametrize("options", MACROS, ids=str)
def test_a_threshold_of_zero_is_fallback_everywhere(options):
    x = heavy()
    selective = {"outlier_fallback": 0.5, "fallback_rate": 0.1, **options}
    everywhere = fake_quantize(x, outlier_fallback=0.5, **options)
    assert torch.equal(fake_quantize(x, fallback_threshold=0.0, **selective), everywhere)
    nowhere = fake_quantize(x, **options)
    assert torch.equal(fake_quantize(x, fallback_threshold=math.inf, **selective), nowhere)
    assert not torch.equal(everywhere, nowhere)


def test_unselected_blocks_have_no_residual():
    x = heavy(16)
    options = {"macro_block": 128, "outlier_fallback": 0.5, "fallback_rate": 0.3}
    packed = quantize(x, **options)
    mask = chosen(x, **options).view(16, 8)
    assert mask.any(dim=1).logical_not().any() and mask.sum() == math.ceil(0.3 * 128)
    assert (packed.residual_scale[~mask] == 0).all()
    assert (packed.residual_codes.view(16, 8, 16)[~mask] == 0).all()
    full = quantize(x, macro_block=128, outlier_fallback=0.5)
    assert torch.equal(packed.residual_scale[mask], full.residual_scale[mask])
    assert torch.equal(packed.codes, full.codes) and torch.equal(packed.scale, full.scale)
    assert torch.equal(packed.dequantize(), fake_quantize(x, **options))


def test_ties_go_to_the_first():
    block = gaussian(1, 32)
    x = block.repeat(3, 4)
    mask = chosen(x, outlier_fallback=0.5, fallback_rate=0.25)
    assert mask.tolist() == [True] * 3 + [False] * 9
    x[1, 32:64] *= 3
    assert chosen(x, outlier_fallback=0.5, fallback_rate=0.25).nonzero().flatten().tolist() == [0, 1, 5]


def test_blocks_without_error_are_never_chosen():
    x = torch.zeros(4, 64)
    x[0, :32] = torch.tensor([0.5, 1.0, 1.5, 6.0]).repeat(8)  # on the grid
    x[1, :32] = gaussian(1, 32)
    assert chosen(x, outlier_fallback=0.5, fallback_rate=0.9).nonzero().flatten().tolist() == [2]


def test_number_of_blocks_is_that_of_the_decimal_rate():
    rates = (0.1, 0.1, 0.3, 0.7, 0.5, 0.01, 0.07, 1 / 3)
    totals = (30, 31, 10, 10, 1, 0, 100, 3)
    assert [blocks_at_rate(*pair) for pair in zip(rates, totals, strict=True)] == [3, 4, 3, 7, 1, 0, 7, 1]


def test_padding_is_no_block():
    """100 columns are 4 blocks, also where macro blocks and tiles are padded to more."""
    x = heavy(10, 100)
    for options in ({}, {"macro_block": 256}, {"macro_block": "row"}, MACROS[3]):
        packed = quantize(x, outlier_fallback=0.5, fallback_rate=0.5, **options)
        assert (packed.residual_scale > 0).sum() == 20
    tiles = quantize(heavy(40, 100), outlier_fallback=0.5, fallback_rate=0.5, block_rows=32, macro_block=128)
    assert (tiles.residual_scale > 0)[::32].sum() == 4


def test_selection_does_not_depend_on_the_scale():
    x = heavy(32)
    options = {"macro_block": 128, "outlier_fallback": 0.5, "fallback_rate": 0.15}
    values = fake_quantize(x, **options)
    for power in (-60, -30, 1, 20, 59):
        assert torch.equal(fake_quantize(x * 2.0**power, **options), values * 2.0**power), power


def test_out_of_range_errors_saturate():
    """Far from 1 the errors of blocks are no longer told apart; first blocks win, and nothing fails."""
    for power in (-140, -120, -90, 80, 110, 120):
        x = gaussian(8) * 2.0**power
        mask = chosen(x, outlier_fallback=1.0, fallback_rate=0.25)
        assert mask.sum() <= 16, power
        assert fake_quantize(x, outlier_fallback=1.0, fallback_rate=0.25).isfinite().all(), power


def test_block_errors_literal():
    residual = torch.zeros(4, 32)
    residual[0, 0], residual[0, 1] = 0.5, 0.25
    residual[1, 3] = -1.0
    residual[2, :] = 2.0**-100
    amax = torch.tensor([4.0, 5.0, 2.0**-99, 8.0])
    assert block_errors(residual, amax, None, None).tolist() == [0.3125, 1.0, SMALLEST_ERROR, 0.0]
    factor = torch.tensor([1.5, 1.0, 1.0, 1.0])
    expected = float(torch.tensor(0.3125) / 2.25)
    assert block_errors(residual, amax, factor, None)[0] == expected
    assert block_errors(residual, amax, None, factor)[0] == 0.3125 * 2.25
    huge = block_errors(torch.full((1, 32), 2.0**100), torch.tensor([2.0**102]), None, None)
    assert huge.tolist() == [LARGEST_ERROR]


def test_errors_too_small_for_the_criterion_are_none():
    """Below 2**-11.5 of the block's power of two a square is cut to zero."""
    residual = torch.full((2, 32), 2.0**-12)
    residual[1] = 2.0**-11
    assert block_errors(residual, torch.tensor([1.0, 1.0]), None, None).tolist() == [0.0, 32 * 2.0**-22]


def test_errors_do_not_depend_on_the_order_of_elements():
    x = heavy(16, 32)
    options = {"outlier_fallback": 0.5, "fallback_rate": 0.4, "fallback_threshold": 0.05}
    for other in (x.flip(1), x.roll(7, dims=1)):
        assert torch.equal(chosen(x, **options), chosen(other, **options))


def test_bad_blocks_do_not_fall_back():
    x = heavy(4, 64)
    x[0, 0], x[1, 40] = math.nan, math.inf
    packed = quantize(x, outlier_fallback=0.5, fallback_rate=0.9)
    assert packed.residual_scale[0, 0] == 0 and packed.residual_scale[1, 1] == 0
    assert packed.dequantize()[0, :32].isnan().all()
    assert (packed.residual_scale > 0).sum() == 6


@given(
    shape=st.lists(st.integers(0, 80), min_size=1, max_size=3),
    rule=st.sampled_from(RULES),
    macro=st.sampled_from(MACROS),
    rate=st.floats(0.001, 0.999),
    threshold=st.one_of(st.none(), st.floats(0, 1e6)),
    rounding=st.sampled_from(["nearest", "stochastic"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=50, deadline=None, derandomize=True, database=None)
def test_every_block_has_all_or_nothing(shape, rule, macro, rate, threshold, rounding, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator).to(dtype)
    options = {"scale_rule": rule, "outlier_fallback": 0.5, "rounding": rounding, **macro}
    selective = {**options, "fallback_rate": rate, "fallback_threshold": threshold}
    packed = quantize(x, generator=torch.Generator().manual_seed(1), **selective)
    values = fake_quantize(x, generator=torch.Generator().manual_seed(1), **selective)
    assert torch.equal(packed.dequantize(), values)
    n_blocks = -(-shape[-1] // 32)
    total = math.prod(shape[:-1]) * n_blocks
    has_residual = torch.zeros(*shape[:-1], n_blocks * 16, dtype=torch.uint8)
    has_residual[..., : packed.residual_codes.shape[-1]] = packed.residual_codes
    has_residual = has_residual.view(*shape[:-1], n_blocks, 16).any(dim=-1)
    assert not has_residual[packed.residual_scale == 0].any()
    if threshold is None:
        assert int(has_residual.sum()) <= math.ceil(rate * total)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fallback_rate": 0.1}, "fallback_rate=0.1.*outlier_fallback=None"),
        ({"outlier_fallback": 0.5, "fallback_rate": 0}, "fallback_rate=0 must"),
        ({"outlier_fallback": 0.5, "fallback_rate": 1.0}, "fallback_rate=1.0 must"),
        ({"outlier_fallback": 0.5, "fallback_rate": True}, "fallback_rate=True must"),
        ({"outlier_fallback": 0.5, "fallback_rate": math.nan}, "fallback_rate=nan must"),
        ({"outlier_fallback": 0.5, "fallback_rate": "0.1"}, "fallback_rate='0.1' must"),
        ({"fallback_threshold": 0.1}, "fallback_threshold has no effect on mxfp4"),
        ({"outlier_fallback": 0.5, "fallback_threshold": 0.1}, "fallback_threshold has no effect on mxfp4"),
    ]
    + [
        ({"outlier_fallback": 0.5, "fallback_rate": 0.1, "fallback_threshold": bad}, "fallback_threshold=.* at least 0")
        for bad in (-1.0, math.nan, True, "1")
    ],
    ids=str,
)
def test_refusals(options, message):
    for call in (fake_quantize, quantize, decompose):
        with pytest.raises(ValueError, match=message):
            call(torch.ones(2, 32), **options)


# ---- the delayed threshold -----------------------------------------------------------------------------------------


SCHEME = QuantScheme("rceil", 128, "static", 0.5, fallback_rate=0.2)


def test_first_tensor_has_the_exact_share():
    x, threshold = heavy(), FallbackThreshold(0.2)
    first = apply_scheme_delayed(x, SCHEME, threshold)
    assert torch.equal(first, fake_quantize(x, **vars(SCHEME)))
    assert torch.equal(first, fake_quantize(x, **vars(SCHEME), fallback_threshold=threshold.value))
    assert threshold.update() == math.ceil(0.2 * 512) / 512


def test_threshold_stands_still_until_the_update():
    threshold = FallbackThreshold(0.2)
    x, larger = heavy(), 10 * heavy(seed=1)
    first = apply_scheme_delayed(x, SCHEME, threshold)
    start = threshold.value
    apply_scheme_delayed(larger, SCHEME, threshold)
    assert threshold.value == start
    assert torch.equal(apply_scheme_delayed(x, SCHEME, threshold), first)
    assert threshold.update() > 0.25
    assert threshold.value == start * 1.3
    assert not torch.equal(apply_scheme_delayed(x, SCHEME, threshold), first)


@pytest.mark.parametrize(
    ("selected", "factor"),
    [(0, 1 / 1.3), (2, 1 / 1.3), (3, 1.0), (4, 1.0), (5, 1.0), (6, 1.3), (16, 1.3)],
)
def test_update_rule(selected, factor):
    """Within 0.75 and 1.25 of the target, both included, nothing moves."""
    threshold = FallbackThreshold(0.25)
    threshold.value = 4.0
    threshold.observe(selected, 16)
    assert threshold.update() == selected / 16
    assert threshold.value == pytest.approx(4.0 * factor, rel=1e-12)
    assert math.isnan(threshold.update()), "the counts were reset"
    assert threshold.value == pytest.approx(4.0 * factor, rel=1e-12)


def test_counts_add_up_as_numbers_or_tensors():
    threshold = FallbackThreshold(0.2)
    threshold.value = 1.0
    threshold.observe(3, 10)
    threshold.observe(torch.tensor(5), 30)
    threshold.observe(0, 0)
    assert threshold.update() == 0.2
    assert threshold.value == 1.0


def test_nothing_but_zeros_starts_no_threshold():
    threshold = FallbackThreshold(0.2)
    zeros = torch.zeros(4, 64)
    assert (apply_scheme_delayed(zeros, SCHEME, threshold) == 0).all()
    assert threshold.value is None
    assert threshold.update() == 0.0 and threshold.value is None
    apply_scheme_delayed(heavy(), SCHEME, threshold)
    assert threshold.value > 0
    assert (apply_scheme_delayed(zeros, SCHEME, threshold) == 0).all()


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_a_few_blocks_start_a_positive_threshold(rows):
    """Fewer blocks with an error than the rate asks for: all of them, from a threshold that can move."""
    x = torch.zeros(20, 32)
    x[:rows] = gaussian(rows, 32)
    threshold = FallbackThreshold(0.2)
    apply_scheme_delayed(x, SCHEME, threshold)
    assert threshold.value > 0
    assert threshold.update() == min(rows, 4) / 20


def test_share_and_its_threshold_select_the_same():
    assert share_threshold(torch.zeros(1), 0.3) is None
    for count in (7, 100):
        errors = torch.rand(count, generator=torch.Generator().manual_seed(count))
        errors[::3] = 0
        for rate in (0.01, 0.3, 0.99):
            assert torch.equal(errors > share_threshold(errors, rate), select_share(errors, rate)), (count, rate)


@pytest.mark.parametrize(
    ("drift", "target", "data"), [(10.0, 0.1, heavy), (0.1, 0.3, heavy), (0.1, 0.1, gaussian), (10.0, 0.3, gaussian)]
)
def test_rate_is_held_while_the_scale_drifts(drift, target, data):
    scheme = QuantScheme("rceil", 128, "static", 0.5, fallback_rate=target)
    threshold, rates = FallbackThreshold(target), []
    for step in range(200):
        x = data(16, 256, seed=step) * drift ** (step / 199)
        apply_scheme_delayed(x, scheme, threshold)
        rates.append(threshold.update())
    assert sum(rates) / len(rates) == pytest.approx(target, rel=0.25)
    assert sum(rates[-50:]) / 50 == pytest.approx(target, rel=0.3)
    # Held still, the threshold would end at a rate of nearly one, or nearly zero.
    frozen = FallbackThreshold(target)
    apply_scheme_delayed(data(16, 256, seed=0), scheme, frozen)
    frozen.update()
    apply_scheme_delayed(data(16, 256, seed=199) * drift, scheme, frozen)
    assert abs(frozen.update() - target) > 0.8 * target


def test_threshold_stays_in_range():
    threshold = FallbackThreshold(0.2)
    for start, selected, end in ((LARGEST_ERROR, 100, LARGEST_ERROR), (SMALLEST_ERROR, 0, SMALLEST_ERROR)):
        threshold.value = start
        threshold.observe(selected, 100)
        threshold.update()
        assert threshold.value == end


def test_copies_go_their_own_way():
    threshold = FallbackThreshold(0.2)
    apply_scheme_delayed(heavy(), SCHEME, threshold)
    for other in (copy.deepcopy(threshold), pickle.loads(pickle.dumps(threshold))):
        assert other.value == threshold.value and other.target == 0.2
        other.observe(500, 500)
        assert other.update() > 0.25
        assert other.value > threshold.value


def test_a_scheme_without_a_rate_has_no_use_for_it():
    with pytest.raises(ValueError, match="mxfp4.rceil.of0.5 has no fallback_rate"):
        apply_scheme_delayed(heavy(), QuantScheme(outlier_fallback=0.5), FallbackThreshold(0.2))
