# SPDX-License-Identifier: Apache-2.0
"""The plots of a run report: what each draws from the log, how to read it, and which option turns it on."""

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ...files import is_number
from ...stats import wilson_interval
from ..report.figures import Figure
from .log import RunRecord
from .movement import logged_movements, movement_kinds


#: Values of a reward curve that its moving mean is over, at the most; a fifth of the run in short ones.
_SMOOTHED = 10
Axes = Any


@dataclass(frozen=True)
class Panel:
    """One plot over training steps.

    Attributes:
        lines: logged quantities and what to call them; those that a run has not are left out, and a panel without any
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
            axes.set_title(self.title, fontsize=10)
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


def _smoothed_reward(axes: Axes, record: RunRecord) -> bool:
    steps, values = record.series("reward")
    width = min(_SMOOTHED, len(values) // 5)
    if width >= 2:
        means = [sum(values[i - width + 1 : i + 1]) / width for i in range(width - 1, len(values))]
        axes.plot(steps[width - 1 :], means, color="black", linewidth=1.5, label=f"mean of {width} values")
    return False


def _accuracy(axes: Axes, record: RunRecord) -> bool:
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


def _alarms(axes: Axes, record: RunRecord) -> bool:
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


def _constant_rewards(axes: Axes, record: RunRecord) -> bool:
    """TRL's share, where the log has no other: the same, or that of whole batches under `scale_rewards: batch`."""
    steps, values = record.series("frac_reward_zero_std")
    if not steps or record.values("dynamic_sampling/zero_variance_share"):
        return False
    axes.plot(steps, values, marker=".", linewidth=1.2, label="all rewards equal")
    return True


def _gain_profiles(axes: Axes, record: RunRecord) -> bool:
    profiles = [profile for profile in record.profiles if any(is_number(gain) for gain in profile["log2_gain"])]
    if not profiles:
        return False
    middle = profiles[len(profiles) // 2]
    for step, profile in {p["step"]: p for p in (profiles[0], middle, profiles[-1])}.items():
        gains = [(depth, gain) for depth, gain in enumerate(profile["log2_gain"]) if is_number(gain)]
        axes.plot(*zip(*gains, strict=True), marker=".", label=f"step {step}")
    axes.axhline(0, color="0.6", linewidth=0.8)
    axes.set_xlabel("layers that the gradient passed through")
    return True


def _movement(axes: Axes, record: RunRecord) -> bool:
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


PANELS: tuple[Panel, ...] = (
    Panel(
        "Reward",
        "mean reward",
        (("reward", "training"), ("eval_reward", "evaluation")),
        "It should rise and then level off; a fall after a rise is a run that went on for too long or too fast.",
        "logging_steps",
        extra=_smoothed_reward,
    ),
    Panel(
        "Accuracy",
        "share of problems solved",
        (),
        "Intervals that do not overlap are a difference that chance hardly explains.",
        "recipes/grpo.py, which evaluates before and after training, or report_callback.add_evaluation(...)",
        extra=_accuracy,
    ),
    Panel(
        "Policy entropy",
        "nats per token",
        (("entropy", "entropy"), ("aqn/target_entropy", "target of the noise")),
        "A slow fall is normal; near zero the policy no longer explores, and a rise beyond its start is noise winning.",
        "logging_steps",
        extra=_alarms,
    ),
    Panel(
        "Effective temperature",
        "temperature",
        (("entropy/effective_temperature", "of quantization"),),
        "The temperature that quantization amounts to: 1 is no change, above it the policy is flatter.",
        "error_every (needs master weights: mode='qat')",
    ),
    Panel(
        "Distance from full precision",
        "nats per token",
        (("entropy/quantization_kl", "KL(quantized, full precision)"),),
        "How far quantization moves the policy; what grows here is lost when the policy is served in full precision.",
        "error_every (needs master weights: mode='qat')",
    ),
    Panel(
        "Response length",
        "tokens",
        (("completions/mean_length", "mean"), ("completions/max_length", "longest")),
        "Lengths that run away while the reward stands still are a policy that games its reward or lost its end token.",
        "logging_steps",
    ),
    Panel(
        "Truncated responses",
        "share of responses",
        (("completions/clipped_ratio", "cut at max_completion_length"),),
        "Cut responses are mostly scored as wrong; a high share teaches the policy about the limit, not the task.",
        "logging_steps",
    ),
    Panel(
        "Groups without a signal",
        "share of groups",
        (
            ("dynamic_sampling/zero_variance_share", "all rewards equal"),
            ("dynamic_sampling/replaced_share", "replaced by others"),
        ),
        "Groups whose responses all got the same reward teach nothing; near 1 the prompts are too easy or too hard.",
        "logging_steps",
        extra=_constant_rewards,
    ),
    Panel(
        "Adaptive quantization noise",
        "standard deviation",
        (
            ("aqn/sigma", "intended"),
            ("aqn/measured_std", "measured"),
            ("aqn/linear_sigma", "intended, linear weights"),
            ("aqn/linear_measured_std", "measured, linear weights"),
        ),
        "Both lines should lie on each other; a measured zero under an intended noise means that none arrived.",
        "aqn: true",
        near_zero=True,
    ),
    Panel(
        "Importance ratio",
        "training / rollout probability",
        (
            ("sampling/importance_sampling_ratio/mean", "mean"),
            ("sampling/importance_sampling_ratio/max", "largest"),
            ("sampling/importance_sampling_ratio/min", "smallest"),
        ),
        "1 is a rollout by the very policy that trains; the further away, the more the correction has to do.",
        "rollout_correction: true (and a difference to correct: noise, vLLM)",
    ),
    Panel(
        "Clipped importance weights",
        "share of tokens",
        (("sampling/importance_sampling_ratio/clipped", "clipped"),),
        "Clipping bounds the variance of the gradient and biases it: a few per cent are harmless.",
        "rollout_correction: true (and a difference to correct: noise, vLLM)",
    ),
    Panel(
        "Effective sample size",
        "share of tokens",
        (("sampling/effective_sample_size", "effective sample size"),),
        "Near 1 all tokens carry the gradient, near 0 a few do.",
        "rollout_correction: true (and a difference to correct: noise, vLLM)",
    ),
    Panel(
        "Rollout against training policy",
        "nats per token",
        (("sampling/kl", "KL(rollout, training)"), ("kl", "KL(training, reference)")),
        "How far rollouts are from the policy that trains, and that from its reference.",
        "rollout_correction: true; beta > 0 for the reference",
    ),
    Panel(
        "Weight error components",
        "energy / energy of the error",
        (("error/scale_bias", "scale bias"), ("error/deadzone", "deadzone"), ("error/grid", "grid noise")),
        "What the error of the weights is made of; scale bias and grid noise are anti-correlated and can exceed 1.",
        "error_every (needs master weights: mode='qat')",
    ),
    Panel(
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
    Panel(
        "Signal to quantization noise",
        "dB",
        (("error/sqnr_db", "weights"), ("error/activations/sqnr_db", "activations")),
        "Higher is better; 3 dB less is twice the error energy.",
        "error_every",
    ),
    Panel(
        "Gradient gain by depth",
        "log2 gain",
        (),
        "log2 of the gradient's norm over that in full precision: 0 is ideal; a line that climbs or falls steadily is "
        "an error that multiplies from layer to layer.",
        "gradient_gain_every (needs master weights: mode='qat')",
        extra=_gain_profiles,
    ),
    Panel(
        "Gradient gain over training",
        "log2 gain",
        (
            ("gradient_gain/last", "last layer"),
            ("gradient_gain/middle", "middle"),
            ("gradient_gain/first", "first layer"),
        ),
        "The gain at three layers; drifting apart means that the depth profile steepens.",
        "gradient_gain_every (needs master weights: mode='qat')",
    ),
    Panel(
        "Step movement",
        "of quantized weights / of masters",
        (),
        "1 is what training assumes; far above it masters lie at the boundaries of quantized values and jump with any "
        "step, however small. Bars are two standard errors of the total; layer types scatter more.",
        "movement_every (needs master weights that are trained: mode='qat')",
        extra=_movement,
    ),
    Panel(
        "Gradient norm",
        "before clipping",
        (("grad_norm", "norm"),),
        "Single spikes are clipped (max_grad_norm); a lasting rise is a run about to diverge.",
        "logging_steps",
    ),
    Panel("Learning rate", "rate", (("learning_rate", "rate"),), "As scheduled.", "logging_steps"),
    Panel(
        "Router agreement",
        "share of choices",
        (("router/agreement", "mean"), ("router/agreement_min_layer", "worst router")),
        "Share of the experts that full precision would choose too; far below 1, quantization trains other experts.",
        "router_every (mixtures of experts)",
    ),
    Panel(
        "Expert load",
        "share",
        (("router/load_entropy", "load entropy (1: even)"), ("router/dead_experts", "unused experts")),
        "Falling load entropy is a router that collapses onto few experts.",
        "router_every (mixtures of experts)",
    ),
    Panel(
        "Time per step",
        "seconds",
        (("step_time", "step"),),
        "A slow climb is usually longer responses.",
        "logging_steps",
    ),
)


def draw_panels(record: RunRecord) -> tuple[list[tuple[Panel, Figure]], list[Panel]]:
    """A figure for each panel that the run has data for, and the panels that it has none for."""
    from matplotlib.figure import Figure

    drawn, absent = [], []
    for panel in PANELS:
        figure = Figure(figsize=(4.6, 2.9), layout="none")
        figure.subplots_adjust(left=0.16, right=0.97, top=0.9, bottom=0.17)
        if panel.draw(figure.subplots(), record):
            drawn.append((panel, figure))
        else:
            absent.append(panel)
    return drawn, absent


def panels_figure(record: RunRecord, title: str, panels: Sequence[Panel] = PANELS, columns: int = 4) -> Figure:
    """All panels that the run has data for in one figure.

    Raises `ValueError` when there is none.
    """
    from matplotlib.figure import Figure

    probe = Figure().subplots()
    shown = []
    for panel in panels:
        probe.clear()
        if panel.draw(probe, record):
            shown.append(panel)
    if not shown:
        raise ValueError("nothing to plot: the run logged none of the quantities that a report shows")
    columns = min(columns, len(shown))
    rows = -(-len(shown) // columns)
    figure = Figure(figsize=(3.6 * columns, 2.5 * rows + 0.4), layout="constrained")
    grid = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes, panel in zip(grid, shown, strict=False):
        panel.draw(axes, record)
    for axes in grid[len(shown) :]:
        axes.set_visible(False)
    figure.suptitle("\n".join(textwrap.wrap(title, 32 * columns)), fontsize=12)
    return figure
