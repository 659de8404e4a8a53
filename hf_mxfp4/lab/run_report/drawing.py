# SPDX-License-Identifier: Apache-2.0
"""How the plots of a run report are drawn from the log."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...stats import wilson_interval
from .log import RunRecord
from .movement import logged_movements, movement_kinds


#: Values of a reward curve that its moving mean is over, at the most; a fifth of the run in short ones.
_SMOOTHED = 10
Axes = Any


@dataclass(frozen=True)
class Chart:
    """One plot over training steps.

    Attributes:
        lines: logged quantities and what to call them; those that a run has not are left out, and a chart without any
            is not drawn.
        reading: one sentence that says how to read it.
        option: what turns it on.
        near_zero: the y axis is logarithmic down to 1e-4, and linear to zero.
        extra: draws more than the lines; gives whether it drew anything.
    """

    title: str
    unit: str
    lines: tuple[tuple[str, str], ...]
    reading: str
    option: str
    near_zero: bool = False
    extra: Callable[[Axes, RunRecord], bool] | None = None

    def draw(self, axes: Axes, record: RunRecord) -> bool:
        """Draw into ``axes``; gives whether there was anything to draw."""
        drawn = False
        for key, label in self.lines:
            steps, values = record.series(key)
            if steps:
                marker = "." if len(steps) <= 60 else None
                axes.plot(steps, values, marker=marker, linewidth=1.2, label=label)
                drawn = True
        if self.extra is not None:
            drawn = self.extra(axes, record) or drawn
        if drawn:
            axes.set_title(self.title, fontsize=10, y=1.0)  # given, it is not searched for: a sixth of all drawing
            axes.set_xlabel(axes.get_xlabel() or "step", fontsize=8)
            axes.set_ylabel(self.unit, fontsize=8)
            axes.tick_params(labelsize=8)
            axes.yaxis.get_offset_text().set_fontsize(7)
            axes.grid(alpha=0.3)
            positive = any(y > 0 for line in axes.get_lines() for y in line.get_ydata())
            if self.near_zero and positive:
                axes.set_yscale("symlog", linthresh=1e-4)
            if (count := len(axes.get_legend_handles_labels()[0])) > 1:
                axes.legend(fontsize=7, ncols=2 if count > 6 else 1)
        return drawn


def smoothed_reward(axes: Axes, record: RunRecord) -> bool:
    """Add the moving mean of the reward, which is no chart by itself."""
    steps, values = record.series("reward")
    width = min(_SMOOTHED, len(values) // 5)
    if width >= 2:
        means = [sum(values[i - width + 1 : i + 1]) / width for i in range(width - 1, len(values))]
        axes.plot(steps[width - 1 :], means, color="black", linewidth=1.5, label=f"mean of {width} values")
    return False


def accuracies(axes: Axes, record: RunRecord) -> bool:
    """Draw the accuracies of all test sets with their intervals."""
    names = dict.fromkeys(name for evaluation in record.evaluations for name in evaluation["scores"])
    for name in names:
        points = [(e["step"], e["scores"][name]) for e in record.evaluations if name in e["scores"]]
        points.sort(key=lambda point: point[0])
        axes.errorbar(
            [step for step, _ in points],
            [score["accuracy"] for _, score in points],
            yerr=list(zip(*(_error_bar(score["accuracy"], score["n"]) for _, score in points), strict=True)),
            marker="o",
            capsize=4,
            label=f"{name}, 95 % interval",
        )
    return bool(names)


def _error_bar(accuracy: float, n: int) -> tuple[float, float]:
    """How far Wilson's interval reaches below and above."""
    low, high = wilson_interval(round(accuracy * n), n)
    return max(accuracy - low, 0.0), max(high - accuracy, 0.0)


def entropy_alarms(axes: Axes, record: RunRecord) -> bool:
    """Logged alarms as red dots, and the slope over the last logged values as a line through the end."""
    alarms = [e for e in record.logs if e.get("entropy/alarm") and e.get("entropy") is not None]
    if alarms:
        axes.plot([e["step"] for e in alarms], [e["entropy"] for e in alarms], "ro", markersize=5, label="alarm")
    steps, values = record.series("entropy")
    slopes = record.values("entropy/slope")
    if len(steps) > 2 and slopes:
        recent = steps[-20:]
        middle, level = sum(recent) / len(recent), sum(values[-20:]) / len(recent)
        ends = [recent[0], recent[-1]]
        axes.plot(
            ends,
            [level + slopes[-1] * (step - middle) for step in ends],
            "k--",
            linewidth=1,
            label=f"slope {slopes[-1]:+.2g} per step",
        )
    return False


def constant_rewards(axes: Axes, record: RunRecord) -> bool:
    """TRL's share, where the log has no other: the same, or that of whole batches under `scale_rewards: batch`."""
    steps, values = record.series("frac_reward_zero_std")
    if not steps or record.values("dynamic_sampling/zero_variance_share"):
        return False
    axes.plot(steps, values, marker=".", linewidth=1.2, label="all rewards equal")
    return True


def step_movement(axes: Axes, record: RunRecord) -> bool:
    """Layer types as thin lines beside the total and its intervals; logarithmic above 1 where one exceeds 10."""
    found = logged_movements(record)
    if not found:
        return False
    shown = [movement.total for movement in found]
    for kind in movement_kinds(record.keys):
        steps, values = record.series(f"movement/{kind}")
        axes.plot(steps, values, marker=".", markersize=3, linewidth=0.7, label=kind)
        shown += values
    steps, intervals = [movement.step for movement in found], [movement.interval for movement in found]
    totals = shown[: len(found)]
    axes.errorbar(steps, totals, intervals, color="black", marker=".", linewidth=1.5, capsize=2, label="total")
    axes.axhline(1, color="0.6", linewidth=0.8)
    if max(shown) > 10:
        axes.set_yscale("symlog", linthresh=1)
        axes.set_ylim(bottom=1.2 * min(0.0, *shown))
    return True
