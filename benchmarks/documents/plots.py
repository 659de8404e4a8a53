# SPDX-License-Identifier: Apache-2.0
"""Plots of the benchmark records, for `docs/`; drawn by `python -m benchmarks.write_docs`."""

from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from recipes.pretraining.plots import draw_curves, draw_overheads

from ..records import DATA, records, scheme_error
from . import evidence_tables, gpu_tables


SHOWN = (
    "rceil",
    "even",
    "rceil, static factor",
    "even, dynamic factor",
    "even, block mantissas",
    "ideal scale amax / 6 (not MXFP4)",
)


def draw_all(folder: Path) -> None:
    """Every plot, as SVG but for those of many lines; the same records give the same files."""
    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.hashsalt": "hf-mxfp4", "font.size": 9}):
        for draw in (schemes, quantize_cpu, pretrain_curves, pretrain_overheads):
            draw().savefig(folder / f"{draw.__name__}.svg", metadata={"Date": None})
        evidence_tables.evidence_plot().savefig(folder / "evidence_front.svg", metadata={"Date": None})
        for name, figure in gpu_tables.figures().items():
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None})


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


def quantize_cpu() -> Figure:
    """Speed of the contenders on the largest matrices that all sizes have in common."""
    found = records("quantize_cpu")
    largest = max(record["shape"][0] for record in found)
    figure = Figure(figsize=(8.5, 4.2), layout="constrained")
    panels = figure.subplots(1, 3)
    for axes, operation in zip(panels, ("fake_quantize", "quantize", "dequantize"), strict=True):
        shown = [r for r in found if r["name"].startswith(f"{operation} /") and r["shape"][0] == largest]
        shown.sort(key=lambda r: r["value"])
        labels = [r["name"].split(" / ")[1] for r in shown]
        colors = ["tab:blue" if label.startswith("ours") else "0.6" for label in labels]
        axes.barh(labels, [r["value"] for r in shown], color=colors)
        axes.set(xscale="log", title=f"{operation}, {largest}²", xlabel="GB/s")
        axes.tick_params(labelsize=7)
        axes.grid(axis="x", alpha=0.3)
    return figure


def pretrain_curves() -> Figure:
    """Validation loss of the pretraining study's arms."""
    found = records("pretrain")
    return draw_curves({r["name"]: r["curve"] for r in found}, entropy=found[0]["entropy"])


def pretrain_overheads() -> Figure:
    """Tokens that its arms need beyond the baseline's."""
    return draw_overheads({r["name"]: r for r in records("pretrain")})
