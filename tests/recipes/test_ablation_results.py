# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of the tables: means, errors, paired differences, shares recovered."""

import json
import math
from pathlib import Path

import pytest

from recipes.ablations.grid import read_grid
from recipes.ablations.results import (
    draw_accuracy,
    markdown,
    statistics,
)


def record(cell, seed, value, **changes):
    return {
        "model": "m", "cell": cell, "label": cell.upper(), "seed": seed, "value": value, "reference": "bf16",
        "naive": "mxfp4", "scheme": "s", "paper": {}, "before": None, "n_test": 100, "entropy": [1.0, 0.5],
        "seconds": 10.0, "metrics": {}, "curves": {}, **changes,
    }  # fmt: skip


RECORDS = [
    record("bf16", 0, 0.80, before=0.5, paper={"dense": 82.0, "MoE": 91.51}),
    record("bf16", 1, 0.84),
    record("bf16", 2, 0.88),
    record("mxfp4", 0, 0.60, before=0.2, paper={"dense": 60.1, "MoE": 88.8}),
    record("mxfp4", 1, 0.64),
    record("mxfp4", 2, 0.68),
    record("mbs", 0, 0.70, paper={"MoE": 90.1}),
    record("mbs", 1, 0.72),
    record("mbs", 2, 0.80),
]


def row(records, cell, model="m"):
    return next(row for row in statistics(records, model) if row["cell"] == cell)


def test_means_and_the_two_standard_errors():
    found = row(RECORDS, "mbs")
    assert found["after"] == pytest.approx(0.74) and found["before"] is None and found["seeds"] == [0, 1, 2]
    # Deviations -4, -2, 6 points: variance 28 points squared.
    assert found["over_seeds"] == pytest.approx(math.sqrt(28 / 3) / 100)
    assert found["of_problems"] == pytest.approx(math.sqrt(0.74 * 0.26 / 100))
    assert row(RECORDS, "bf16")["before"] == 0.5 and found["entropy"] == [1.0, 0.5]


def test_differences_are_taken_within_seeds():
    difference = row(RECORDS, "mbs")["difference"]
    # -10, -12, -8 points: mean -10, standard deviation 2, and t(2) is 4.303.
    assert difference["mean"] == pytest.approx(-0.10)
    half = 4.303 * 0.02 / math.sqrt(3)
    assert difference["interval"] == pytest.approx([-0.10 - half, -0.10 + half])
    # Equal shifts leave nothing between seeds, however far apart the seeds are.
    assert row(RECORDS, "mxfp4")["difference"]["interval"] == pytest.approx([-0.2, -0.2])
    assert row(RECORDS, "bf16")["difference"] is None


def test_the_share_of_the_gap_that_is_recovered():
    # Of three times 20 points, 10, 8 and 12.
    assert row(RECORDS, "mbs")["recovered"] == pytest.approx(0.5)
    assert row(RECORDS, "mxfp4")["recovered"] is None and row(RECORDS, "bf16")["recovered"] is None
    # Nothing was lost: there is nothing to recover.
    no_gap = [record(r["cell"], r["seed"], 0.9 if r["cell"] == "mxfp4" else r["value"]) for r in RECORDS]
    assert row(no_gap, "mbs")["recovered"] is None


def test_the_table_to_the_letter():
    assert markdown(RECORDS, "m") == (
        "| cell | before RL | after RL | seeds ± | problems ± | minus reference | recovered | paper: dense | "
        "paper: MoE |\n"
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |\n"
        "| BF16 | 50.0 | 84.0 | 2.3 | 3.7 |  |  | 82.0 | 91.5 |\n"
        "| MXFP4 | 20.0 | 64.0 | 2.3 | 4.8 | -20.0 [-20.0, -20.0] |  | 60.1 | 88.8 |\n"
        "| MBS |  | 74.0 | 3.1 | 4.4 | -10.0 [-15.0, -5.0] | 50 % |  | 90.1 |\n"
    )


def test_accuracy_is_shown_beside_the_papers_distances():
    left, right = draw_accuracy(RECORDS, "m").axes
    assert [bar.get_width() for bar in left.patches] == pytest.approx([84.0, 64.0, 74.0])
    stated = {line.get_label(): list(line.get_xdata()) for line in right.lines}
    assert stated["paper: dense"] == pytest.approx([0.0, -21.9])
    assert stated["paper: MoE"] == pytest.approx([0.0, -2.71, -1.41])


def test_the_committed_records_are_of_the_shipped_grid():
    root = Path(__file__).resolve().parents[2]
    grid = read_grid(root / "recipes" / "configs" / "ablation_cpu.yaml")
    path = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "ablation_cpu.json"
    cells = {cell.name: dict(cell.options) for cell in grid.cells}
    assert all(record["options"] == cells[record["cell"]] for record in json.loads(path.read_text()))
