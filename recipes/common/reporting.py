# SPDX-License-Identifier: Apache-2.0
"""What the recipes print and write down, and how they end: with a message, no traceback, and all processes at once."""

import atexit
import contextlib
import os
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from accelerate import PartialState
from matplotlib.figure import Figure
from rich.console import Console
from rich.text import Text
from transformers import PrinterCallback, ProgressCallback, Trainer

from hf_mxfp4.utils import cpu_name, installed_version


console = Console()
#: Errors of inputs, which a user can fix.
INPUT_ERRORS = (ImportError, OSError, RuntimeError, ValueError)


def tell(subject: str, message: str) -> None:
    """Print a line once per job."""
    if os.environ.get("RANK", "0") == "0":
        console.print(Text.assemble((subject, "bold"), " ", message), highlight=False, soft_wrap=True)


@contextlib.contextmanager
def errors_as_messages(*errors: type[Exception], where: str = "") -> Iterator[None]:
    """End the process with the message of one of these ``errors``, after ``where``, and no traceback."""
    try:
        yield
    except errors as error:
        raise SystemExit(f"error: {where}{error}") from error


class TrainingBar(ProgressCallback):
    """Transformers' bar over optimizer steps with some logged values in it, instead of printed dictionaries."""

    @classmethod
    def install(cls, trainer: Trainer) -> None:
        """Replace the trainer's own progress output."""
        for callback in (ProgressCallback, PrinterCallback):
            trainer.remove_callback(callback)
        trainer.add_callback(cls)

    def on_log(self, args, state, control, logs=None, **kwargs):
        shown = [name for name in ("loss", "eval_loss", "reward", "entropy") if name in (logs or {})]
        if self.training_bar is not None and shown:
            self.training_bar.set_postfix({name: f"{logs[name]:.3g}" for name in shown})


def shutdown() -> None:
    """Wait for the other processes, end the process group, and end this process; without a group, do nothing.

    Call it last in a run that succeeded. Exit handlers are run and output is written, but the interpreter is not taken
    apart: while it is, a process can be aborted (a thread of the process group may still hold a tensor), which the
    launcher takes for a failure of the job.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    state = PartialState()
    state.wait_for_everyone()
    state.destroy_process_group()
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


# ---- records, tables and figures -------------------------------------------------------------------------------------


def hardware(threads: int | None = None) -> str:
    """Describe this machine: GPU, processor, cores, and the threads that torch uses (or ``threads``)."""
    gpu = f"{torch.cuda.get_device_name()}, " if torch.cuda.is_available() else ""
    return f"{gpu}{cpu_name()}, {os.cpu_count()} logical cores, {threads or torch.get_num_threads()} threads"


def versions(packages: Iterable[str]) -> dict[str, str | None]:
    """Look up the installed version of each package; None for one that is not installed."""
    return {package: installed_version(package) for package in packages}


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a table in Markdown, a line for each row."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def with_interval(
    statistics: Mapping[str, Any],
    factor: float,
    digits: int,
    *,
    unit: str = "",
    missing: str = "not finite",
    alone: str = " (one seed)",
) -> str:
    """Format ``factor`` times the ``mean`` and ``interval`` of ``statistics``, such as ``"+1.25 % [+0.80, +1.70]"``:
    ``missing`` where the mean is None, and the mean and ``alone`` where the interval is."""
    if statistics["mean"] is None:
        return missing
    text = f"{factor * statistics['mean']:+.{digits}f}{unit}"
    if statistics["interval"] is None:
        return f"{text}{alone}"
    low, high = (factor * bound for bound in statistics["interval"])
    return f"{text} [{low:+.{digits}f}, {high:+.{digits}f}]"


def draw_intervals(
    found: Mapping[str, Mapping[str, Any]], stated: Mapping[str, Mapping[str, float]], label: str
) -> Figure:
    """Draw means with their intervals in percent, a row for each name, next to what papers state.

    Args:
        found: ``mean`` and ``interval`` by name, either of them or both `None`.
        stated: values in percent by paper and name.
        label: of the axis.
    """
    figure = Figure(figsize=(8, 0.4 * len(found) + 1.2), layout="constrained")
    axes = figure.subplots()
    for row, of in enumerate(found.values()):
        if of["mean"] is not None:
            low, high = of["interval"] or (of["mean"], of["mean"])
            error = [[100 * (of["mean"] - low)], [100 * (high - of["mean"])]]
            axes.errorbar(100 * of["mean"], row, xerr=error, fmt="o", color="tab:blue", capsize=3)
    rows = {name: row for row, name in enumerate(found)}
    for (paper, values), marker in zip(stated.items(), "sD^v", strict=False):
        axes.plot(values.values(), [rows[name] for name in values], marker, color="0.55", label=paper)
    axes.plot([], [], "o", color="tab:blue", label="here, with 95 % intervals over seeds")
    axes.set_yticks(range(len(found)), found, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(label)
    axes.axvline(0.0, color="black", linewidth=0.8)
    axes.grid(axis="x", alpha=0.3)
    axes.legend(fontsize=7)
    return figure
