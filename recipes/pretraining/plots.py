# SPDX-License-Identifier: Apache-2.0
"""Figures of a study: validation loss over tokens, and tokens needed beyond the baseline's."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure

from .arms import BASELINE


#: Token overheads over an FP8 baseline in percent, lowest and highest, as arXiv 2605.09825 states them (Llama-3.1-8B,
#: C4, to a loss of 3.3); `None`: "does not converge".
PAPER = {
    "fprop": (8, 9),
    "fprop_dgrad": (10, 11),
    "all": (26, 27),
    "all_sr": None,
    "all_random16": None,
    "all_deterministic16": (8, 9),
    "all_deterministic32": (8, 9),
}

Curves = Mapping[str, Sequence[Sequence[tuple[float, float | None]]]]


def mean_curve(curves: Sequence[Sequence[tuple[float, float | None]]]) -> tuple[list[float], list[float]]:
    """Tokens and mean loss of runs that were evaluated at the same tokens, as far as all of them are finite."""
    tokens, losses = [], []
    for points in zip(*curves, strict=False):
        values = [loss for _, loss in points]
        if None in values:
            break
        tokens.append(points[0][0])
        losses.append(fmean(values))
    return tokens, losses


def draw_curves(curves: Curves, *, entropy: float | None = None) -> Figure:
    """Left the mean validation loss of every arm, right its distance from the baseline's.

    Args:
        curves: the runs' curves by arm, the baseline among them.
        entropy: of the text, drawn as the floor.
    """
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    base = dict(zip(*mean_curve(curves[BASELINE]), strict=True))
    for arm, runs in curves.items():
        tokens, losses = mean_curve(runs)
        left.plot([t / 1e6 for t in tokens], losses, label=arm, color="black" if arm == BASELINE else None)
        if arm != BASELINE:
            # From the first evaluation after the start on, where all are alike.
            gaps = [(t / 1e6, loss - base[t]) for t, loss in zip(tokens, losses, strict=True) if t in base and t > 0]
            right.plot([t for t, _ in gaps], [gap for _, gap in gaps], label=arm, color=left.lines[-1].get_color())
    if entropy is not None:
        left.axhline(entropy, color="0.6", linestyle=":", label="entropy of the text")
    left.set(xlabel="million tokens", ylabel="validation loss, nats per token", yscale="log")
    right.set(xlabel="million tokens", ylabel="validation loss above the baseline's, nats")
    right.axhline(0.0, color="black", linewidth=0.8)
    left.legend(fontsize=7)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    return figure


def draw_overheads(arms: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Tokens beyond the baseline's in percent, mean and 95 % interval over seeds, beside what the paper states.

    Args:
        arms: the ``arms`` of [`summarize`] of `summary`.
    """
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    names = [arm for arm in arms if arm != BASELINE]
    for i, arm in enumerate(names):
        overhead = arms[arm]["overhead"]
        if overhead["mean"] is not None:
            mean, interval = 100 * overhead["mean"], overhead["interval"]
            error = None if interval is None else [[mean - 100 * interval[0]], [100 * interval[1] - mean]]
            axes.bar(i - 0.2, mean, 0.4, color="tab:blue", yerr=error, capsize=3, label="_" if i else "measured here")
        else:
            least = overhead["at_least"]
            text = "diverged" if least is None else f"not reached:\nover {100 * least:.0f} %"
            axes.text(i - 0.2, 0, text, ha="center", va="bottom", fontsize=7, color="tab:blue")
        if arm in PAPER:
            stated = PAPER[arm]
            if stated is None:
                axes.text(i + 0.2, 0, "paper: does\nnot converge", ha="center", va="bottom", fontsize=7, color="0.4")
            else:
                low, high = stated
                axes.bar(i + 0.2, (low + high) / 2, 0.4, yerr=(high - low) / 2, capsize=3, color="0.75")
    axes.bar(0, 0, color="0.75", label="arXiv 2605.09825: 8 B parameters, over FP8")
    axes.set_xticks(range(len(names)), names, rotation=20, ha="right", fontsize=8)
    axes.set_ylabel("tokens to the target loss\nbeyond the baseline's, %")
    axes.axhline(0.0, color="black", linewidth=0.8)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(fontsize=8)
    return figure
