# SPDX-License-Identifier: Apache-2.0
"""One grid from several machines: records of runs made elsewhere beside those of the runs made here."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .grid import Grid
from .results import Record


#: What must be equal in two records of one run, beside its options and shape. Not each one was evaluated before RL.
_OUTCOME = ("scheme", "value", "entropy", "steps", "n_test")


def read_records(path: str) -> list[Record]:
    """The records of an earlier `ablation.json`. Raises `ValueError` when it is none."""
    try:
        return json.loads(Path(path).read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error


def merge(grid: Grid, here: Sequence[Record], elsewhere: Sequence[Record]) -> list[dict[str, Any]]:
    """All records in the order of the grid (models, seeds, cells), with baselines looked up anew.

    A run that was made on both sides shows whether they are one experiment: it must have come out the same. The record
    made here is kept.

    Raises:
        ValueError: a record is of no cell of this grid or of one with other options or another size, or a run came
            out otherwise elsewhere.
    """
    cells = {_cell(f"{grid.name}/{run.name}"): run for run in grid.runs}
    order = {name: (grid.models.index(run.model), place) for place, (name, run) in enumerate(cells.items())}
    shapes = {record["model"]: record["shape"] for record in here}
    merged = {record["name"]: dict(record) for record in here}
    for record in elsewhere:
        name = record["name"]
        run = cells.get(_cell(name))
        if run is None:
            raise ValueError(f"{name} is not a run of the grid {grid.name}")
        if record["options"] != dict(run.cell.options):
            raise ValueError(f"{name} was run elsewhere with {record['options']}, here it is {dict(run.cell.options)}")
        if record["shape"] != shapes.setdefault(record["model"], record["shape"]):
            raise ValueError(f"{name} was run elsewhere with {record['shape']}, here with {shapes[record['model']]}")
        if name not in merged:
            merged[name] = dict(record)
            continue
        differing = [key for key in _OUTCOME if record[key] != merged[name][key]]
        if differing:
            key = differing[0]
            raise ValueError(
                f"{name} came out otherwise elsewhere ({key}: {record[key]}, here {merged[name][key]}), so the two are "
                "not one experiment: run the whole grid with the same versions on one kind of machine"
            )
    references = {(r["model"], r["seed"]): r["value"] for r in merged.values() if r["cell"] == grid.reference}
    for record in merged.values():
        baseline = references.get((record["model"], record["seed"]))
        record["baseline"], record["ratio"] = baseline, round(record["value"] / baseline, 4) if baseline else None

    def place(record: Record) -> tuple[int, int, int]:
        model, cell = order[_cell(record["name"])]
        return model, record["seed"], cell

    return sorted(merged.values(), key=place)


def _cell(name: str) -> str:
    """The name of a run without its seed."""
    return name.rpartition("/")[0]
