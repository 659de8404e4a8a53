# SPDX-License-Identifier: Apache-2.0
"""The record of a pretraining study says what its summary says."""

import pytest

from benchmarks.pretrain_study import record, stated


def summary(overhead):
    arm = {
        "overhead": {"by_seed": [], "n": 2, "n_finite": 2, "sd": 0.1, "interval": None, **overhead},
        "gap": {"mean": 0.01, "interval": None},
        "curve": [[[0, 4.0]]],
    }
    return {
        "baseline": "full precision (float32)",
        "parameters": 800_000,
        "steps": 420,
        "tokens_per_step": 1024,
        "entropy": 1.2,
        "budget_tokens": 307200,
        "target_fraction": 0.9,
        "arms": {"all": arm},
    }


@pytest.mark.parametrize(
    "overhead, value, unit, ratio",
    [
        ({"mean": 0.25}, 0.25, "token overhead", 0.8),
        ({"mean": None, "at_least": 0.6}, 0.6, "token overhead, at least", 0.625),
        ({"mean": None, "at_least": None}, "diverged", "token overhead, at least", None),
    ],
)
def test_values(overhead, value, unit, ratio):
    entry = record("all", summary(overhead), "command", "machine")
    assert (entry["value"], entry["unit"], entry["ratio"]) == (value, unit, ratio)
    assert entry["shape"] == "0.80 M parameters, 420 steps of 1024 tokens" and entry["paper"] == "26-27 %"
    assert entry["command"] == "command" and entry["hardware"] == "machine"


def test_what_the_paper_states():
    assert [stated(arm) for arm in ("fprop", "all_sr", "ours")] == ["8-9 %", "does not converge", None]
