# SPDX-License-Identifier: Apache-2.0
"""Selective outlier fallback: which blocks of each row get the residual pass."""

import math

import pytest
import torch
from tables import RULES

from hf_mxfp4.numerics import decompose, fake_quantize, quantize
from hf_mxfp4.numerics.corrections import LARGEST_ERROR, SMALLEST_ERROR, block_errors, blocks_at_rate, select_blocks


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
    """Mask ``[rows, blocks]`` of the blocks that two passes and one tell apart."""
    one = fake_quantize(x, **{k: v for k, v in options.items() if not k.startswith(("outlier", "fallback"))})
    return (fake_quantize(x, **options) != one).unflatten(-1, (-1, 32)).any(dim=-1)


def measured_errors(x, **options):
    """Squared error of every block, ``[rows, blocks]`` in float64."""
    return (fake_quantize(x, **options).double() - x.double()).square().unflatten(-1, (-1, 32)).sum(dim=-1)


# ---- selection -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rule", "options"), list(zip(RULES, MACROS, strict=True)))
def test_the_blocks_of_largest_squared_error_of_each_row_are_chosen(rule, options):
    x = heavy(8)
    errors = measured_errors(x, scale_rule=rule, **options)
    mask = chosen(x, scale_rule=rule, outlier_fallback=0.5, fallback_rate=0.3, **options)
    assert mask.sum(dim=1).tolist() == [3] * 8  # ceil(.3 * 8)
    least, most = errors.where(mask, torch.inf).amin(dim=1), errors.where(~mask, 0.0).amax(dim=1)
    # The criterion cuts squares to 2**-23 of the block's power of two.
    assert (least >= most * (1 - 1e-4)).all()


@pytest.mark.parametrize("options", MACROS, ids=str)
@pytest.mark.parametrize("axis", [0, 1])
def test_a_row_does_not_depend_on_others(axis, options):
    """Alone, in another order, in a larger batch, along either axis."""
    x = heavy(64, 256).movedim(-1, axis)
    selective = {"outlier_fallback": 1.0, "fallback_rate": 0.1, "axis": axis, **options}
    values = fake_quantize(x, **selective)
    other = 1 - axis
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(fake_quantize(x.index_select(other, order), **selective), values.index_select(other, order))
    larger = fake_quantize(torch.cat([x, 100 * x], other), **selective)
    assert torch.equal(larger.narrow(other, 0, 64), values)
    for row in (0, 13, 63):
        assert torch.equal(fake_quantize(x.narrow(other, row, 1), **selective), values.narrow(other, row, 1))


def test_ties_go_to_the_first():
    block = gaussian(1, 32)
    x = block.repeat(3, 8)
    mask = chosen(x, outlier_fallback=0.5, fallback_rate=0.25)
    assert mask.tolist() == [[True, True] + [False] * 6] * 3
    x[1, 160:192] *= 3
    mask = chosen(x, outlier_fallback=0.5, fallback_rate=0.25)
    assert mask.nonzero()[:, 1].tolist() == [0, 1, 0, 5, 0, 1]
    errors = torch.tensor([[1.0, 2.0, 2.0, 2.0], [0.0, 0.0, 0.0, 5.0]])
    assert select_blocks(errors, 0.5).tolist() == [[False, True, True, False], [False, False, False, True]]


def test_blocks_without_error_are_never_chosen():
    x = torch.zeros(4, 64)
    x[0, :32] = torch.tensor([0.5, 1.0, 1.5, 6.0]).repeat(8)  # on the grid
    x[1, :32] = gaussian(1, 32)
    assert chosen(x, outlier_fallback=0.5, fallback_rate=0.9).nonzero().tolist() == [[1, 0]]


def test_number_of_blocks_is_that_of_the_decimal_rate():
    rates = (0.1, 0.1, 0.3, 0.7, 0.5, 0.01, 0.07, 1 / 3)
    totals = (30, 31, 10, 10, 1, 0, 100, 3)
    assert [blocks_at_rate(*pair) for pair in zip(rates, totals, strict=True)] == [3, 4, 3, 7, 1, 0, 7, 1]


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fallback_rate": 0.1}, "fallback_rate=0.1.*outlier_fallback=None"),
        ({"outlier_fallback": 0.5, "fallback_rate": 0}, "fallback_rate=0 must"),
        ({"outlier_fallback": 0.5, "fallback_rate": 1.0}, "fallback_rate=1.0 must"),
        ({"outlier_fallback": 0.5, "fallback_rate": True}, "fallback_rate=True must"),
        ({"outlier_fallback": 0.5, "fallback_rate": math.nan}, "fallback_rate=nan must"),
        ({"outlier_fallback": 0.5, "fallback_rate": "0.1"}, "fallback_rate='0.1' must"),
    ],
    ids=str,
)
def test_refusals(options, message):
    for call in (fake_quantize, quantize, decompose):
        with pytest.raises(ValueError, match=message):
            call(torch.ones(2, 32), **options)
