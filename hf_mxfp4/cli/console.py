# SPDX-License-Identifier: Apache-2.0
"""What is shown while and after a command works: progress on standard error, tables on standard output."""

import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text

from ..files import printable
from ..lab.errors.results import Analysis, Problem
from ..lab.errors.statistics import ErrorStatistics
from ..lab.report.columns import COLUMNS, LEGEND, number
from ..lab.report.statements import SQNR_NOTE, bits_text, least_error, statements


if TYPE_CHECKING:  # it brings the layers along, which other commands do without
    from ..lab.perplexity.results import Evaluation


#: Seconds between lines where there is no terminal to draw a bar on.
LINE_SECONDS = 10.0
#: Columns assumed where there is no terminal, so that tables in files and pipes are not cut.
_PLAIN_WIDTH = 200
#: Terminals narrower than this show only so many columns of statistics.
_WIDE, _NARROW_COLUMNS = 160, 6
#: Tensors of largest relative error that are shown.
WORST = 5
#: Columns of statistics, and those for terminals narrower than `_SUMMARY_WIDE`.
_SUMMARY_COLUMNS = ("SQNR dB", "rel. MSE %", "floor %", "scale bias", "deadzone", "grid", "to zero %", "gain")
_SUMMARY_NARROW = ("SQNR dB", "scale bias", "deadzone", "grid")
_SUMMARY_WIDE = 140


class ByteProgress:
    """Bytes done of a total: a bar with MB/s and remaining time on a terminal, a line every ten seconds elsewhere, and
    there, if any was written, a last one at 100 %.

    Call it with a number of bytes and what they belong to. Use as a context manager; to leave it without an exception
    is to be done.
    """

    def __init__(self, total: int | None):
        self._total = total
        self._done = 0
        self._started = self._said = time.monotonic()
        self._bar: Progress | None = None
        self._task: Any = None

    def __enter__(self) -> "ByteProgress":
        if sys.stderr.isatty():
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TaskProgressColumn(),
                DownloadColumn(),
                TransferSpeedColumn(),
                TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._bar.start()
            self._task = self._bar.add_task("reading", total=self._total)
        return self

    def __exit__(self, kind, *exception) -> None:
        if self._bar is not None:
            if kind is None:
                self._bar.update(self._task, total=self._total or self._done, completed=self._total or self._done)
            self._bar.stop()
        elif kind is None and self._said > self._started:
            seconds = time.monotonic() - self._started
            print(f"{(self._total or self._done) / 1e6:.0f} MB (100%) in {seconds:.0f} s", file=sys.stderr, flush=True)

    def __call__(self, count: int, name: str) -> None:
        self._done += count
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, description=name[-40:])
        elif time.monotonic() - self._said >= LINE_SECONDS:
            self._said = time.monotonic()
            print(self._line(name), file=sys.stderr, flush=True)

    @property
    def rate(self) -> float:
        """Return megabytes per second so far."""
        return self._done / 1e6 / max(1e-9, time.monotonic() - self._started)

    def _line(self, name: str) -> str:
        done = f"{self._done / 1e6:.0f} MB"
        if not self._total:
            return f"{done}, {self.rate:.1f} MB/s, at {name}"
        left = max(0.0, self._total - self._done) / 1e6 / max(1e-9, self.rate)
        share = min(1.0, self._done / self._total)
        return f"{done} of {self._total / 1e6:.0f} MB ({share:.0%}), {self.rate:.1f} MB/s, {left:.0f} s left, at {name}"


class TokenProgress:
    """Tokens done of a total: a bar on a terminal, a line every ten seconds elsewhere.

    Call it with a number of tokens and what they were measured under. Use as a context manager. The total may be set
    when it is known.
    """

    def __init__(self, total: int | None = None):
        self.total, self._done = total, 0
        self._started = self._said = time.monotonic()
        self._bar: Progress | None = None

    def __enter__(self) -> "TokenProgress":
        if sys.stderr.isatty():
            columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._bar.start()
            self._task = self._bar.add_task("full precision", total=self.total)
        return self

    def __exit__(self, *exception) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, count: int, name: str) -> None:
        self._done += count
        seconds = time.monotonic() - self._started
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, total=self.total, description=name[-40:])
        elif time.monotonic() - self._said >= LINE_SECONDS:
            self._said = time.monotonic()
            of = f" of {self.total:,} tokens ({self._done / self.total:.0%})" if self.total else " tokens"
            print(f"{self._done:,}{of} in {seconds:.0f} s, at {name}", file=sys.stderr, flush=True)


def out() -> Console:
    """Standard output as it is now; as wide as a table needs where it is no terminal."""
    return Console() if sys.stdout.isatty() else Console(width=_PLAIN_WIDTH)


def statistics_table(title: str, heading: str, rows: Mapping[Any, ErrorStatistics]) -> Table:
    """One row of statistics per name; on a narrow terminal without the last columns."""
    titles = list(COLUMNS)[: None if out().width >= _WIDE else _NARROW_COLUMNS]
    return plain_table(
        title, [heading, *titles], [[str(name), *(COLUMNS[title](s) for title in titles)] for name, s in rows.items()]
    )


def plain_table(title: str, headings: Sequence[str], *sections: Sequence[Sequence[str]]) -> Table:
    """Text left, numbers right; a line between sections of rows. Nothing in it is read as markup."""
    table = Table(title=Text(printable(title)), title_justify="left", title_style="bold")
    for i, heading in enumerate(headings):
        table.add_column(Text(printable(heading)), justify="right" if i else "left", no_wrap=i > 0, overflow="fold")
    for rows in sections:
        for row in rows:
            table.add_row(*(Text(printable(cell)) for cell in row))
        table.add_section()
    return table


def say(text: str, console: Console | None = None) -> None:
    """Print a line as it is: no markup, no control characters, no line breaks of ours. Nothing for an empty one."""
    if text:
        (console or out()).print(printable(text), markup=False, highlight=False, soft_wrap=True)


def report_problems(problems: Sequence[Problem]) -> None:
    """Every problem on standard error, one line each."""
    for problem in problems:
        print(printable(f"problem: {problem.where}: {problem.reason}"), file=sys.stderr)


def print_summary(analysis: Analysis, console: Console) -> None:
    """Print what `hf-mxfp4 analyze` says: schemes, the best one, layer types and worst tensors of each kind, and what
    is not among them. All numbers are in the files that it writes."""
    for kind in analysis.kinds:
        schemes = analysis.schemes_of(kind)
        totals = {scheme: analysis.total(kind, scheme) for scheme in schemes}
        count, elements = len(analysis.of_kind(kind)), totals[schemes[0]].elements
        title = f"{analysis.model}: {count} {kind} tensors, {elements:,} elements"
        console.print(_schemes(title, totals, console.width))
        for sentence in (LEGEND, least_error(totals), SQNR_NOTE, *statements(totals)):
            say(sentence, console)
        groups = {scheme: analysis.by_layer_type(kind, scheme) for scheme in schemes}
        types = {name: [groups[scheme][name] for scheme in schemes] for name in groups[schemes[0]]}
        console.print(_by_scheme(f"{kind} tensors by layer", "layer type", types))
        best = min(schemes, key=lambda scheme: totals[scheme].total)
        worst = {r.name: [r.statistics[scheme] for scheme in schemes] for r in analysis.worst(kind, best, WORST)}
        if worst:
            console.print(_by_scheme(f"largest relative errors under {best}", "tensor", worst))
    if analysis.evaluation is not None:
        print_evaluation(analysis.evaluation, console)
    if analysis.skipped:
        reasons = [f"{len(names)} {reason} (such as {min(names)})" for reason, names in analysis.skipped.items()]
        say(f"left out: {'; '.join(reasons)}", console)
    for note in analysis.notes:
        say(note, console)
    if analysis.problems:
        rows = [[problem.where, problem.reason] for problem in analysis.problems]
        console.print(plain_table("problems", ["where", "reason"], rows))


def print_evaluation(evaluation: "Evaluation", console: Console) -> None:
    """Print what `hf-mxfp4 eval` says: perplexity and divergence of every scheme."""
    from ..lab.perplexity.report import columns, legend, summary, table

    console.print(plain_table(summary(evaluation), columns(evaluation), table(evaluation)))
    say(legend(evaluation), console)


def _schemes(title: str, totals: Mapping[str, ErrorStatistics], width: int):
    """One row per scheme; the numbers before them are the headings of the tables below."""
    columns = _SUMMARY_COLUMNS if width >= _SUMMARY_WIDE else _SUMMARY_NARROW
    rows = [
        [f"{i}  {scheme}", bits_text(scheme), *(COLUMNS[column](statistics) for column in columns)]
        for i, (scheme, statistics) in enumerate(totals.items(), 1)
    ]
    return plain_table(title, ["scheme", "bits", *columns], rows)


def _by_scheme(title: str, heading: str, rows: Mapping[str, Sequence[ErrorStatistics]]):
    """SQNR of every row under each scheme."""
    count = len(next(iter(rows.values())))
    cells = [[name, *(number(statistics.sqnr_db, 2) for statistics in row)] for name, row in rows.items()]
    return plain_table(f"{title}: SQNR in dB, by scheme", [heading, *map(str, range(1, count + 1))], cells)
