# SPDX-License-Identifier: Apache-2.0
"""The plots of a run report: what each draws from the log, how to read it, and which option turns it on."""

import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from ...files import break_links
from ...utils import wilson_interval
from ..page import Figure
from .log import RunRecord, is_number


#: Values of a reward curve that its moving mean is over, at the most; a fifth of the run in short ones.
_SMOOTHED = 10
#: Points of a line, many more than a figure has columns of pixels.
_MOST_POINTS = 2000
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
        extra: draws more than the lines; gives whether it drew anything by itself.
    """

    title: str
    unit: str
    lines: tuple[tuple[str, str], ...]
    reading: str
    option: str
    near_zero: bool = False
    extra: Callable[[Axes, RunRecord], bool] | None = None

    def draw(self, axes: Axes, record: RunRecord) -> bool:
        """Draw into ``axes``; return whether there was anything to draw."""
        drawn = False
        for key, label in self.lines:
            drawn = _line(axes, record, key, label) or drawn
        if self.extra is not None:
            drawn = self.extra(axes, record) or drawn
        if drawn:
            axes.set_title(self.title, fontsize=10, y=1.0)  # given, it is not searched for: a sixth of all drawing
            axes.set_xlabel("step", fontsize=8)
            axes.set_ylabel(self.unit, fontsize=8)
            axes.tick_params(labelsize=8)
            axes.yaxis.get_offset_text().set_fontsize(8)
            axes.grid(alpha=0.3)
            if self.near_zero and any(y > 0 for line in axes.get_lines() for y in line.get_ydata()):
                axes.set_yscale("symlog", linthresh=1e-4)
            if len(axes.get_legend_handles_labels()[0]) > 1:
                below = {"loc": "upper center", "bbox_to_anchor": (0.45, -0.2), "frameon": False}
                axes.legend(fontsize=8, ncols=3, columnspacing=1, handlelength=1.2, handletextpad=0.4, **below)
            axes.xaxis.get_major_locator().set_params(integer=True)
            if axes.get_yscale() == "linear":
                axes.ticklabel_format(axis="y", scilimits=(-3, 4))
        return drawn


def _line(axes: Axes, record: RunRecord, key: str, label: str) -> bool:
    """Draw one logged quantity; return whether there was any value."""
    steps, values = _thinned(*record.series(key))
    if not steps:
        return False
    # Points are visible one by one where they are few.
    marker = "." if len(steps) <= 60 else None
    axes.plot(steps, values, marker=marker, linewidth=1.2, label=label)
    return True


def _thinned(steps: Sequence[int], values: Sequence[float]) -> tuple[Sequence[int], Sequence[float]]:
    """Return at most about `_MOST_POINTS` points of a line: the lowest and the highest of each stretch, which keeps
    spikes."""
    width = math.ceil(2 * len(values) / _MOST_POINTS)
    if width <= 1:
        return steps, values
    kept = {0, len(values) - 1}
    for start in range(0, len(values), width):
        stretch = range(start, min(start + width, len(values)))
        kept |= {min(stretch, key=values.__getitem__), max(stretch, key=values.__getitem__)}
    return [steps[i] for i in sorted(kept)], [values[i] for i in sorted(kept)]


def _smoothed_reward(axes: Axes, record: RunRecord) -> bool:
    """Add the moving mean of the reward, which is no chart by itself."""
    steps, values = record.series("reward")
    width = min(_SMOOTHED, len(values) // 5)
    if width >= 2:
        means = [sum(values[end - width : end]) / width for end in range(width, len(values) + 1)]
        axes.plot(*_thinned(steps[width - 1 :], means), color="black", linewidth=1.5, label=f"mean of {width} values")
    return False


def _accuracies(axes: Axes, record: RunRecord) -> bool:
    """Draw the accuracies of all test sets with their intervals."""
    names = dict.fromkeys(name for evaluation in record.evaluations for name in evaluation["scores"])
    for name in names:
        points = sorted((e["step"], *_interval(e["scores"][name])) for e in record.evaluations if name in e["scores"])
        steps, values, below, above = zip(*points, strict=True)
        label = f"{name}, 95 % interval"
        axes.errorbar(steps, values, yerr=(below, above), marker="o", capsize=4, label=label)
    return bool(names)


def _divergences(axes: Axes, record: RunRecord) -> bool:
    """Draw the divergence on each of several held-out texts."""
    keys = sorted({key for line in record.logs for key in line if key.startswith("eval_") and key.endswith("_kl")})
    return any([_line(axes, record, key, key[5:-3]) for key in keys if key != "eval_kl"])


def _interval(solved: list[bool]) -> tuple[float, float, float]:
    """Return an accuracy, and how far Wilson's interval reaches below and above."""
    accuracy = fmean(solved)
    low, high = wilson_interval(sum(solved), len(solved))
    return accuracy, max(accuracy - low, 0.0), max(high - accuracy, 0.0)


def _entropy_alarms(axes: Axes, record: RunRecord) -> bool:
    """Mark the entropies at which the alarm was on, which is no chart by itself."""
    alarms = [entry for entry in record.logs if entry.get("entropy/alarm") and is_number(entry.get("entropy"))]
    alarms = alarms[-_MOST_POINTS:]
    if alarms:
        steps = [entry["step"] for entry in alarms]
        axes.plot(steps, [entry["entropy"] for entry in alarms], "ro", markersize=5, label="alarm")
    return False


def _step_movement(axes: Axes, record: RunRecord) -> bool:
    """Draw the total with its intervals; logarithmic above 1 where one exceeds 10."""
    movements = record.movements()
    if not movements:
        return False
    stride = math.ceil(len(movements) / _MOST_POINTS)
    steps, totals, intervals = zip(*movements[::stride], strict=True)
    axes.errorbar(steps, totals, intervals, color="black", marker=".", linewidth=1.5, capsize=2, label="total")
    axes.axhline(1, color="0.6", linewidth=0.8)
    if max(totals) > 10:
        axes.set_yscale("symlog", linthresh=1)
        axes.set_ylim(bottom=1.2 * min(0.0, *totals))
    return True


CHARTS: tuple[Chart, ...] = (
    Chart(
        "Reward",
        "mean reward",
        (("reward", "training"), ("eval_reward", "evaluation")),
        "It should rise and then level off; a fall after a rise is a run that went on for too long or too fast.",
        "logging_steps",
        extra=_smoothed_reward,
    ),
    Chart(
        "Accuracy",
        "share of problems solved",
        (),
        "Intervals that do not overlap are a difference that chance hardly explains.",
        "recipes/grpo.py, which evaluates before and after training, or run_log.add_evaluation(...)",
        extra=_accuracies,
    ),
    Chart(
        "Divergence from the teacher",
        "KL, nats per token",
        (("eval_kl", "held-out text"),),
        "It should fall and level off; on a text unlike those learned, a rise is forgetting.",
        "recipes/distill.py with eval_steps",
        extra=_divergences,
    ),
    Chart(
        "Policy entropy",
        "nats per token",
        (("entropy", "entropy"),),
        "A slow fall is normal; near zero the policy no longer explores, and a rise beyond its start is noise winning.",
        "logging_steps",
        extra=_entropy_alarms,
    ),
    Chart(
        "Response length",
        "tokens",
        (("completions/mean_length", "mean"), ("completions/max_length", "longest")),
        "Lengths that run away while the reward stands still are a policy that games its reward or lost its end token.",
        "logging_steps",
    ),
    Chart(
        "Truncated responses",
        "share of responses",
        (("completions/clipped_ratio", "cut at max_completion_length"),),
        "Cut responses are mostly scored as wrong; a high share teaches the policy about the limit, not the task.",
        "logging_steps",
    ),
    Chart(
        "Groups without a signal",
        "share of groups",
        (("frac_reward_zero_std", "all rewards equal"),),
        "Groups whose responses all got the same reward teach nothing; near 1 the prompts are too easy or too hard.",
        "logging_steps",
    ),
    Chart(
        "Adaptive quantization noise",
        "standard deviation",
        (
            ("aqn/sigma", "intended"),
            ("aqn/measured_std", "measured"),
        ),
        "Both lines should lie on each other; a measured zero under an intended noise means that none arrived.",
        "aqn: true",
        near_zero=True,
    ),
    Chart(
        "Importance ratio",
        "training / rollout probability",
        (
            ("sampling/importance_sampling_ratio/mean", "mean"),
            ("sampling/importance_sampling_ratio/max", "largest"),
            ("sampling/importance_sampling_ratio/min", "smallest"),
        ),
        "1 is a rollout by the very policy that trains; the further away, the more the correction has to do.",
        "rollout_correction (and a difference to correct: noise, vLLM)",
    ),
    Chart(
        "Clipped importance weights",
        "share of tokens",
        (("sampling/importance_sampling_ratio/clipped", "clipped"),),
        "Clipping bounds the variance of the gradient and biases it: a few per cent are harmless.",
        "rollout_correction (and a difference to correct: noise, vLLM)",
    ),
    Chart(
        "Effective sample size",
        "share of tokens",
        (("sampling/effective_sample_size", "effective sample size"),),
        "Near 1 all tokens carry the gradient, near 0 a few do.",
        "rollout_correction (and a difference to correct: noise, vLLM)",
    ),
    Chart(
        "Mismatch of policies",
        "nats per token",
        (("sampling/kl", "KL(rollout, training)"), ("kl", "KL(training, reference)")),
        "How far rollouts are from the policy that trains, and that from its reference.",
        "rollout_correction; beta > 0 for the reference",
    ),
    Chart(
        "Weight error components",
        "energy / energy of the error",
        (("error/scale_bias", "scale bias"), ("error/deadzone", "deadzone"), ("error/grid", "grid noise")),
        "What the error of weights is made of: scale bias and grid noise are anti-correlated and can exceed 1; with "
        "whole residuals they cancel but for a hundredth: 80 to 90 is usual. They should hardly move.",
        "error_every (needs master weights: mode='qat')",
    ),
    Chart(
        "Activation error components",
        "energy / energy of the error",
        (
            ("error/activations/scale_bias", "scale bias"),
            ("error/activations/deadzone", "deadzone"),
            ("error/activations/grid", "grid noise"),
        ),
        "The same for what enters the layers in training; deadzone grows when outliers push small values to zero.",
        "error_every (needs a preset that quantizes activations: w4a4)",
    ),
    Chart(
        "Signal to quantization noise",
        "dB",
        (("error/sqnr_db", "weights"), ("error/activations/sqnr_db", "activations")),
        "Higher is better; 3 dB less is twice the error energy.",
        "error_every",
    ),
    Chart(
        "Step movement",
        "quantized / masters",
        (),
        "1 is what training assumes; far above it masters lie at the boundaries of quantized values and jump with any "
        "step, however small. Bars are two standard errors.",
        "error_every (needs master weights that are trained: mode='qat')",
        extra=_step_movement,
    ),
    Chart(
        "Gradient norm",
        "before clipping",
        (("grad_norm", "norm"),),
        "Single spikes are clipped (max_grad_norm); a lasting rise is a run about to diverge.",
        "logging_steps",
    ),
    Chart("Learning rate", "rate", (("learning_rate", "rate"),), "As scheduled.", "logging_steps"),
    Chart(
        "Time per step",
        "seconds",
        (("step_time", "step"),),
        "A slow climb is usually longer responses.",
        "logging_steps",
    ),
)


def draw_charts(record: RunRecord) -> tuple[list[tuple[Chart, Figure]], list[Chart]]:
    """Return a figure for each chart that the run has data for, and the charts that it has none for."""
    drawn = []
    absent = []
    for chart in CHARTS:
        # As wide as a telephone, so that text has the size it is drawn in.
        figure = Figure(figsize=(3.4, 2.7), layout="none")
        axes = figure.subplots()
        if chart.draw(axes, record):
            # A legend is below the axis.
            bottom = 0.17 if axes.get_legend() is None else 0.33
            figure.subplots_adjust(left=0.19, right=0.97, top=0.9, bottom=bottom)
            drawn.append((chart, figure))
        else:
            absent.append(chart)
    return drawn, absent


def charts_figure(record: RunRecord, title: str = "", columns: int = 4) -> Figure:
    """Draw all charts that the run has data for into one figure.

    Raises `ValueError` when there is none.
    """
    shown = [chart for chart, _ in draw_charts(record)[0]]
    if not shown:
        raise ValueError("nothing to plot: the run logged none of the quantities that a report shows")
    rows = math.ceil(len(shown) / columns)
    figure = Figure(figsize=(3.6 * columns, 2.5 * rows + 0.4), layout="constrained")
    for number, chart in enumerate(shown, 1):
        chart.draw(figure.add_subplot(rows, columns, number), record)
    figure.suptitle("\n".join(textwrap.wrap(title, 32 * columns)), fontsize=12)
    return figure


def plot_training(log_history: Sequence[dict], path: str | Path) -> Path:
    """Draw all that a training run logged over its steps; the format follows the file's suffix.

    Args:
        log_history: `trainer.state.log_history`.
        path: file to write; its folder is made if need be.

    Raises `ValueError` when none of the quantities was logged.
    """
    path = Path(path)
    record = RunRecord(path.parent, "log_history", [entry for entry in log_history if "step" in entry])
    return save_figure(charts_figure(record), path)


def save_figure(figure: Figure, path: Path) -> Path:
    """Write a figure to a file of its own, and return its path; the format follows the suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    break_links(path)
    figure.savefig(path, dpi=80)
    return path
