# SPDX-License-Identifier: Apache-2.0
"""Estimates and intervals of shares, means and differences, against published values and brute force."""

import itertools
import math

import numpy as np
import pytest

from hf_mxfp4.lab.evaluation import intervals
from hf_mxfp4.lab.evaluation.intervals import bootstrap_mean, ratio_of_sums, wilson
from hf_mxfp4.utils import share_text


# Newcombe, Statistics in Medicine 17 (1998), table I, method 3.
@pytest.mark.parametrize(
    ("correct", "n", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_intervals_are_the_published_ones(correct, n, low, high):
    found = wilson(correct, n)
    assert (found.value, found.n) == (correct / n, n)
    assert (found.low, found.high) == pytest.approx((low, high), abs=1e-4)
    mirrored = wilson(n - correct, n)
    assert (mirrored.low, mirrored.high) == pytest.approx((1 - found.high, 1 - found.low))


def test_none_of_few_problems_is_no_certainty():
    assert share_text(0.0, 8) == "0.000 [0.000, 0.324]"
    assert share_text(1.0, 8) == "1.000 [0.676, 1.000]"


def test_one_problem_says_nothing_of_others():
    assert str(bootstrap_mean([0.5])) == "0.500 [0.000, 1.000]"
    assert str(intervals.paired_mean_difference([0.5], [0.25])) == "0.250 [-1.000, 1.000]"


@pytest.mark.parametrize("n", range(1, 7))
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_one(n):
    for correct, k in itertools.product(range(n + 1), range(1, n + 1)):
        subsets = list(itertools.combinations([True] * correct + [False] * (n - correct), k))
        expected = sum(map(any, subsets)) / len(subsets)
        assert intervals.pass_at_k(n, correct, k) == pytest.approx(expected, abs=1e-15)


def test_bootstrap_agrees_with_the_normal_interval_of_many_problems():
    values = np.random.default_rng(1).beta(2, 3, size=2000)
    found = bootstrap_mean(values)
    half = 1.959964 * values.std() / np.sqrt(len(values))
    assert found.value == pytest.approx(values.mean())
    assert (found.low, found.high) == pytest.approx((values.mean() - half, values.mean() + half), abs=0.1 * half)
    assert bootstrap_mean(values) == found != bootstrap_mean(values, seed=1)


def test_a_single_sample_is_a_share_and_more_are_resampled_by_problem():
    assert intervals.mean_pass_at_k([1, 0, 1, 1], 1, 1) == wilson(3, 4)
    # Ten equal completions of each problem say no more than one.
    counts = [10 * (i % 3 == 0) for i in range(300)]
    found = intervals.mean_pass_at_k(counts, 10, 1)
    share = wilson(100, 300)
    assert found.method != share.method
    assert (found.low, found.high) == pytest.approx((share.low, share.high), abs=0.01)


@pytest.mark.parametrize(
    ("only_first", "only_second", "p"),
    [(10, 2, 158 / 4096), (2, 10, 158 / 4096), (0, 0, 1.0), (5, 5, 1.0), (0, 6, 2 / 64), (1000, 1000, 1.0)],
)
def test_mcnemar_is_the_two_sided_binomial(only_first, only_second, p):
    assert intervals.mcnemar(only_first, only_second) == pytest.approx(p)


FIRST = [i < 520 for i in range(1000)]
SECOND = [i < 500 for i in range(1000)]


def test_pairing_sees_what_two_separate_intervals_do_not():
    difference, only_first, only_second = intervals.paired_share_difference(FIRST, SECOND)
    assert difference.value == pytest.approx(0.02)
    assert difference.low > 0
    assert (only_first, only_second) == (20, 0)
    assert wilson(520, 1000).low < 0.5
    assert intervals.paired_mean_difference(FIRST, SECOND).low > 0


@pytest.mark.parametrize("difference", [intervals.paired_share_difference, intervals.paired_mean_difference])
def test_a_paired_difference_needs_the_same_problems(difference):
    with pytest.raises(ValueError, match="got 3 and 2"):
        difference([True] * 3, [True] * 2)
    with pytest.raises(ValueError, match="got 0 and 0"):
        difference([], [])


def test_means_have_students_interval():
    found = intervals.t_interval([1.0, 2.0, 3.0])
    assert (found["n"], found["mean"], found["sd"]) == (3, 2.0, 1.0)
    assert found["interval"] == pytest.approx([2 - 4.302653 / math.sqrt(3), 2 + 4.302653 / math.sqrt(3)])
    assert intervals.t_interval([2.0, 2.0])["interval"] == [2.0, 2.0]
    assert intervals.t_interval([2.0]) == {"n": 1, "mean": 2.0, "sd": None, "interval": None}


@pytest.mark.parametrize(
    ("first", "second", "mean", "half"),
    [
        # Quantiles of Student's t from tables: 4 degrees of freedom, and 1.
        ([1, 2, 3], [3, 4, 5], 2, 2.776445 * math.sqrt(2 / 3)),
        ([0, 2], [5, 5, 5], 4, 12.706205),
        # Welch's degrees are no whole number: 4 / (1 + 1 / 2). The quantile is an integral by mpmath.
        ([0, 2], [-math.sqrt(3), 0, math.sqrt(3)], -1, 3.419770 * math.sqrt(2)),
        ([1, 1], [3, 3, 3], 2, 0),
    ],
)
def test_differences_of_means_have_welchs_interval(first, second, mean, half):
    found = intervals.welch_interval(first, second)
    assert found["mean"] == pytest.approx(mean)
    assert found["interval"] == pytest.approx([mean - half, mean + half])
    assert intervals.welch_interval([1.0], second)["interval"] is None


def test_means_of_groups_and_their_errors():
    assert ratio_of_sums([3.0, 1.0], [2, 2]) == (1.0, pytest.approx(math.sqrt(2 * (1 + 1)) / 4))
    assert ratio_of_sums([2.0, 4.0, 6.0], [1, 2, 3]) == (2.0, 0.0)  # as many items as the sum says
    assert ratio_of_sums([5.0], [2]) == (2.5, None)


def test_groups_of_one_item_have_the_standard_error_of_the_mean():
    values = [0.5, 1.5, 4.0, 2.0]
    error = np.std(values, ddof=1) / 2
    assert ratio_of_sums(values, [1] * 4) == (pytest.approx(2.0), pytest.approx(error))


@pytest.mark.parametrize(("sums", "counts"), [([1.0], [1, 2]), ([], []), ([0.0], [0])])
def test_means_of_nothing(sums, counts):
    with pytest.raises(ValueError, match="a mean over groups needs"):
        ratio_of_sums(sums, counts)
