# SPDX-License-Identifier: Apache-2.0
"""The table of verdicts, from made-up runs."""

import pytest

from benchmarks.documents import runs, verdicts


def verdict(monkeypatch, claim, accuracies):
    """The row of one claim, with accuracies by cell; in the mean of the curve they are all ten points lower in `a`."""
    made_up = []
    for cell, values in accuracies.items():
        lower = 0.1 if cell == "a" else 0.0
        made_up += [{"cell": cell, "value": value, "mean_of_curve": value - lower} for value in values]
    monkeypatch.setattr(verdicts, "CLAIMS", [claim])
    monkeypatch.setattr(runs, "reported_runs", lambda grid: made_up)
    return verdicts.verdicts().splitlines()[2]


REACHES = verdicts.Claim("a reaches b", "a", "b")
IMPROVES = verdicts.Claim("a improves b", "a", "b", reaches=False)


@pytest.mark.parametrize(
    ("claim", "a", "end", "curve"),
    [
        # Welch: both standard deviations 1.41 points, standard error 1.41, 2 degrees of freedom, t 4.303: ± 6.09.
        (REACHES, (0.64, 0.66), "**holds** | +5.0 [-1.1, +11.1]", "not resolved | -5.0 [-11.1, +1.1]"),
        (REACHES, (0.63, 0.65), "not resolved | +4.0 [-2.1, +10.1]", "not resolved | -6.0 [-12.1, +0.1]"),
        (REACHES, (0.50, 0.52), "**does not hold** | -9.0 [-15.1, -2.9]", "**does not hold** | -19.0 [-25.1, -12.9]"),
        (IMPROVES, (0.64, 0.66), "not resolved | +5.0 [-1.1, +11.1]", "not resolved | -5.0 [-11.1, +1.1]"),
        (IMPROVES, (0.66, 0.68), "**holds** | +7.0 [+0.9, +13.1]", "not resolved | -3.0 [-9.1, +3.1]"),
    ],
)
def test_the_whole_interval_decides(monkeypatch, claim, a, end, curve):
    found = verdict(monkeypatch, claim, {"a": a, "b": (0.59, 0.61)})
    assert found == f"| {claim.text} | {end} | {curve} | 2 and 2 |"


def test_a_single_run_says_nothing(monkeypatch):
    found = verdict(monkeypatch, REACHES, {"a": (0.9,), "b": (0.1, 0.2)})
    assert found == "| a reaches b | too few runs |  | too few runs |  | 1 and 2 |"


def test_what_was_evaluated_once_has_no_curve(monkeypatch):
    made_up = [{"cell": cell, "value": value, "mean_of_curve": None} for cell in "ab" for value in (0.5, 0.6)]
    monkeypatch.setattr(verdicts, "CLAIMS", [REACHES])
    monkeypatch.setattr(runs, "reported_runs", lambda grid: made_up)
    assert verdicts.verdicts().splitlines()[2].endswith("|  |  | 2 and 2 |")
