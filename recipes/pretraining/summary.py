# SPDX-License-Identifier: Apache-2.0
"""What the curves of a study say: tokens to a target loss, gaps at equal tokens, and how sure of them one can be.

A curve is a list of ``(tokens, validation loss)`` with the loss `None` where it was not finite.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from hf_mxfp4.lab.evaluation.intervals import t_interval, with_interval
from hf_mxfp4.recipes.common.reporting import print_table

from .arguments import BASELINE


Curve = Sequence[tuple[float, float | None]]
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


def _arrays(curve: Curve) -> tuple[np.ndarray, np.ndarray]:
    return np.array([tokens for tokens, _ in curve]), np.array([loss for _, loss in curve], dtype=float)


def tokens_to_target(curve: Curve, target: float) -> float | None:
    """Return the tokens at which the loss first is at or below ``target``, by linear interpolation between two
    evaluations; `None` when it never is."""
    tokens, losses = _arrays(curve)
    reached = np.flatnonzero(losses <= target)
    if len(reached) == 0:
        return None
    last = slice(max(0, reached[0] - 1), reached[0] + 1)
    return float(np.interp(target, losses[last][::-1], tokens[last][::-1]))


def loss_at(curve: Curve, tokens: float) -> float | None:
    """Return the loss after ``tokens``, by linear interpolation; `None` where a neighbour was not finite."""
    loss = float(np.interp(tokens, *_arrays(curve)))
    return loss if math.isfinite(loss) else None


def summarize(runs: Sequence[Mapping[str, Any]], *, budget: int, target_fraction: float) -> dict[str, Any]:
    """Compute overheads and gaps of every arm, paired by seed with the baseline.

    For each seed, the target is the loss that the baseline has after ``target_fraction * budget`` tokens. The overhead
    of an arm is the tokens it takes to get there over those of the baseline, minus one, both by
    [`tokens_to_target`]. The gap is its loss after ``budget`` tokens minus the baseline's.

    Args:
        runs: finished runs with ``arm``, ``seed``, ``curve``; the baseline's among them.

    Returns:
        ``arms``: for each arm ``overhead`` and ``gap``, each with ``by_seed`` and the fields of [`t_interval`] over the
        seeds. Where a seed did not reach its target its overhead is `None`, and so is ``mean``.
    """
    by_arm: dict[str, dict[int, Curve]] = {}
    for run in runs:
        by_arm.setdefault(run["arm"], {})[run["seed"]] = run["curve"]
    baseline = by_arm[BASELINE]
    targets = {seed: loss_at(curve, target_fraction * budget) for seed, curve in baseline.items()}
    ends = {seed: loss_at(curve, budget) for seed, curve in baseline.items()}
    if None in targets.values() or None in ends.values():
        raise ValueError("the baseline diverged, so that there is no target; lower learning_rate")
    needed = {seed: tokens_to_target(curve, targets[seed]) for seed, curve in baseline.items()}
    if 0 in needed.values():
        raise ValueError(
            "the validation loss of the baseline is no lower than before training, so that there is no target; change "
            "learning_rate, or train longer with max_steps"
        )
    arms = {}
    for arm, curves in by_arm.items():
        seeds = sorted(seed for seed in curves if seed in baseline)
        # `None` where a run did not reach the target, or diverged.
        overheads: list[float | None] = []
        gaps: list[float | None] = []
        for seed in seeds:
            taken = tokens_to_target(curves[seed], targets[seed])
            overheads.append(None if taken is None else taken / needed[seed] - 1)
            loss = loss_at(curves[seed], budget)
            gaps.append(None if loss is None else loss - ends[seed])
        arms[arm] = {"seeds": seeds, "overhead": _over_seeds(overheads), "gap": _over_seeds(gaps)}
    return {
        "budget_tokens": budget,
        "target_fraction": target_fraction,
        "targets": {str(seed): target for seed, target in targets.items()},
        "arms": arms,
    }


def _over_seeds(values: Sequence[float | None]) -> dict[str, Any]:
    """Return values by seed with their statistics, which are None where a seed has no value."""
    finite = [value for value in values if value is not None]
    statistics: dict[str, Any] = {"n": len(values), "mean": None, "sd": None, "interval": None}
    if len(finite) == len(values):
        statistics = t_interval(finite)
    return {"by_seed": list(values), "n_finite": len(finite), **statistics}


def print_summary(summary: dict[str, Any]) -> None:
    """Print the closing table."""
    budget = f"{summary['target_fraction']:.0%} of {summary['budget_tokens'] / 1e6:.2f} M tokens"
    rows = []
    for name, result in summary["arms"].items():
        operands = sum(count > 0 for count in result["quantized_operands"].values())
        overhead = result["overhead"]
        quantized = "nothing"
        if operands:
            quantized = f"{operands} of 6 operands, {result['n_quantized']} layers"
        overhead_text = ""
        gap_text = ""
        if name != BASELINE:
            missed = f"not reached by {overhead['n'] - overhead['n_finite']} of {overhead['n']} seeds"
            overhead_text = with_interval(overhead, 100.0, 1, unit=" %", missing=missed)
            gap_text = with_interval(result["gap"], 1.0, 4)
        rows.append([name, quantized, overhead_text, gap_text, f"{fmean(result['seconds']):.0f}"])
    title = f"tokens to the loss of {BASELINE} ({summary['baseline']}) after {budget}"
    print_table(title, rows, ("arm", "quantized", "token overhead", "loss above baseline", "s per run"))


def draw_overheads(arms: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Draw the tokens of ``arms`` (as [`summarize`] has them) beyond the baseline's in percent, with their intervals, a
    row for each, next to what the paper states."""
    overheads = {arm: result["overhead"] for arm, result in arms.items() if arm != BASELINE}
    stated = [(row, fmean(PAPER[arm])) for row, arm in enumerate(overheads) if PAPER.get(arm)]
    figure = Figure(figsize=(8, 0.4 * len(overheads) + 1.2), layout="constrained")
    axes = figure.subplots()
    for row, overhead in enumerate(overheads.values()):
        mean = overhead["mean"]
        if mean is not None:
            low, high = overhead["interval"] or (mean, mean)
            error = [[100 * (mean - low)], [100 * (high - mean)]]
            axes.errorbar(100 * mean, row, xerr=error, fmt="o", color="tab:blue", capsize=3)
    label = "arXiv 2605.09825: 8 B parameters, over FP8"
    axes.plot([value for _, value in stated], [row for row, _ in stated], "s", color="0.55", label=label)
    axes.plot([], [], "o", color="tab:blue", label="here, with 95 % intervals over seeds")
    axes.set_yticks(range(len(overheads)), overheads, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("tokens to the target loss beyond the baseline's, %")
    axes.axvline(0.0, color="black", linewidth=0.8)
    axes.grid(axis="x", alpha=0.3)
    axes.legend(fontsize=7)
    return figure
