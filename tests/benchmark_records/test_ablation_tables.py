# SPDX-License-Identifier: Apache-2.0
"""Tables and figures of recorded ablations."""

import json

import pytest

from benchmarks.documents.ablations import ablation, ablation_claims, verdict


def record(cell, seed, value, model="small", **metrics):
    return {
        "name": f"grid/{cell}/seed{seed}", "shape": "0.50 M parameters", "model": model, "cell": cell, "label": cell,
        "seed": seed, "value": value, "reference": "bf16", "naive": "mxfp4", "scheme": "s", "paper": {}, "before": None,
        "n_test": 100, "entropy": [1.0 + seed, 0.25], "seconds": 1800.0, "n_quantized": 14 * (cell != "bf16"),
        "hardware": "a machine", "command": "made so",
        "date": "2026-01-02", "metrics": metrics, "curves": {"reward": [[1, 0.5], [2, value]]},
    }  # fmt: skip


def test_the_table_says_what_ran_where(tmp_path):
    found = [record(cell, seed, value) for seed in (0, 1) for cell, value in (("bf16", 0.75), ("mxfp4", 0.5))]
    (tmp_path / "records.json").write_text(json.dumps(found))
    text = ablation(tmp_path / "records.json")
    assert text.startswith("**small**: 0.50 M parameters; 4 runs, 2.0 h on a machine; `made so`, 2026-01-02\n")
    assert "| mxfp4 |  | 50.0 | 0.0 | 5.0 | -25.0 [-25.0, -25.0] |" in text


@pytest.mark.parametrize(
    ("in_favour", "interval", "words"),
    [
        ([9.0, 11.0], [3.6, 16.4], "holds"),
        ([1.0, 19.0], [-104.4, 124.4], "points that way"),
        ([-9.0, -11.0], [3.6, 16.4], "contradicted"),
        ([-1.0, -19.0], [-124.4, 104.4], "points the other way"),
        ([-1.0, 2.0], [-18.6, 19.6], "not seen"),
        ([0.0, 2.0], [-11.7, 13.7], "not seen"),
        ([3.0], None, "points that way"),
        ([5.0, 4.0, 6.0, 5.0, -0.2], [0.94, 6.98], "holds"),
        ([-5.0, -4.0, -6.0, -5.0, 0.2], [0.94, 6.98], "contradicted"),  # of the difference before its sign is turned
    ],
)
def test_a_verdict_is_the_intervals_and_where_it_is_open_that_of_all_seeds(in_favour, interval, words):
    assert verdict(in_favour, interval) == words


def test_claims_are_paired_by_seed_and_stand_beside_the_paper(tmp_path):
    cells = {"bf16": (0.75, 0.5), "mxfp4": (0.5, 0.26), "of": (0.625, 0.24)}
    found = [record(cell, seed, value) for cell, values in cells.items() for seed, value in enumerate(values)]
    for entry in found:
        entry["paper"] = {"bf16": {"dense": 82.0, "MoE": 91.5}, "mxfp4": {"dense": 60.0}, "of": {}}[entry["cell"]]
    (tmp_path / "records.json").write_text(json.dumps(found))
    lines = ablation_claims(tmp_path / "records.json").splitlines()
    assert "| Plain MXFP4 costs accuracy | -24.5 [-30.9, -18.1] | holds | -22.0 (dense) |" in lines
    # +12.5 and -2: mean 5.25, standard error 7.25, times 12.706 with one degree of freedom
    assert "| Outlier fallback gives some of it back | +5.2 [-86.9, +97.4] | not seen |  |" in lines
    assert not any("Macro-block" in line for line in lines)
