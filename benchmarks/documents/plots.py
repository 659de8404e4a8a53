# SPDX-License-Identifier: Apache-2.0
"""Plots of the benchmark records, for `docs/`; drawn by `python -m benchmarks.write_docs`."""

from pathlib import Path
from statistics import fmean

import matplotlib
from matplotlib.figure import Figure

from hf_mxfp4.recipes.pretraining.summary import draw_overheads

from ..records import DATA, records, scheme_error
from .evidence import FIRST_PAGE, evidence_plot, tensor_cores_plot
from .runs import runs_at_the_best_rate


SHOWN = (
    "rceil",
    "even",
    "rceil, static factor",
    "even, dynamic factor",
    "even, block mantissas",
    "ideal scale amax / 6 (not MXFP4)",
)


def draw_all(folder: Path) -> None:
    """Draw every plot as SVG; the same records give the same files."""
    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.hashsalt": "hf-mxfp4", "font.size": 9}):
        for draw in (schemes, pretrain_overheads, evidence_plot, tensor_cores_plot, recovery_plot):
            name = "evidence_front" if draw is evidence_plot else draw.__name__.removesuffix("_plot")
            draw().savefig(folder / f"{name}.svg", metadata={"Date": None})


def schemes() -> Figure:
    """Relative error of the schemes, a group of bars per kind of data."""
    found = scheme_error()
    figure = Figure(figsize=(8.5, 3.8), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(SHOWN)
    for i, name in enumerate(SHOWN):
        values = [100 * found[on, name]["value"] for on in DATA]
        axes.bar([j + (i - len(SHOWN) / 2) * width for j in range(len(DATA))], values, width, label=name, align="edge")
    axes.set_xticks(range(len(DATA)), DATA)
    axes.set_ylabel("relative squared error, %")
    axes.legend(ncols=2, fontsize=8)
    axes.grid(axis="y", alpha=0.3)
    return figure


def pretrain_overheads() -> Figure:
    """Tokens that its arms need beyond the baseline's."""
    return draw_overheads({r["name"]: r for r in records("pretrain") if r["name"] != "all_oscireset"})


def recovery_plot() -> Figure:
    """Accuracy over the steps of RL for the schemes of the first page, means over seeds."""
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes, runs = figure.subplots(), runs_at_the_best_rate()
    for name, *_, cell in FIRST_PAGE:
        curves = [r["curves"]["greedy/first_line"] for r in runs if r["cell"] == cell]
        steps = [step for step, _ in curves[0]]
        means = [100 * fmean(value for _, value in points) for points in zip(*curves, strict=True)]
        axes.plot(steps, means, "-o", markersize=3, label=name.replace("*", "").partition(":")[0])
    axes.set(xlabel="GRPO steps", ylabel="greedy accuracy, %", ylim=(0, 70))
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right center", fontsize=9)
    return figure
