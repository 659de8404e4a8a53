# SPDX-License-Identifier: Apache-2.0
"""Progress on standard error, and tables on standard output."""

import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from ..files import json_clean, printable


#: Seconds between lines where there is no terminal to draw a bar on.
LINE_SECONDS = 10.0
#: Columns assumed where there is no terminal, so that tables in files and pipes are not cut.
_PLAIN_WIDTH = 200


class WorkProgress:
    """Show how much of a total is done: a bar on a terminal, a line every ten seconds elsewhere.

    Call it with an amount and what it belongs to. Use as a context manager.
    """

    def __init__(self, total: int, unit: str = "MB", scale: float = 1e6):
        self._total, self._unit, self._done = total / scale, unit, 0.0
        self._scale = scale
        self._started = self._said = time.monotonic()
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())
        self._task: Any = self._bar.add_task("reading", total=self._total)

    def __enter__(self) -> "WorkProgress":
        self._bar.start()
        return self

    def __exit__(self, *exception) -> None:
        self._bar.stop()

    def __call__(self, amount: int, name: str) -> None:
        self._done += amount / self._scale
        self._bar.update(self._task, completed=self._done, description=name[-40:])
        now = time.monotonic()
        if self._bar.disable and now - self._said >= LINE_SECONDS:
            self._said, share = now, min(1.0, self._done / max(1e-9, self._total))
            of = f"{self._done:,.0f} of {self._total:,.0f} {self._unit} ({share:.0%})"
            print(f"{of} in {now - self._started:.0f} s, at {name}", file=sys.stderr, flush=True)


def screen() -> Console:
    """Return standard output as it is now; as wide as a table needs where it is no terminal."""
    return Console() if sys.stdout.isatty() else Console(width=_PLAIN_WIDTH)


def print_table(title: str, headings: Sequence[str], *sections: Sequence[Sequence[str]]) -> None:
    """Print a table: text left, numbers right; a line between sections of rows. Nothing in it is read as markup."""
    table = Table(title=Text(printable(title)), title_justify="left", title_style="bold")
    for i, heading in enumerate(headings):
        table.add_column(Text(printable(heading)), justify="right" if i else "left", no_wrap=i > 0, overflow="fold")
    for rows in sections:
        for row in rows:
            table.add_row(*(Text(printable(cell)) for cell in row))
        table.add_section()
    screen().print(table)


def say(text: str) -> None:
    """Print a line as it is: no markup, no control characters, no line breaks of ours. Nothing for an empty one."""
    if text:
        screen().print(printable(text), markup=False, highlight=False, soft_wrap=True)


def print_json(value: Any) -> None:
    """Print a value on standard output; numbers that do not exist are null."""
    print(json.dumps(json_clean(value), indent=1, allow_nan=False))


def report_problems(problems: Sequence[Any]) -> None:
    """Print every problem on standard error, one line each."""
    for problem in problems:
        print(printable(f"problem: {problem.where}: {problem.reason}"), file=sys.stderr)
