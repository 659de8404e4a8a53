# SPDX-License-Identifier: Apache-2.0
"""Plots of a training run, from the log history that the trainer keeps."""

from collections.abc import Sequence
from pathlib import Path


#: Panels: title, y label, logarithmic or not, and the logged series as (key, legend).
_PANELS = (
    ("Reward", "mean reward", False, (("reward", "training"),)),
    ("Policy entropy", "nats per token", False, (("entropy", "entropy"),)),
    (
        "Adaptive quantization noise",
        "standard deviation",
        True,
        (("aqn/sigma", "set"), ("aqn/measured_std", "measured")),
    ),
    (
        "Weight error components",
        "energy / energy of the error",
        False,
        (("error/scale_bias", "scale bias"), ("error/deadzone", "deadzone"), ("error/grid", "grid")),
    ),
)


def series(log_history: Sequence[dict], key: str) -> tuple[list[int], list[float]]:
    """Steps and values of one logged quantity."""
    points = [(entry["step"], entry[key]) for entry in log_history if entry.get(key) is not None and "step" in entry]
    return [step for step, _ in points], [value for _, value in points]


def plot_training(log_history: Sequence[dict], path: str | Path) -> Path:
    """Draw reward, entropy, noise and the three error components over steps; the format follows the file's suffix.

    Args:
        log_history: `trainer.state.log_history`.
        path: file to write; its folder is made if need be.

    Raises `ValueError` when none of the quantities was logged.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 7), layout="constrained")
    drawn = 0
    for axes, (title, label, logarithmic, lines) in zip(figure.subplots(2, 2).flat, _PANELS, strict=True):
        axes.set(title=title, xlabel="step", ylabel=label)
        for key, legend in lines:
            steps, values = series(log_history, key)
            if steps:
                axes.plot(steps, values, marker=".", label=legend)
                drawn += 1
        if logarithmic and any(line.get_ydata().max() > 0 for line in axes.get_lines() if len(line.get_ydata())):
            axes.set_yscale("symlog", linthresh=1e-4)
        if len(axes.get_lines()) > 1:
            axes.legend()
        axes.grid(alpha=0.3)
    if drawn == 0:
        raise ValueError("nothing to plot: the log history holds no reward, entropy, noise or error component")
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return path
