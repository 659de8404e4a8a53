# SPDX-License-Identifier: Apache-2.0
"""What the curves of a study say: tokens to a target loss, gaps at equal tokens, and how sure of them one can be.

A curve is a list of ``(tokens, validation loss)`` with the loss `None` where it was not finite.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from rich.table import Table

from hf_mxfp4.lab.stats import t_interval
from recipes.common.records import with_interval
from recipes.common.terminal import console

from .arms import BASELINE


Curve = Sequence[tuple[float, float | None]]


def tokens_to_target(curve: Curve, target: float) -> float | None:
    """Return the tokens at which the loss first is at or below ``target``, by linear interpolation between two
    evaluations; `None` when it never is."""
    previous: tuple[float, float] | None = None
    for tokens, loss in curve:
        if loss is None:
            return None
        if loss <= target:
            if previous is None:
                return float(tokens)
            before, higher = previous
            return before + (tokens - before) * (higher - target) / (higher - loss)
        previous = (tokens, loss)
    return None


def loss_at(curve: Curve, tokens: float) -> float | None:
    """Return the loss after ``tokens``, by linear interpolation; `None` where a neighbour was not finite.

    Raises `ValueError` for ``tokens`` outside of the curve, unless the run broke off because it diverged.
    """
    for (left, before), (right, after) in zip(curve, curve[1:], strict=False):
        if left <= tokens <= right:
            if before is None or after is None:
                return None
            return before + (after - before) * (tokens - left) / (right - left)
    if curve[-1][1] is None:
        return None
    raise ValueError(f"the curve goes from {curve[0][0]} to {curve[-1][0]} tokens and says nothing about {tokens}")


def summarize(
    runs: Sequence[Mapping[str, Any]], *, budget: int, target_fraction: float, reference: str = "all"
) -> dict[str, Any]:
    """Compute overheads and gaps of every arm, paired by seed with the baseline.

    For each seed, the target is the loss that the baseline has after ``target_fraction * budget`` tokens. The overhead
    of an arm is the tokens it takes to get there over those of the baseline, minus one, both by
    [`tokens_to_target`]. The gap is its loss after ``budget`` tokens minus the baseline's.

    Args:
        runs: finished runs with ``arm``, ``seed``, ``curve``; the baseline's among them.
        budget: tokens at which losses are compared.
        target_fraction: in (0, 1].
        reference: an arm that others are compared with too, paired by seed (``versus``).

    Returns:
        ``arms``: for each arm ``overhead`` and ``gap``, each with ``by_seed`` and the fields of [`t_interval`] over the
        seeds. Where a seed did not reach its target its overhead is `None`; then ``mean`` is `None` too and
        ``at_least`` the mean with the whole curve counted for such seeds.
    """
    by_arm: dict[str, dict[int, Mapping[str, Any]]] = {}
    for run in runs:
        by_arm.setdefault(run["arm"], {})[run["seed"]] = run["curve"]
    baseline = by_arm[BASELINE]
    targets = {seed: loss_at(curve, target_fraction * budget) for seed, curve in baseline.items()}
    if any(target is None for target in targets.values()):
        raise ValueError("the baseline diverged, so that there is no target; lower learning_rate")
    arms = {}
    for arm, curves in by_arm.items():
        seeds = sorted(seed for seed in curves if seed in baseline)
        overheads, lower, gaps = [], [], []
        for seed in seeds:
            curve = curves[seed]
            needed = tokens_to_target(baseline[seed], targets[seed])
            taken = tokens_to_target(curve, targets[seed])
            overheads.append(None if taken is None else taken / needed - 1)
            lower.append((curve[-1][0] if taken is None else taken) / needed - 1)
            loss = loss_at(curve, budget)
            gaps.append(None if loss is None else loss - loss_at(baseline[seed], budget))
        overhead = _over_seeds(overheads)
        if overhead["mean"] is None:
            # A run that broke off says nothing about how many tokens it would have taken.
            broke_off = any(curves[seed][-1][1] is None for seed in seeds)
            overhead["at_least"] = None if broke_off else fmean(lower)
        arms[arm] = {"seeds": seeds, "overhead": overhead, "gap": _over_seeds(gaps)}
    for arm, result in arms.items():
        if reference in arms and arm not in (reference, BASELINE):
            result["versus"] = {"arm": reference, **_versus(result, arms[reference])}
    return {
        "budget_tokens": budget,
        "target_fraction": target_fraction,
        "targets": {str(seed): target for seed, target in targets.items()},
        "arms": arms,
    }


def _over_seeds(values: Sequence[float | None]) -> dict[str, Any]:
    found = [value for value in values if value is not None]
    missing = {"n": len(values), "mean": None, "sd": None, "interval": None}
    statistics = t_interval(found) if len(found) == len(values) else missing
    return {"by_seed": list(values), "n_finite": len(found), **statistics}


def _versus(result: Mapping[str, Any], reference: Mapping[str, Any]) -> dict[str, Any]:
    differences = {}
    for what in ("overhead", "gap"):
        theirs = dict(zip(reference["seeds"], reference[what]["by_seed"], strict=True))
        ours = dict(zip(result["seeds"], result[what]["by_seed"], strict=True))
        pairs = [(ours[seed], theirs[seed]) for seed in ours if seed in theirs]
        complete = pairs and all(None not in pair for pair in pairs)
        differences[what] = t_interval([value - base for value, base in pairs]) if complete else None
    return differences


def print_summary(summary: dict[str, Any]) -> None:
    """Print the closing table."""
    table = Table(
        title=f"tokens to the loss of {BASELINE} ({summary['baseline']}) after {summary['target_fraction']:.0%} of "
        f"{summary['budget_tokens'] / 1e6:.2f} M tokens"
    )
    for column in ("arm", "quantized", "token overhead", "loss above baseline", "s per run"):
        table.add_column(column, overflow="fold")
    for name, result in summary["arms"].items():
        operands = sum(count > 0 for count in result["quantized_operands"].values())
        table.add_row(
            name,
            f"{operands} of 6 operands, {result['n_quantized']} layers" if operands else "nothing",
            "" if name == BASELINE else overhead_text(result["overhead"]),
            "" if name == BASELINE else with_interval(result["gap"], 1.0, 4),
            f"{fmean(result['seconds']):.0f}",
        )
    console.print(table)


def overhead_text(overhead: dict[str, Any]) -> str:
    """Format an overhead in percent, or how often the target was not reached."""
    if overhead["mean"] is not None:
        return with_interval(overhead, 100.0, 1, unit=" %")
    missed = f"not reached by {overhead['n'] - overhead['n_finite']} of {overhead['n']} seeds"
    return missed if overhead["at_least"] is None else f"{missed}: over {100 * overhead['at_least']:.1f} %"
