# SPDX-License-Identifier: Apache-2.0
"""Plots of the benchmark records, for `docs/`; drawn by `python -m benchmarks.write_docs`."""

from pathlib import Path
from statistics import fmean

import matplotlib
from matplotlib.figure import Figure

from hf_mxfp4.recipes.pretraining.summary import draw_overheads

from ..records import DATA, records, scheme_error
from .evidence import (
    AS_IT_IS,
    FIRST_PAGE,
    FOR_BOTH,
    OURS,
    PAPERS,
    ROTATED,
    ROUNDED,
    SMOOTHED,
    Record,
    by_scheme,
    of_both_operands,
    results_by_text,
)
from .runs import runs_of


#: Schemes in the plot of errors.
SCHEMES = (
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
        for draw in (schemes, pretrain_overheads, evidence_front, tensor_cores, recovery):
            draw().savefig(folder / f"{draw.__name__}.svg", metadata={"Date": None})


def schemes() -> Figure:
    """Draw the relative error of schemes, a group of bars per kind of data."""
    found = scheme_error()
    figure = Figure(figsize=(8.5, 3.8), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(SCHEMES)
    for i, name in enumerate(SCHEMES):
        values = [100 * found[on, name]["value"] for on in DATA]
        places = [j + (i - len(SCHEMES) / 2) * width for j in range(len(DATA))]
        axes.bar(places, values, width, label=name, align="edge")
    axes.set_xticks(range(len(DATA)), DATA)
    axes.set_ylabel("relative squared error, %")
    axes.legend(ncols=2, fontsize=8)
    axes.grid(axis="y", alpha=0.3)
    return figure


def pretrain_overheads() -> Figure:
    """Draw the tokens that arms of pretraining need beyond the baseline's."""
    return draw_overheads({r["name"]: r for r in records("pretrain") if r["name"] != "all_oscireset"})


def evidence_front() -> Figure:
    """Draw KL over bits of weights and activations: the papers' schemes, ours, and ours on prepared checkpoints."""
    results = next(iter(results_by_text().values()))
    groups: dict[str, list[Record]] = {}
    for record in of_both_operands(results):
        group = _group_of(record)
        if group is not None:
            groups.setdefault(group, []).append(record)
    figure = Figure(figsize=(8.5, 4.4), layout="constrained")
    axes = figure.subplots()
    for color, label in enumerate(_GROUPS):
        points = sorted((r["bits"], r["kl"], 2 * r["kl_standard_error"]) for r in groups.get(label, []))
        bits = [point[0] for point in points]
        kl = [point[1] for point in points]
        errors = [point[2] for point in points]
        axes.errorbar(bits, kl, errors, fmt="o", color=f"C{color}", markersize=4, capsize=2, label=label)
        front = [p for p in points if not any(q[0] <= p[0] and q[1] < p[1] for q in points)]
        axes.plot([p[0] for p in front], [p[1] for p in front], color=f"C{color}", linewidth=1, alpha=0.7)
    axes.set_yscale("log")
    axes.set_xlabel("bits of an operand, weights and activations quantized")
    axes.set_ylabel("KL to bfloat16, nats per token")
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3, which="both")
    return figure


#: Groups of points in the order of their colours, with the variant of the checkpoint.
_GROUPS = {
    "the papers' schemes": AS_IT_IS,
    "ours, any checkpoint": AS_IT_IS,
    "+ smoothing": SMOOTHED,
    "+ GPTQ": ROUNDED,
    "+ rotation by H64": ROTATED,
    "+ GPTQ for quantized inputs": FOR_BOTH,
}


def _group_of(record: Record) -> str | None:
    """Return the group of points that a record is in, `None` for one that is not drawn."""
    name = record["name"]
    variant = record["variant"]
    if variant == AS_IT_IS:
        if name in PAPERS:
            return "the papers' schemes"
        return "ours, any checkpoint" if name.startswith((OURS, f"w4a4:{OURS}")) else None
    if variant == SMOOTHED and (not name.startswith(OURS) or "H64" in name):
        return None
    return next((group for group, of in _GROUPS.items() if of == variant), None)


def tensor_cores() -> Figure:
    """Draw KL over the mean bits of both operands, by what multiplies; lines go to the smoothed and rounded
    checkpoints."""
    figure = Figure(figsize=(8.5, 4.4), layout="constrained")
    axes = figure.subplots()
    kinds = sorted({tuple(record["tensor_cores"]) for record in records("tensor_cores")})
    for color, (hopper, blackwell) in enumerate(kinds):
        axes.plot([], [], "o", color=f"C{color}", label=f"{hopper} on Hopper, {blackwell} on Blackwell")
    results = next(iter(results_by_text("tensor_cores").values()))
    for name, by_variant in by_scheme(results).items():
        bits = []
        for record in by_variant.values():
            both = (record["weight_bits"] + 16) / 2 if name.startswith("w4a16") else record["bits"]
            bits.append(both)
        kl = [record["kl"] for record in by_variant.values()]
        color = f"C{kinds.index(tuple(by_variant[AS_IT_IS]['tensor_cores']))}"
        axes.plot(bits, kl, "-o", markersize=4, color=color)
        axes.annotate(name, (bits[0], kl[0]), xytext=(5, -2), textcoords="offset points", fontsize=6)
    axes.set(
        yscale="log",
        xlim=(4, 12),
        xlabel="mean bits of both operands, 16 in full precision",
        ylabel="KL to bfloat16, nats per token",
    )
    axes.legend(fontsize=8)
    return figure


def recovery() -> Figure:
    """Draw accuracy over the steps of RL for the schemes of the first page, means over seeds."""
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.subplots()
    for row in FIRST_PAGE:
        logged = [run["curves"] for run in runs_of(row.cell)]
        if not any(logged):  # not run, or rounded after training
            continue
        curves = [curves["greedy/first_line"] for curves in logged]
        steps = [step for step, _ in curves[0]]
        means = [100 * fmean(value for _, value in points) for points in zip(*curves, strict=True)]
        label = row.name.replace("*", "").partition(":")[0]
        axes.plot(steps, means, "-o", markersize=3, label=label)
    axes.set(xlabel="GRPO steps", ylabel="greedy accuracy, %", ylim=(0, 70))
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right center", fontsize=9)
    return figure
