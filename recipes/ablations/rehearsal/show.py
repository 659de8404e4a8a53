# SPDX-License-Identifier: Apache-2.0
"""What a rehearsal prints: what ran, what was shortened, what was not tried."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from recipes.ablations.grid import Run
from recipes.ablations.runner import stored_state, summary
from recipes.common.terminal import console, tell

from .checks import largest, log_of
from .shorten import Rehearsal


def show(rehearsal: Rehearsal, runs: Sequence[Run], problems: Sequence[str], seconds: float) -> None:
    """Print the tables of a rehearsal and its verdict."""
    _runs(runs)
    table = Table(title="shortened for the rehearsal")
    for column in ("where", "option", "in the file", "here"):
        table.add_column(column, overflow="fold")
    for change in rehearsal.changes:
        written = "(not given)" if change.written is None else str(change.written)
        table.add_row(Text(change.where), Text(change.option), Text(written), Text(str(change.rehearsed)))
    console.print(table)
    for line in rehearsal.left_out:
        tell("not rehearsed:", line)
    for problem in problems:
        tell("PROBLEM", problem)
    finished = sum(summary(run) is not None for run in runs)
    verdict = f"{len(problems)} problems" if problems else "nothing went wrong"
    tell(
        "rehearsal",
        f"{finished} of {len(runs)} runs in {seconds / 60:.1f} min: {verdict}. No figure of it means anything. "
        f"Logs, records and plots: {rehearsal.grid.output}",
    )


def _runs(runs: Sequence[Run]) -> None:
    table = Table(title="what ran")
    columns = ("run", "seconds", "layers in MXFP4", "steps", "evaluations", "largest gradient", "noise", "replayed")
    for column in columns:
        table.add_column(column)
    for run in runs:
        result, state = summary(run), stored_state(run.folder)
        if result is None:
            table.add_row(Text(run.name), Text("FAILED", style="bold red"))
            continue
        log = log_of(run)
        evaluations = 1 + (result["accuracy_before"] is not None)
        evaluations += sum(any(key.startswith("greedy/") for key in entry) for entry in log)
        noise, gradient = largest(run, "aqn/sigma"), largest(run, "grad_norm")
        replayed = any(key.startswith("router_replay/") for entry in log for key in entry)
        table.add_row(
            Text(run.name),
            f"{state['seconds']:.0f}",
            str(result["n_quantized"]),
            str(result["steps"]),
            str(evaluations),
            "" if gradient is None else f"{gradient:.2g}",
            f"{noise:.2g}" if noise else "",
            "yes" if replayed else "",
        )
    console.print(table)
