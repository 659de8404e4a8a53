# SPDX-License-Identifier: Apache-2.0
"""Intervals of shares and of their differences, against published values."""

import pytest

from hf_mxfp4.stats import difference_interval, share_text, wilson_interval


@pytest.mark.parametrize(
    ("first", "second", "low", "high"),
    [
        # Newcombe (1998), table II, method 10, his differences with the sign turned.
        ((48, 80), (56, 70), 0.0524, 0.3339),
        ((3, 10), (9, 10), 0.1705, 0.8090),
        ((0, 10), (10, 10), 0.6075, 1.0),
        ((0, 20), (0, 10), -0.1611, 0.2775),
    ],
)
def test_differences_are_the_published_ones(first, second, low, high):
    assert difference_interval(first, second) == pytest.approx((low, high), abs=5e-5)


def test_none_of_few_problems_is_no_certainty():
    assert share_text(0.0, 8) == "0.000 [0.000, 0.324]"
    assert share_text(1.0, 8) == "1.000 [0.676, 1.000]"
    low, high = difference_interval((0, 8), (0, 8))
    assert (low, high) == pytest.approx((-0.3244, 0.3244), abs=5e-5)


@pytest.mark.parametrize(("correct", "n"), [(-1, 4), (5, 4), (0, 0)])
def test_what_is_no_share_is_refused(correct, n):
    with pytest.raises(ValueError, match=f"got {correct} of {n}"):
        wilson_interval(correct, n)
