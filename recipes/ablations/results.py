# SPDX-License-Identifier: Apache-2.0
"""What the runs of a grid say: records, statistics over seeds, and the table."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from hf_mxfp4.lab.evaluation.intervals import t_interval, with_interval

from .grid import Grid, Run
from .runner import finished, read_json


Record = Mapping[str, Any]
#: The file of all records of a grid.
RECORDS = "ablation.json"
#: What records keep of what a run logged, beside its greedy evaluations.
LOGGED = ("reward", "entropy", "sampling/kl", "grad_norm")


def make_records(grid: Grid, command: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Make one record for every complete run, in the order of the grid, and name the runs with other settings.

    `value` is the accuracy after RL under the cell's own scheme (0 to 1), see [`Grid`], on `n_test` problems,
    `baseline` that of the reference with the same seed, `curves` what was logged: lists of step and value.

    Raises `ValueError` for a run with fewer evaluations than the grid takes the mean of.
    """
    found, left_out = [], []
    for run in grid.runs:
        try:
            result = finished(run)
        except ValueError:
            left_out.append(run.name)
            continue
        if result:
            found.append((run, result))
    curves = {run.name: _curves(run.folder) for run, _ in found}
    accuracies = {run.name: _accuracy(run, result, curves[run.name]) for run, result in found}
    records = []
    for run, result in found:
        score, after = next(iter(result["accuracy_after"])), accuracies[run.name]
        baseline = accuracies.get(f"{grid.reference}/seed{run.seed}")
        options, n_test = run.parse(), result["n_test"]
        if _is_mean(run, result):
            n_test = min(n_test, options.recipe.study.evaluate_every_n)
        records.append(
            {
                "name": f"{grid.name}/{run.name}",
                "shape": f"{n_test} problems, {result['steps']} GRPO steps",
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
                "learning_rate": options.training.learning_rate,
                "paper": dict(run.cell.paper),
                "reference": grid.reference,
                "naive": run.cell.naive,
                "before": result["accuracy_before"] and result["accuracy_before"][score],
                "standard_error": _standard_error(after, n_test),
                "n_test": n_test,
                **{key: result[key] for key in ("steps", "scheme", "n_quantized", "weight_sqnr_db")},
                "seconds": round(result["seconds"] + result["state"].get("earlier", 0.0), 1),
                **{key: result["state"][key] for key in ("hardware", "versions", "date")},
                "curves": curves[run.name],
                "command": command,
            }
        )
    return records, left_out


def refuse_other_results(grid: Grid) -> None:
    """Raise `ValueError` where the folder has the records of another grid, which those of this one would replace."""
    records = read_json(grid.output / RECORDS) or []
    for name in {record["name"].rsplit("/", 2)[0] for record in records} - {grid.name}:
        raise ValueError(f"{grid.output} has the results of the grid {name!r}; choose another --out")


def _curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return what a run logged of the values in `LOGGED`, with four digits."""
    logged = read_json(folder / "log_history.json") or []
    curves: dict[str, list[tuple[int, float]]] = {}
    for entry in logged:
        for name, value in entry.items():
            if value is not None and (name in LOGGED or name.startswith("greedy/")):
                curves.setdefault(name, []).append((entry["step"], float(f"{value:.4g}")))
    return curves


def _is_mean(run: Run, result: Record) -> bool:
    """Return whether a run counts with evaluations while it trained, and not with the one after it."""
    return run.grid.mean_of_last > 1 and result["steps"] > 0


def _accuracy(run: Run, result: Record, curves: Mapping[str, Sequence[tuple[int, float]]]) -> float:
    """Return the accuracy that a run counts with."""
    score, after = next(iter(result["accuracy_after"].items()))
    if not _is_mean(run, result):
        return after
    points = [value for _, value in curves.get(f"greedy/{score}", [])][-run.grid.mean_of_last :]
    if len(points) < run.grid.mean_of_last:
        raise ValueError(
            f"{run.name} was evaluated {len(points)} times while it trained, not mean_of_last="
            f"{run.grid.mean_of_last} times; set evaluate_every, and evaluate_every_n to all test problems"
        )
    return fmean(points)


# ---- statistics -----------------------------------------------------------------------------------------------------


def _standard_error(accuracy: float, n_problems: int) -> float:
    """Return that of an accuracy, from the number of problems alone."""
    return math.sqrt(accuracy * (1 - accuracy) / n_problems)


def statistics(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Return one entry per cell, accuracies from 0 to 1.

    * ``before``: of the starting point under the cell's scheme, mean over seeds; `None` where it was not evaluated;
    * ``after``: mean over seeds, with the standard error of this mean (``over_seeds``, `None` for one seed) and the one
      that follows from the number of problems (``of_problems``; the seeds share the problems);
    * ``difference``: to the reference within a seed, with the 95 % interval of [`t_interval`];
    * ``recovered``: the share of the distance of the naive cell from the reference that this cell is above it, from
      means over the seeds that all three have; `None` where the naive cell is not below the reference.
    """
    values: dict[str, dict[int, float]] = {}
    for record in records:
        values.setdefault(record["cell"], {})[record["seed"]] = record["value"]
    rows = []
    for cell, own in values.items():
        of_cell = [record for record in records if record["cell"] == cell]
        first = of_cell[0]
        reference, naive = (values.get(first[name], {}) for name in ("reference", "naive"))
        paired = [own[seed] - reference[seed] for seed in own if seed in reference]
        before = [record["before"] for record in of_cell if record["before"] is not None]
        after, spread = fmean(own.values()), t_interval(list(own.values()))["sd"]
        rows.append(
            {
                **{key: first[key] for key in ("cell", "label", "reference", "paper")},
                "seeds": sorted(own),
                "before": fmean(before) if before else None,
                "after": after,
                "over_seeds": None if spread is None else spread / math.sqrt(len(own)),
                "of_problems": _standard_error(after, first["n_test"]),
                "difference": t_interval(paired) if paired and cell != first["reference"] else None,
                "recovered": None if cell in (first["reference"], first["naive"]) else _share(own, naive, reference),
            }
        )
    return rows


def _share(own: Mapping[int, float], naive: Mapping[int, float], reference: Mapping[int, float]) -> float | None:
    seeds = [seed for seed in own if seed in naive and seed in reference]
    lost = sum(reference[seed] - naive[seed] for seed in seeds)
    return sum(own[seed] - naive[seed] for seed in seeds) / lost if lost > 0 else None


# ---- the table ------------------------------------------------------------------------------------------------------


def table_rows(records: Sequence[Record]) -> tuple[list[str], list[list[str]]]:
    """Return columns and rows of a grid's table, accuracies in percent; for [`markdown_table`] too."""
    rows = statistics(records)
    papers = list(dict.fromkeys(name for row in rows for name in row["paper"]))
    columns = ["cell", "before RL", "after RL", "seeds ±", "problems ±", "minus reference", "recovered"]
    columns += [*(f"paper: {name}" for name in papers)]
    lines = []
    for row in rows:
        percent = [row[key] for key in ("before", "after", "over_seeds", "of_problems")]
        lines.append(
            [
                row["label"],
                *("" if value is None else f"{100 * value:.1f}" for value in percent),
                "" if row["difference"] is None else with_interval(row["difference"], 100, 1),
                "" if row["recovered"] is None else f"{100 * row['recovered']:.0f} %",
                *(f"{row['paper'][name]:.1f}" if name in row["paper"] else "" for name in papers),
            ]
        )
    return columns, lines
