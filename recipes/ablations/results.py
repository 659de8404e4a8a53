# SPDX-License-Identifier: Apache-2.0
"""What the runs of a grid say: records, statistics over seeds, and the table."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from hf_mxfp4.lab.evaluation.intervals import t_interval, welch_interval, with_interval

from .grid import Grid, Run
from .runner import finished, state_of


Record = Mapping[str, Any]
#: What records keep of what a run logged, beside its greedy evaluations and the mismatch by position.
LOGGED = ("reward", "entropy", "sampling/kl", "grad_norm")


def make_records(grid: Grid, command: str) -> list[dict[str, Any]]:
    """Make one record for every finished run, in the order of the grid.

    `value` is the accuracy after RL under the cell's own scheme (0 to 1), see [`Grid`], on `n_test` problems,
    `mean_of_curve` the mean of all greedy evaluations while it trained, `baseline` the value of the reference with the
    same seed, `distilled` what distillation before RL measured, `curves` what was logged: lists of step and value.

    Raises `ValueError` for a run with fewer evaluations than the grid takes the mean of, or with other options.
    """
    # All of them are read first: the reference of a run may come after it.
    results = []
    accuracies: dict[str, float] = {}
    for run in grid.runs:
        summary = finished(run)
        if summary is None:
            continue
        curves = _curves(run.folder)
        accuracies[run.name] = _accuracy(run, summary, curves)
        results.append((run, summary, curves))
    records = []
    for run, summary, curves in results:
        score = next(iter(summary["accuracy_after"]))
        after = accuracies[run.name]
        baseline = accuracies.get(f"{grid.reference}/seed{run.seed}")
        ratio = None
        if baseline:
            ratio = round(after / baseline, 4)
        before = None
        if summary["accuracy_before"]:
            before = summary["accuracy_before"][score]
        options = run.parse()
        n_test = summary["n_test"]
        if _is_mean(run, summary):
            n_test = min(n_test, options.recipe.study.evaluate_every_n)
        records.append(
            {
                "name": f"{grid.name}/{run.name}",
                "shape": f"{n_test} problems, {summary['steps']} GRPO steps",
                "value": after,
                "unit": f"greedy {score} accuracy",
                "baseline": baseline,
                "ratio": ratio,
                "ceiling_fraction": after,
                "mean_of_curve": mean_logged([curves], f"greedy/{score}"),
                "model": grid.label,
                "cell": run.cell.name,
                "label": run.cell.label,
                "seed": run.seed,
                "options": dict(run.cell.options),
                "learning_rate": summary["learning_rate"],
                "paper": dict(run.cell.paper),
                "reference": grid.reference,
                "before": before,
                "standard_error": _standard_error(after, n_test),
                "n_test": n_test,
                **{
                    key: summary[key]
                    for key in ("steps", "scheme", "n_quantized", "weight_sqnr_db", "seconds", "distilled")
                },
                **state_of(run),
                "curves": curves,
                "command": command,
            }
        )
    return records


def _curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return what a run logged of the values in `LOGGED`, of evaluations, and by position, with four digits."""
    curves: dict[str, list[tuple[int, float]]] = {}
    file = folder / "log_history.json"
    if not file.is_file():
        return curves
    for entry in json.loads(file.read_text()):
        for name, value in entry.items():
            if value is not None and (name in LOGGED or name.startswith(("greedy/", "sampling/kl/"))):
                curves.setdefault(name, []).append((entry["step"], float(f"{value:.4g}")))
    return curves


def _is_mean(run: Run, summary: Record) -> bool:
    """Return whether a run counts with evaluations while it trained, and not with the one after it."""
    return run.grid.mean_of_last > 1 and summary["steps"] > 0


def _accuracy(run: Run, summary: Record, curves: Mapping[str, Sequence[tuple[int, float]]]) -> float:
    """Return the accuracy that a run counts with."""
    score, after = next(iter(summary["accuracy_after"].items()))
    if not _is_mean(run, summary):
        return after
    wanted = run.grid.mean_of_last
    logged = curves.get(f"greedy/{score}", [])
    values = [value for _, value in logged[-wanted:]]
    if len(values) < wanted:
        raise ValueError(
            f"{run.name} was evaluated {len(values)} times while it trained, not mean_of_last={wanted} times; set "
            "evaluate_every, and evaluate_every_n to all test problems"
        )
    return fmean(values)


def mean_logged(runs: Iterable[Mapping[str, Any]], name: str) -> float | None:
    """Return the mean over runs and steps of what was logged under a name; `None` where nothing was."""
    values = [value for curves in runs for _, value in curves.get(name, [])]
    return fmean(values) if values else None


# ---- statistics -----------------------------------------------------------------------------------------------------


def _standard_error(accuracy: float, n_problems: int) -> float:
    """Return the standard error of an accuracy, from the number of problems alone."""
    return math.sqrt(accuracy * (1 - accuracy) / n_problems)


def error_of_mean(values: Sequence[float]) -> float | None:
    """Return the standard error of a mean; `None` for one value."""
    if len(values) == 1:
        return None
    return stdev(values) / math.sqrt(len(values))


def statistics(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Return one entry per cell, accuracies from 0 to 1.

    * ``before``: of the starting point under the cell's scheme, mean over seeds; `None` where it was not evaluated;
    * ``after``: mean over seeds, with the standard error of this mean (``over_seeds``, `None` for one seed) and the one
      that follows from the number of problems (``of_problems``; the seeds share the problems);
    * ``difference``: ``after`` minus that of the reference, with Welch's 95 % interval over the seeds of both;
    * ``paired``: the same within a seed, over the seeds that both have, with the 95 % interval of Student's t;
    * ``curve`` and ``curve_difference``: mean of all evaluations while training, and as ``difference``; `None` where a
      record has no such mean;
    * ``entropy`` and ``mismatch``: of the policy while it samples, and KL(sampler, trainer), in nats per token; means
      over all steps, `None` where nothing was logged.
    """
    by_cell: dict[str, dict[int, Record]] = {}
    for record in records:
        by_cell.setdefault(record["cell"], {})[record["seed"]] = record
    rows = []
    for cell, by_seed in by_cell.items():
        of_cell = list(by_seed.values())
        first = of_cell[0]
        values = [record["value"] for record in of_cell]
        after = fmean(values)
        before = [record["before"] for record in of_cell if record["before"] is not None]
        curves = _means_of_curves(of_cell)
        logged = [record["curves"] for record in of_cell]
        row = {
            **{key: first[key] for key in ("cell", "label", "reference", "paper")},
            "seeds": sorted(by_seed),
            "before": fmean(before) if before else None,
            "after": after,
            "over_seeds": error_of_mean(values),
            "of_problems": _standard_error(after, first["n_test"]),
            "difference": None,
            "paired": None,
            "curve": fmean(curves) if curves else None,
            "curve_difference": None,
            "entropy": mean_logged(logged, "entropy"),
            "mismatch": mean_logged(logged, "sampling/kl"),
        }
        reference = by_cell.get(first["reference"])
        if reference and cell != first["reference"]:
            row["difference"] = welch_interval([record["value"] for record in reference.values()], values)
            paired = [by_seed[seed]["value"] - reference[seed]["value"] for seed in by_seed if seed in reference]
            if paired:
                row["paired"] = t_interval(paired)
            reference_curves = _means_of_curves(list(reference.values()))
            if curves and reference_curves:
                row["curve_difference"] = welch_interval(reference_curves, curves)
        rows.append(row)
    return rows


def _means_of_curves(records: Sequence[Record]) -> list[float]:
    """Return the mean of the curve of each run; none where one has none."""
    means = [record.get("mean_of_curve") for record in records]
    return [] if None in means else means


# ---- the table ------------------------------------------------------------------------------------------------------


def table_rows(records: Sequence[Record]) -> tuple[list[str], list[list[str]]]:
    """Return columns and rows of a grid's table, accuracies in percent; for [`markdown_table`] too."""
    rows = statistics(records)
    papers = list(dict.fromkeys(name for row in rows for name in row["paper"]))
    columns = ["cell", "runs", "before RL", "after RL", "problems ±", "minus reference", "within seeds"]
    columns += ["mean of curve", "minus reference", "entropy", "sampler KL"]
    columns += [f"paper: {name}" for name in papers]
    lines = []
    for row in rows:
        cells = [
            row["label"],
            str(len(row["seeds"])),
            _percent(row["before"]),
            mean_cell(row["after"], row["over_seeds"]),
            _percent(row["of_problems"]),
            difference_cell(row["difference"]),
            difference_cell(row["paired"]),
            _percent(row["curve"]),
            difference_cell(row["curve_difference"]),
            _nats(row["entropy"]),
            _nats(row["mismatch"]),
        ]
        for name in papers:
            cells.append(f"{row['paper'][name]:.1f}" if name in row["paper"] else "")
        lines.append(cells)
    return columns, lines


def mean_cell(mean: float, error: float | None) -> str:
    """Return a mean of accuracies in percent, with its standard error where there is one."""
    if error is None:
        return _percent(mean)
    return f"{_percent(mean)} ± {_percent(error)}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f}"


def _nats(value: float | None) -> str:
    return "" if value is None else f"{value:.2g}"


def difference_cell(difference: Record | None) -> str:
    """Return a difference of [`statistics`] in points, with its interval."""
    return "" if difference is None else with_interval(difference, 100, 1, alone="")
