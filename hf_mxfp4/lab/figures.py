# SPDX-License-Identifier: Apache-2.0
"""Figures of an error analysis, after figures 1 and 3 of arXiv 2605.20402, and of an evaluation.

Each function takes data and returns a matplotlib `Figure`, which belongs to no window: `figure.savefig(...)`.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from .errors.statistics import HISTOGRAM_BINS, HISTOGRAM_RANGE, ErrorStatistics
from .evaluation.results import Evaluation
from .page import Figure


_COMPONENTS = {"scale_bias": "scale bias", "deadzone": "deadzone", "grid": "grid noise"}
#: Labels that are readable next to each other on an axis.
_MOST_LABELS = 40


def cosine_figure(layers: Mapping[str, ErrorStatistics], title: str = "") -> Figure:
    """Draw the pairwise cosines of the three error components per layer (figure 1), in the order of ``layers``.

    Raises `ValueError` when there are no layers.
    """
    _require(layers)
    figure = _figure((9, 4.2))
    axes = figure.subplots()
    positions = range(len(layers))
    pairs = next(iter(layers.values())).paper_cosines
    for pair, marker in zip(pairs, ("o", "s", "^"), strict=True):
        values = [statistics.paper_cosines[pair] for statistics in layers.values()]
        label = pair.replace("_", " ").replace("/", " · ")
        axes.plot(positions, values, marker, markersize=3.5, label=label)
    axes.axhline(0, color="0.6", linewidth=0.8)
    axes.set(title=title or "Pairwise cosines of the error components", ylabel="cosine", ylim=(-1.05, 1.05))
    if len(layers) <= _MOST_LABELS:
        labels = [plain(name) for name in layers]
        axes.set_xticks(list(positions), labels, rotation=75, ha="right", fontsize=8)
    else:
        axes.set_xlabel("layer, in order of the model")
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    return figure


def delta_figure(by_scheme: Mapping[str, ErrorStatistics], title: str = "") -> Figure:
    """Draw the histogram of ``delta = log2(s / s*)`` over all blocks, per scheme (figure 3).

    Raises `ValueError` when no scheme has a block.
    """
    shown = {scheme: statistics for scheme, statistics in by_scheme.items() if statistics.blocks}
    _require(shown)
    low, high = HISTOGRAM_RANGE
    width = (high - low) / HISTOGRAM_BINS
    edges = [low + i * width for i in range(HISTOGRAM_BINS + 1)]
    figure = _figure((6.5, 4.2))
    axes = figure.subplots()
    for (scheme, statistics), style in zip(shown.items(), itertools.cycle(("-", "--", ":", "-.")), strict=False):
        density = [count / (statistics.blocks * width) for count in statistics.histogram]
        label = f"{scheme}: mean {statistics.delta_mean:.3f}"
        axes.stairs(density, edges, label=label, linestyle=style, linewidth=1.6)
    # The axis ends two bins beyond those that hold a block.
    used = [i for statistics in shown.values() for i, count in enumerate(statistics.histogram) if count]
    first_edge = max(0, min(used) - 2)
    last_edge = min(HISTOGRAM_BINS, max(used) + 3)
    axes.set_xlim(edges[first_edge], edges[last_edge])
    axes.set(title=title or "Scale over ideal scale", xlabel="delta = log2(s / s*)", ylabel="density of blocks")
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    return figure


def ratio_figure(by_scheme: Mapping[str, Mapping[Any, ErrorStatistics]], axis_label: str) -> Figure:
    """Draw the relative error and component energies of groups (depths or layer types), one column per scheme.

    Energies are relative to that of the tensors, so columns compare. Raises `ValueError` when there are no groups.
    """
    groups = list(next(iter(by_scheme.values()), ()))
    _require(groups)
    figure = _figure((4.4 * len(by_scheme) + 0.6, 4.4))
    columns = figure.subplots(1, len(by_scheme), sharey=True, squeeze=False)[0]
    # Depths are numbers, which lines join; layer types are not.
    are_depths = all(isinstance(group, int) for group in groups)
    if are_depths:
        positions = groups
        marker = "o-"
        marker_of_whole = "k-"
    else:
        positions = list(range(len(groups)))
        marker = "o"
        marker_of_whole = "k_"
    for axes, (scheme, statistics) in zip(columns, by_scheme.items(), strict=True):
        for component, label in _COMPONENTS.items():
            values = [_percent(getattr(statistics[group], component), statistics[group].energy) for group in groups]
            axes.plot(positions, values, marker, markersize=3.5, label=label)
        whole = [100 * statistics[group].relative_mse for group in groups]
        axes.plot(positions, whole, marker_of_whole, markersize=9, label="whole error")
        axes.set_title(scheme, fontsize=9)
        axes.set_xlabel(axis_label)
        if are_depths:
            axes.xaxis.get_major_locator().set_params(integer=True)
        else:
            labels = [plain(str(group)) for group in groups]
            axes.set_xticks(positions, labels, rotation=75, ha="right", fontsize=8)
        axes.grid(alpha=0.3)
    columns[0].set_ylabel("energy / energy of the tensor, %")
    columns[0].set_ylim(bottom=0)
    columns[0].legend(fontsize=8)
    return figure


def front_figure(evaluation: Evaluation, title: str = "") -> Figure:
    """Draw KL over bits of an operand, with standard errors.

    For weights alone and for both operands, a line joins the schemes that no other beats in both.

    Raises `ValueError` when no scheme was compared with a reference.
    """
    rows = [row for row in evaluation.schemes if row.kl is not None]
    _require(rows)
    figure = _figure((9, 5))
    axes = figure.subplots()
    for color, (operands, front) in enumerate(evaluation.fronts.items()):
        bits = [row.scheme.bits for row in front]
        axes.plot(bits, [row.kl.value for row in front], color=f"C{color}", linewidth=1, label=f"front of {operands}")
        for number, row in enumerate(rows, 1):
            if row.scheme.operands != operands:
                continue
            point = (row.scheme.bits, row.kl.value)
            marker = "o" if row in front else "x"
            axes.errorbar(
                *point,
                row.kl.error or 0.0,
                fmt=marker,
                color=f"C{color}",
                label=f"{number}  {plain(row.name)}",
                capsize=3,
                markersize=5,
            )
            axes.annotate(str(number), point, (6, -3), textcoords="offset points", fontsize=8)
    figure.legend(loc="outside right upper", fontsize=8)
    # On a linear scale the smallest of such divergences would all be at zero.
    positive = [row.kl.value for row in rows if row.kl.value > 0]
    if positive and max(positive) > 10 * min(positive):
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.margins(x=0.15)
    axes.set(title=title or "Divergence and bits", xlabel="bits of an operand", ylabel="KL to the reference, nats")
    axes.grid(alpha=0.3)
    return figure


def layer_labels(names: Sequence[str]) -> list[str]:
    """Return names without what all of them start and end with, such as "0.self_attn.q_proj" for
    "model.layers.0.self_attn.q_proj.weight"."""
    parts = [name.removesuffix(".weight").split(".") for name in names]
    shared = 0
    # At least the last part of each name stays.
    if len(parts) > 1:
        shortest = min(len(part) for part in parts)
        while shared + 1 < shortest and len({part[shared] for part in parts}) == 1:
            shared += 1
    return [".".join(part[shared:]) for part in parts]


def plain(name: str) -> str:
    """Return ``name`` for a figure, where dollar signs would begin a formula."""
    return name.replace("$", r"\$")


def _figure(size: tuple[float, float]) -> Figure:
    return Figure(figsize=size, layout="constrained")


def _require(data: object) -> None:
    if not data:
        raise ValueError("nothing to plot: no statistics were given")


def _percent(part: float, whole: float) -> float:
    if whole == 0:
        return math.nan
    return 100.0 * part / whole
