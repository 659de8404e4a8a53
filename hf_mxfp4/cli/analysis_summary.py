# SPDX-License-Identifier: Apache-2.0
"""What `hf-mxfp4 analyze` prints: a screen for each kind of tensor. All numbers are in the files that it writes."""

from collections.abc import Mapping, Sequence

from rich.console import Console

from ..analysis.errors.results import Analysis
from ..analysis.errors.statistics import ErrorStatistics
from ..analysis.report.columns import COLUMNS, LEGEND, number
from ..analysis.report.statements import SQNR_NOTE, bits_text, least_error, statements
from .console import plain_table


#: Tensors of largest relative error that are shown.
WORST = 5
#: Columns of statistics, and those for terminals narrower than `_WIDE`.
_SHOWN = ("SQNR dB", "rel. MSE %", "floor %", "scale bias", "deadzone", "grid", "to zero %", "gain")
_NARROW = ("SQNR dB", "scale bias", "deadzone", "grid")
_WIDE = 140


def print_summary(analysis: Analysis, console: Console) -> None:
    """Verdict, schemes, layer types and worst tensors of each kind, and what is not among them."""

    def say(text: str) -> None:
        if text:
            console.print(text, markup=False, highlight=False, soft_wrap=True)

    for kind in analysis.kinds:
        schemes = analysis.schemes_of(kind)
        totals = {scheme: analysis.total(kind, scheme) for scheme in schemes}
        count, elements = len(analysis.of_kind(kind)), totals[schemes[0]].elements
        title = f"{analysis.model}: {count} {kind} tensors, {elements:,} elements"
        console.print(_schemes(title, totals, console.width))
        say(LEGEND)
        say(least_error(totals))
        say(SQNR_NOTE)
        for sentence in statements(totals):
            say(sentence)
        groups = {scheme: analysis.by_layer_type(kind, scheme) for scheme in schemes}
        types = {name: [groups[scheme][name] for scheme in schemes] for name in groups[schemes[0]]}
        console.print(_by_scheme(f"{kind} tensors by layer", "layer type", types))
        best = min(schemes, key=lambda scheme: totals[scheme].total)
        worst = {r.name: [r.statistics[scheme] for scheme in schemes] for r in analysis.worst(kind, best, WORST)}
        if worst:
            console.print(_by_scheme(f"largest relative errors under {best}", "tensor", worst))
    if analysis.skipped:
        reasons = [f"{len(names)} {reason} (such as {min(names)})" for reason, names in analysis.skipped.items()]
        say(f"left out: {'; '.join(reasons)}")
    for note in analysis.notes:
        say(note)
    if analysis.problems:
        rows = [[problem.where, problem.reason] for problem in analysis.problems]
        console.print(plain_table("problems", ["where", "reason"], rows))


def _schemes(title: str, totals: Mapping[str, ErrorStatistics], width: int):
    """One row per scheme; the numbers before them are the headings of the tables below."""
    columns = _SHOWN if width >= _WIDE else _NARROW
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
