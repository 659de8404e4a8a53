# SPDX-License-Identifier: Apache-2.0
"""Figures of a grid: reward and entropy over steps, accuracy beside the paper's, and error components."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure

from .results import Record, statistics


_COMPONENTS = {"error/scale_bias": "scale bias", "error/deadzone": "deadzone", "error/grid": "grid"}


def draw_all(records: Sequence[Record], model: str) -> dict[str, Figure]:
    """Every figure of a model that there is something to draw for, by name."""
    figures = {
        "greedy": draw_curves(records, model, "greedy", "greedy accuracy"),
        "reward": draw_curves(records, model, "reward", "mean reward of the rollouts"),
        "entropy": draw_curves(records, model, "entropy", "policy entropy, nats per token"),
        "accuracy": draw_accuracy(records, model),
        "errors": draw_errors(records, model),
    }
    return {name: figure for name, figure in figures.items() if figure is not None}


def draw_curves(records: Sequence[Record], model: str, key: str, label: str) -> Figure | None:
    """A logged quantity over steps, a panel for each cell: its mean over seeds, a band from the lowest to the highest,
    and the means of the reference and of the naive cell."""
    cells: dict[str, list[Mapping[int, float]]] = {}
    backdrop: dict[str, str] = {}
    for record in records:
        if record["model"] == model and key in record["curves"]:
            cells.setdefault(record["label"], []).append(dict(record["curves"][key]))
            if record["cell"] == record["reference"]:
                backdrop[record["label"]] = "black"
            elif record["cell"] == record["naive"]:
                backdrop.setdefault(record["label"], "tab:red")
    if not cells:
        return None
    panels = [name for name in cells if name not in backdrop] or list(cells)
    columns = min(4, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(2.6 * columns + 0.6, 2.0 * rows + 1.0), layout="constrained")
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    for axes, name in zip(grid.flat, panels, strict=False):
        for other, color in backdrop.items():
            axes.plot(*_means(cells[other]), color=color, linewidth=0.9, label=other)
        if name not in backdrop:
            axes.plot(*_means(cells[name]), color="tab:blue", linewidth=1.4, label="the cell")
        steps = _shared_steps(cells[name])
        values = [[curve[step] for curve in cells[name]] for step in steps]
        axes.fill_between(steps, [min(v) for v in values], [max(v) for v in values], color="tab:blue", alpha=0.2)
        axes.set_title(name, fontsize=8)
        axes.tick_params(labelsize=7)
        axes.grid(alpha=0.3)
    figure.supxlabel("step", fontsize=9)
    figure.supylabel(label, fontsize=9)
    lines, names = grid.flat[0].get_legend_handles_labels()
    figure.legend(lines, names, loc="outside upper center", ncols=3, fontsize=8)
    return figure


def _shared_steps(curves: Sequence[Mapping[int, float]]) -> list[int]:
    return sorted(set.intersection(*(set(curve) for curve in curves)))


def _means(curves: Sequence[Mapping[int, float]]) -> tuple[list[int], list[float]]:
    steps = _shared_steps(curves)
    return steps, [fmean(curve[step] for curve in curves) for step in steps]


def draw_accuracy(records: Sequence[Record], model: str) -> Figure:
    """Accuracy before and after RL with the standard error over seeds (of the problems where there is one seed), beside
    the paper's distance from its reference."""
    rows = statistics(records, model)
    papers = list(dict.fromkeys(name for row in rows for name in row["paper"]))
    figure = Figure(figsize=(10, 0.42 * len(rows) + 1.8), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    positions = range(len(rows))
    for i, row in enumerate(rows):
        error = row["of_problems"] if row["over_seeds"] is None else row["over_seeds"]
        left.barh(
            i, 100 * row["after"], 0.6, xerr=100 * error, capsize=3, color="tab:blue", label="_" if i else "after RL"
        )
        if row["before"] is not None:
            left.plot(100 * row["before"], i, "k|", markersize=14, label="_" if i else "before RL")
        difference = row["difference"]
        if difference is not None:
            _point(right, difference, i)
    reference = next((row for row in rows if row["cell"] == row["reference"]), {"label": "reference", "paper": {}})
    for name, marker in zip(papers, "sD^v", strict=False):
        if name in reference["paper"]:
            zero = reference["paper"][name]
            stated = [(row["paper"][name] - zero, i) for i, row in enumerate(rows) if name in row["paper"]]
            right.plot([x for x, _ in stated], [i for _, i in stated], marker, color="0.55", label=f"paper: {name}")
    left.set_yticks(list(positions), [row["label"] for row in rows], fontsize=8)
    left.invert_yaxis()
    left.set(xlabel="greedy accuracy, %", title=model)
    right.set(xlabel=f"minus {reference['label']}, points", title="with 95 % intervals over seeds")
    right.axvline(0.0, color="black", linewidth=0.8)
    right.plot([], [], "o", color="tab:blue", label="here")
    for axes in (left, right):
        axes.grid(axis="x", alpha=0.3)
        axes.legend(fontsize=7)
    return figure


def _point(axes: Any, difference: Mapping[str, Any], position: int) -> None:
    mean, interval = 100 * difference["mean"], difference["interval"]
    error = None if interval is None else [[mean - 100 * interval[0]], [100 * interval[1] - mean]]
    axes.errorbar(mean, position, xerr=error, fmt="o", color="tab:blue", capsize=3)


def draw_errors(records: Sequence[Record], model: str) -> Figure | None:
    """Energy of the components of the weights' error as a share of the energy of the whole, mean over run and seeds."""
    found: dict[str, dict[str, list[float]]] = {}
    for record in records:
        for key in _COMPONENTS:
            if record["model"] == model and key in record["metrics"]:
                found.setdefault(record["label"], {}).setdefault(key, []).append(record["metrics"][key])
    if not found:
        return None
    figure = Figure(figsize=(9, 0.42 * len(found) + 1.6), layout="constrained")
    axes = figure.subplots()
    for i, (key, label) in enumerate(_COMPONENTS.items()):
        values = [fmean(of_cell.get(key, [0.0])) for of_cell in found.values()]
        axes.barh([j + 0.27 * (i - 1) for j in range(len(found))], values, 0.25, label=label)
    axes.set_yticks(range(len(found)), list(found), fontsize=8)
    axes.invert_yaxis()
    axes.set(xlabel="energy / energy of the whole error", title=model)
    axes.grid(axis="x", alpha=0.3)
    axes.legend(fontsize=8)
    return figure
