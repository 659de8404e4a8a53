# SPDX-License-Identifier: Apache-2.0
"""The files of an evaluation: `evaluation.json`, `texts.csv` and `evaluation.html`, and their tables and plot."""

import csv
import io
from pathlib import Path
from typing import Any

from ...files import json_clean, replace_file, write_json
from ..page import render_page
from ..report.figures import Figure, plain
from .results import Evaluation, Mean, Row


JSON_NAME, CSV_NAME, HTML_NAME = "evaluation.json", "texts.csv", "evaluation.html"


def legend(evaluation: Evaluation) -> str:
    """What the columns of the table mean."""
    parts = []
    if evaluation.base is not None and len(evaluation.rows) > 1:
        parts.append(
            "± standard errors by text. Difference: nats per token to the reference, paired by text. KL: divergence of "
            "the predictions from those of the reference."
        )
    if evaluation.schemes:
        parts.append("Bits: the mean of the quantized operands of a product.")
    if len(evaluation.schemes) > 1:
        parts.append(
            "* on the front: no other scheme on the same operands has both no more bits and less KL. To the best: nats "
            "per token to the scheme of the least perplexity."
        )
    return " ".join(parts)


def columns(evaluation: Evaluation) -> list[str]:
    """The headings of the table."""
    compared = ["difference, nats", "KL, nats", "same top token %"] if evaluation.base is not None else []
    against = ["to the best, nats"] if evaluation.best is not None else []
    sqnr = ["weight SQNR dB"] if evaluation.schemes else []
    bits = ["bits"] if evaluation.schemes else []
    return ["scheme", *bits, "perplexity", *compared, *against, *sqnr]


def table(evaluation: Evaluation) -> list[list[str]]:
    """A row of cells for each row of the evaluation, under [`columns`]."""
    front = {row.name for row in evaluation.front}
    cells = []
    for row in evaluation.rows:
        name = f"{row.name} *" if row.name in front and len(evaluation.schemes) > 1 else row.name
        line = [name, f"{row.perplexity:.3f}"]
        if evaluation.schemes:
            line.insert(1, "-" if row.scheme is None else f"{row.scheme.bits:.2f}")
        if evaluation.base is not None:
            own = row is evaluation.base
            line.append("-" if own else row.difference(evaluation.base).text(3, "+"))
            line.append("-" if own else row.kl.text(4))
            line.append("-" if own else f"{100 * row.same_top:.1f}")
        if evaluation.best is not None:
            compared = row.scheme is not None and row is not evaluation.best
            line.append(row.difference(evaluation.best).text(3, "+") if compared else "-")
        if evaluation.schemes:
            line.append("-" if row.weight_sqnr_db is None else f"{row.weight_sqnr_db:.2f}")
        cells.append(line)
    return cells


def summary(evaluation: Evaluation) -> str:
    """One line: what was measured, on what."""
    facts = ", ".join(evaluation.facts.values())
    return (
        f"{evaluation.model}: {evaluation.texts} texts, {evaluation.tokens:,} predicted tokens of {evaluation.text}"
        + (f" ({facts})" if facts else "")
    )


def front_figure(evaluation: Evaluation, title: str = "") -> Figure:
    """KL over bits of an operand, with standard errors, and for weights alone and for both operands the front of the
    schemes that no other beats in both.

    Raises `ValueError` when no scheme was compared with a reference.
    """
    rows = [row for row in evaluation.schemes if row.kl is not None]
    if not rows:
        raise ValueError("nothing to plot: no scheme was compared with a reference")
    from matplotlib.figure import Figure as NewFigure

    figure = NewFigure(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    numbers = {row.name: number for number, row in enumerate(rows, 1)}
    for color, (operands, front) in enumerate(evaluation.fronts.items()):
        place = [row.scheme.bits for row in front], [row.kl.value for row in front]
        axes.plot(*place, color=f"C{color}", linewidth=1, label=f"front of {operands}")
        for row in (row for row in rows if row.scheme.operands == operands):
            kl: Mean = row.kl
            style = {"fmt": "o" if row in front else "x", "color": f"C{color}"}
            label = f"{numbers[row.name]}  {plain(row.name)}"
            axes.errorbar(row.scheme.bits, kl.value, kl.error or 0.0, capsize=3, markersize=5, label=label, **style)
            # Of schemes of the same bits every second has its number a little aside.
            better = sum(other.scheme.bits == row.scheme.bits and other.kl.value < kl.value for other in rows)
            offset = (6 + 12 * (better % 2), -3)
            axes.annotate(
                str(numbers[row.name]), (row.scheme.bits, kl.value), offset, textcoords="offset points", fontsize=7
            )
    figure.legend(loc="outside right upper", fontsize=7)
    positive = [row.kl.value for row in rows if row.kl.value > 0]
    if positive and max(positive) > 10 * min(positive):
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.margins(x=0.15)
    axes.set(title=title or "Divergence and bits", xlabel="bits of an operand", ylabel="KL to the reference, nats")
    axes.grid(alpha=0.3)
    return figure


def write_reports(evaluation: Evaluation, version: str, folder: Path) -> list[Path]:
    """Write the three files into ``folder``, each replaced in one step; their paths.

    Args:
        version: of this package.
    """
    paths = [folder / JSON_NAME, folder / CSV_NAME, folder / HTML_NAME]
    write_json(paths[0], json_clean({"hf_mxfp4": version, **evaluation.to_dict()}), indent=1, allow_nan=False)
    replace_file(paths[1], _csv_text(evaluation))
    replace_file(paths[2], _html_text(evaluation, version))
    return paths


def _csv_text(evaluation: Evaluation) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["scheme", "text", "tokens", "nll", "kl", "same_top"])
    for row in evaluation.rows:
        for index, score in enumerate(row.scores):
            cells: list[Any] = [score.tokens, score.nll, score.kl, score.same_top]
            writer.writerow([row.name, index, *("" if cell is None else cell for cell in cells)])
    return out.getvalue()


def page_section(evaluation: Evaluation) -> dict[str, Any]:
    """What a page shows of an evaluation, by the macro `evaluation` of `parts.html.j2`."""
    rows: tuple[Row, ...] = evaluation.rows
    compared = any(row.kl is not None for row in evaluation.schemes)
    pairs = [
        [row.name, *("-" if other is row else row.difference(other).text(3, "+") for other in rows)] for row in rows
    ]
    return {
        "summary": summary(evaluation),
        "legend": legend(evaluation),
        "columns": columns(evaluation),
        "rows": table(evaluation),
        "figure": front_figure(evaluation) if compared else None,
        "names": [row.name for row in rows],
        "pairs": pairs if len(rows) > 1 else [],
        "schemes": [[row.name, row.scheme.config.describe()] for row in evaluation.schemes],
    }


def _html_text(evaluation: Evaluation, version: str) -> str:
    title = f"Perplexity of {evaluation.model}"
    return render_page("evaluation", title=title, version=version, section=page_section(evaluation))
