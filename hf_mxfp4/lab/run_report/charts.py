# SPDX-License-Identifier: Apache-2.0
"""The plots of a run report: what each draws from the log, how to read it, and which option turns it on."""

import textwrap
from collections.abc import Sequence

from ..report.figures import Figure
from .drawing import (
    Chart,
    accuracies,
    constant_rewards,
    entropy_alarms,
    smoothed_reward,
    step_movement,
)
from .log import RunRecord


CHARTS: tuple[Chart, ...] = (
    Chart(
        "Reward",
        "mean reward",
        (("reward", "training"), ("eval_reward", "evaluation")),
        "It should rise and then level off; a fall after a rise is a run that went on for too long or too fast.",
        "logging_steps",
        extra=smoothed_reward,
    ),
    Chart(
        "Accuracy",
        "share of problems solved",
        (),
        "Intervals that do not overlap are a difference that chance hardly explains.",
        "recipes/grpo.py, which evaluates before and after training, or report_callback.add_evaluation(...)",
        extra=accuracies,
    ),
    Chart(
        "Policy entropy",
        "nats per token",
        (("entropy", "entropy"),),
        "A slow fall is normal; near zero the policy no longer explores, and a rise beyond its start is noise winning.",
        "logging_steps",
        extra=entropy_alarms,
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
        (
            ("dynamic_sampling/zero_variance_share", "all rewards equal"),
            ("dynamic_sampling/replaced_share", "replaced by others"),
        ),
        "Groups whose responses all got the same reward teach nothing; near 1 the prompts are too easy or too hard.",
        "logging_steps",
        extra=constant_rewards,
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
        "rollout_correction: true (and a difference to correct: noise, vLLM)",
    ),
    Chart(
        "Clipped importance weights",
        "share of tokens",
        (("sampling/importance_sampling_ratio/clipped", "clipped"),),
        "Clipping bounds the variance of the gradient and biases it: a few per cent are harmless.",
        "rollout_correction: true (and a difference to correct: noise, vLLM)",
    ),
    Chart(
        "Effective sample size",
        "share of tokens",
        (("sampling/effective_sample_size", "effective sample size"),),
        "Near 1 all tokens carry the gradient, near 0 a few do.",
        "rollout_correction: true (and a difference to correct: noise, vLLM)",
    ),
    Chart(
        "Rollout against training policy",
        "nats per token",
        (("sampling/kl", "KL(rollout, training)"), ("kl", "KL(training, reference)")),
        "How far rollouts are from the policy that trains, and that from its reference.",
        "rollout_correction: true; beta > 0 for the reference",
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
        "of quantized weights / of masters",
        (),
        "1 is what training assumes; far above it masters lie at the boundaries of quantized values and jump with any "
        "step, however small. Bars are two standard errors of the total; layer types scatter more.",
        "movement_every (needs master weights that are trained: mode='qat')",
        extra=step_movement,
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
        "Router agreement",
        "share of choices",
        (("router/agreement", "mean"), ("router/agreement_min_layer", "worst router")),
        "Share of the experts that full precision would choose too; far below 1, quantization trains other experts.",
        "router_every (mixtures of experts)",
    ),
    Chart(
        "Expert load",
        "share",
        (("router/load_entropy", "load entropy (1: even)"), ("router/dead_experts", "unused experts")),
        "Falling load entropy is a router that collapses onto few experts.",
        "router_every (mixtures of experts)",
    ),
    Chart(
        "Time per step",
        "seconds",
        (("step_time", "step"),),
        "A slow climb is usually longer responses.",
        "logging_steps",
    ),
)


def draw_charts(record: RunRecord) -> tuple[list[tuple[Chart, Figure]], list[Chart]]:
    """A figure for each chart that the run has data for, and the charts that it has none for."""
    from matplotlib.figure import Figure

    drawn, absent = [], []
    for chart in CHARTS:
        figure = Figure(figsize=(4.6, 2.9), layout="none")
        figure.subplots_adjust(left=0.16, right=0.97, top=0.9, bottom=0.17)
        if chart.draw(figure.subplots(), record):
            drawn.append((chart, figure))
        else:
            absent.append(chart)
    return drawn, absent


def charts_figure(record: RunRecord, title: str, charts: Sequence[Chart] = CHARTS, columns: int = 4) -> Figure:
    """All charts that the run has data for in one figure.

    Raises `ValueError` when there is none.
    """
    from matplotlib.figure import Figure

    probe = Figure().subplots()
    shown = []
    for chart in charts:
        probe.clear()
        if chart.draw(probe, record):
            shown.append(chart)
    if not shown:
        raise ValueError("nothing to plot: the run logged none of the quantities that a report shows")
    columns = min(columns, len(shown))
    rows = -(-len(shown) // columns)
    figure = Figure(figsize=(3.6 * columns, 2.5 * rows + 0.4), layout="constrained")
    grid = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes, chart in zip(grid, shown, strict=False):
        chart.draw(axes, record)
    for axes in grid[len(shown) :]:
        axes.set_visible(False)
    figure.suptitle("\n".join(textwrap.wrap(title, 32 * columns)), fontsize=12)
    return figure
