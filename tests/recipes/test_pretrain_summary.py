# SPDX-License-Identifier: Apache-2.0
"""Statistics of pretraining studies on curves written by hand."""

import pytest

from recipes.pretraining.plots import draw_overheads
from recipes.pretraining.summary import loss_at, summarize, tokens_to_target


FALLING = [(0, 4.0), (100, 3.0), (200, 2.5), (300, 2.0)]


@pytest.mark.parametrize(
    "curve, target, expected",
    [
        (FALLING, 2.75, 150.0),  # half way between two evaluations
        (FALLING, 3.0, 100.0),  # at one
        (FALLING, 2.0, 300.0),  # at the last one
        (FALLING, 1.99, None),  # never
        (FALLING, 4.0, 0.0),  # before the first step
        (FALLING, 9.0, 0.0),
        ([(50, 1.0), (60, 0.5)], 2.0, 50.0),  # at once
        ([(0, 4.0), (100, 2.0), (200, 3.0), (300, 2.0)], 2.5, 75.0),  # the first time counts
        ([(0, 4.0), (100, None)], 3.0, None),  # diverged
        ([(0, 4.0), (100, 3.0), (200, None)], 3.5, 50.0),  # diverged after it had got there
    ],
)
def test_tokens_to_target(curve, target, expected):
    assert tokens_to_target(curve, target) == expected


@pytest.mark.parametrize("tokens, expected", [(0, 4.0), (50, 3.5), (100, 3.0), (250, 2.25), (300, 2.0)])
def test_loss_between_evaluations(tokens, expected):
    assert loss_at(FALLING, tokens) == expected


def test_loss_beyond_the_curve():
    with pytest.raises(ValueError, match="from 0 to 300 tokens"):
        loss_at(FALLING, 301)
    assert loss_at([(0, 4.0), (100, None)], 300) is None
    assert loss_at([(0, 4.0), (100, None)], 50) is None


def run(arm, seed, curve):
    return {"arm": arm, "seed": seed, "curve": curve}


# The target at 90 % of 300 tokens is 2.15.
HALF_SPEED = [(0, 4.0), (200, 3.0), (400, 2.5), (600, 2.0)]
SHALLOW = [(0, 4.0), (300, 3.0), (600, 2.5)]
LONG = [*FALLING, (600, 1.9)]


def test_overhead_and_gap_are_paired_by_seed():
    runs = [run("baseline", 0, LONG), run("baseline", 1, LONG), run("all", 0, HALF_SPEED), run("all", 1, LONG)]
    summary = summarize(runs, budget=300, target_fraction=0.9)
    assert summary["targets"] == {"0": pytest.approx(2.15), "1": pytest.approx(2.15)}
    assert summary["arms"]["baseline"]["overhead"]["by_seed"] == [0.0, 0.0]
    result = summary["arms"]["all"]
    assert result["overhead"]["by_seed"] == pytest.approx([1.0, 0.0])  # twice the tokens, the same
    assert result["overhead"]["mean"] == pytest.approx(0.5) and result["overhead"]["n"] == 2
    assert result["gap"]["by_seed"] == pytest.approx([0.75, 0.0])


def test_a_target_that_is_not_reached_is_a_result():
    runs = [run("baseline", s, LONG) for s in (0, 1)] + [run("all", 0, SHALLOW), run("all", 1, HALF_SPEED)]
    overhead = summarize(runs, budget=300, target_fraction=0.9)["arms"]["all"]["overhead"]
    assert overhead["by_seed"] == [None, pytest.approx(1.0)]
    assert (overhead["mean"], overhead["n"], overhead["n_finite"]) == (None, 2, 1)
    assert overhead["at_least"] == pytest.approx((600 / 270 - 1 + 1.0) / 2)
    assert draw_overheads(summarize(runs, budget=300, target_fraction=0.9)["arms"]).axes


def test_a_run_that_diverged_has_no_lower_bound():
    runs = [run("baseline", 0, LONG), run("all", 0, [(0, 4.0), (100, None)])]
    result = summarize(runs, budget=300, target_fraction=0.9)["arms"]["all"]
    assert result["overhead"]["at_least"] is None and result["gap"]["by_seed"] == [None]
    with pytest.raises(ValueError, match="lower learning_rate"):
        summarize([run("baseline", 0, [(0, 4.0), (100, None)])], budget=300, target_fraction=0.9)


def test_arms_are_compared_with_the_reference_by_seed():
    runs = [run(arm, seed, LONG) for arm in ("baseline", "all") for seed in (0, 1)]
    runs += [run("other", 0, HALF_SPEED), run("other", 1, HALF_SPEED)]
    arms = summarize(runs, budget=300, target_fraction=0.9)["arms"]
    assert "versus" not in arms["all"] and "versus" not in arms["baseline"]
    assert arms["other"]["versus"]["arm"] == "all"
    assert arms["other"]["versus"]["overhead"]["mean"] == pytest.approx(1.0)
    assert arms["other"]["versus"]["gap"]["interval"] == pytest.approx([0.75, 0.75])
