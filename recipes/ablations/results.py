# SPDX-License-Identifier: Apache-2.0
"""What the runs of a grid say: records, statistics over seeds, and the table."""

import json
import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure

from hf_mxfp4.lab.stats import t_interval
from recipes.common.records import markdown_table, with_interval

from .grid import Grid, Run
from .runner import finished, stored_base


#: What is logged and says nothing in the mean.
_NO_METRICS = ("step", "epoch", "num_tokens", "total_flos", "learning_rate", "train_", "greedy")
Record = Mapping[str, Any]


def make_records(grid: Grid, command: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Make one record for every complete run, in the order of the grid, and name the runs with other settings.

    `value` is the accuracy after RL under the cell's own scheme (0 to 1), `baseline` that of the reference with the
    same seed.
    """
    found, left_out = [], []
    for run in grid.runs:
        try:
            base = stored_base(grid)
            result = base and finished(run, base["settings"])
        except ValueError:
            left_out.append(run.name)
            continue
        if result:
            found.append((run, base["parameters"], result))
    accuracies = {run.folder: next(iter(result["accuracy_after"].values())) for run, _, result in found}
    records = []
    for run, parameters, result in found:
        score = next(iter(result["accuracy_after"]))
        after = accuracies[run.folder]
        baseline = accuracies.get(grid.output / "cells" / grid.reference / f"seed{run.seed}")
        size = f"{parameters / 1e6:.2f} M parameters, " if parameters else ""
        records.append(
            {
                "name": f"{grid.name}/{run.name}",
                "shape": f"{size}{result['n_test']} problems, {result['steps']} GRPO steps",
                "value": after,
                "unit": f"greedy {score} accuracy",
                "baseline": baseline,
                "ratio": round(after / baseline, 4) if baseline else None,
                "ceiling_fraction": after,
                "model": grid.label,
                "cell": run.cell.name,
                "label": run.cell.label,
                "seed": run.seed,
                "options": dict(run.cell.options),
                "paper": dict(run.cell.paper),
                "reference": grid.reference,
                "naive": run.cell.naive,
                "before": result["accuracy_before"] and result["accuracy_before"][score],
                "standard_error": result["standard_error_after"][score],
                "scores": result["accuracy_after"],
                "entropy": [result["entropy_first"], result["entropy_last"]],
                "entropy_alarms": len(result["entropy_alarms"]),
                **{key: result[key] for key in ("n_test", "steps", "scheme", "n_quantized", "weight_sqnr_db")},
                "metrics": _logged(run),
                "seconds": round(result["seconds"] + result["state"].get("earlier", 0.0), 1),
                **{key: result["state"][key] for key in ("hardware", "versions", "date")},
                "command": command,
            }
        )
    return records, left_out


def _logged(run: Run) -> dict[str, float]:
    """Means of what the trainer logged."""
    metrics: dict[str, list[float]] = {}
    for entry in json.loads((run.folder / "log_history.json").read_text()):
        for key, value in entry.items():
            if not key.startswith(_NO_METRICS) and isinstance(value, int | float) and math.isfinite(value):
                metrics.setdefault(key, []).append(value)
    return {key: float(f"{fmean(values):.6g}") for key, values in metrics.items()}


# ---- statistics -----------------------------------------------------------------------------------------------------


def models(records: Sequence[Record]) -> list[str]:
    """Return the models that records are about, in their order."""
    return list(dict.fromkeys(record["model"] for record in records))


def statistics(records: Sequence[Record], model: str) -> list[dict[str, Any]]:
    """One entry per cell of a model, accuracies from 0 to 1:

    * ``before``: of the starting point under the cell's scheme, mean over seeds; `None` where it was not evaluated;
    * ``after``: mean over seeds, with the standard error of this mean (``over_seeds``, `None` for one seed) and the one
      that follows from the number of problems (``of_problems``; the seeds share the problems);
    * ``difference``: to the reference within a seed, with the 95 % interval of [`t_interval`];
    * ``recovered``: the share of the distance of the naive cell from the reference that this cell is above it, from
      means over the seeds that all three have; `None` where the naive cell is not below the reference.
    """
    by_cell: dict[str, dict[int, Record]] = {}
    for record in records:
        if record["model"] == model:
            by_cell.setdefault(record["cell"], {})[record["seed"]] = record
    rows = []
    for cell, of_seed in by_cell.items():
        first = next(iter(of_seed.values()))
        values = {seed: record["value"] for seed, record in of_seed.items()}
        mean = fmean(values.values())
        spread = t_interval(list(values.values()))
        reference = {seed: record["value"] for seed, record in by_cell.get(first["reference"], {}).items()}
        naive = {seed: record["value"] for seed, record in by_cell.get(first["naive"], {}).items()}
        paired = [values[seed] - reference[seed] for seed in values if seed in reference]
        recovered = _share(values, naive, reference)
        before = [record["before"] for record in of_seed.values() if record["before"] is not None]
        rows.append(
            {
                "cell": cell,
                "label": first["label"],
                "reference": first["reference"],
                "scheme": first["scheme"],
                "paper": first["paper"],
                "seeds": sorted(values),
                "before": fmean(before) if before else None,
                "after": mean,
                "over_seeds": None if spread["sd"] is None else spread["sd"] / math.sqrt(len(values)),
                "of_problems": math.sqrt(mean * (1 - mean) / first["n_test"]),
                "difference": t_interval(paired) if paired and cell != first["reference"] else None,
                "recovered": None if cell in (first["reference"], first["naive"]) else recovered,
                "entropy": [_mean([r["entropy"][i] for r in of_seed.values()]) for i in (0, 1)],
                "seconds": fmean(record["seconds"] for record in of_seed.values()),
            }
        )
    return rows


def _mean(values: Sequence[float | None]) -> float | None:
    return None if None in values else fmean(values)


def _share(values: Mapping[int, float], naive: Mapping[int, float], reference: Mapping[int, float]) -> float | None:
    seeds = [seed for seed in values if seed in naive and seed in reference]
    lost = sum(reference[seed] - naive[seed] for seed in seeds)
    return sum(values[seed] - naive[seed] for seed in seeds) / lost if lost > 0 else None


# ---- tables ---------------------------------------------------------------------------------------------------------


def table_rows(records: Sequence[Record], model: str) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of a model's table, accuracies in percent."""
    rows = statistics(records, model)
    papers = list(dict.fromkeys(name for row in rows for name in row["paper"]))
    columns = ["cell", "before RL", "after RL", "seeds ±", "problems ±", "minus reference", "recovered"]
    columns += [*(f"paper: {name}" for name in papers)]
    lines = []
    for row in rows:
        lines.append(
            [
                row["label"],
                _percent(row["before"]),
                _percent(row["after"]),
                _percent(row["over_seeds"]),
                _percent(row["of_problems"]),
                "" if row["difference"] is None else with_interval(row["difference"], 100, 1),
                "" if row["recovered"] is None else f"{100 * row['recovered']:.0f} %",
                *(f"{row['paper'][name]:.1f}" if name in row["paper"] else "" for name in papers),
            ]
        )
    return columns, lines


def markdown(records: Sequence[Record], model: str) -> str:
    """A model's table in Markdown."""
    return markdown_table(*table_rows(records, model))


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f}"


def draw_accuracy(records: Sequence[Record], model: str) -> Figure:
    """Draw accuracies before and after RL with the standard error over seeds (of the problems where there is one seed),
    next to the paper's distance from its reference."""
    rows = statistics(records, model)
    figure = Figure(figsize=(10, 0.42 * len(rows) + 1.8), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for i, row in enumerate(rows):
        error = row["of_problems"] if row["over_seeds"] is None else row["over_seeds"]
        left.barh(i, 100 * row["after"], 0.6, xerr=100 * error, capsize=3, color="tab:blue")
        if row["before"] is not None:
            left.plot(100 * row["before"], i, "k|", markersize=14)
        if row["difference"] is not None:
            mean, interval = 100 * row["difference"]["mean"], row["difference"]["interval"]
            error = None if interval is None else [[mean - 100 * interval[0]], [100 * interval[1] - mean]]
            right.errorbar(mean, i, xerr=error, fmt="o", color="tab:blue", capsize=3)
    reference = next((row for row in rows if row["cell"] == row["reference"]), {"paper": {}})
    for (name, zero), marker in zip(reference["paper"].items(), "sD^v", strict=False):
        stated = [(row["paper"][name] - zero, i) for i, row in enumerate(rows) if name in row["paper"]]
        right.plot(*zip(*stated, strict=True), marker, color="0.55", label=f"paper: {name}")
    left.set_yticks(range(len(rows)), [row["label"] for row in rows], fontsize=8)
    left.invert_yaxis()
    left.set(xlabel="greedy accuracy after RL, % (before: |)", title=model)
    right.set(xlabel="minus the reference, points", title="with 95 % intervals over seeds")
    right.axvline(0.0, color="black", linewidth=0.8)
    right.plot([], [], "o", color="tab:blue", label="here")
    right.legend(fontsize=7)
    for axes in (left, right):
        axes.grid(axis="x", alpha=0.3)
    return figure
