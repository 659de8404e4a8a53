# SPDX-License-Identifier: Apache-2.0
"""The files that commands leave: one JSON, CSV and HTML file each of an analysis, a comparison and an evaluation, and
the tables that they have in common with the screen. The same results give the same bytes."""

import csv
import io
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from .. import __version__
from ..checkpoint.card import CARD, read_generated, table, with_section
from ..files import json_clean, replace_file, write_json
from .errors.bits import bits_text
from .errors.comparison import Comparison
from .errors.layers import location_of
from .errors.statistics import ErrorStatistics
from .errors.weights import SQNR_NOTE, Analysis, least_error
from .evaluation.results import AS_STORED, FULL_PRECISION, Evaluation, Mean, Row
from .figures import cosine_figure, delta_figure, front_figure, layer_labels, ratio_figure
from .page import number, render_page


#: Titles of the columns of statistics, and how to fill the cells.
COLUMNS: dict[str, Callable[[ErrorStatistics], str]] = {
    "rel. MSE %": lambda s: number(100 * s.relative_mse, 4),
    "SQNR dB": lambda s: number(s.sqnr_db, 2),
    "floor %": lambda s: number(100 * s.floor_relative_mse, 4),
    "scale bias": lambda s: number(s.energy_ratio["scale_bias"], 3),
    "deadzone": lambda s: number(s.energy_ratio["deadzone"], 3),
    "grid": lambda s: number(s.energy_ratio["grid"], 3),
    "cos(s,g)": lambda s: number(s.cosine_scale_grid, 3),
    "in deadzone %": lambda s: number(100 * s.deadzone_fraction, 2),
    "to zero %": lambda s: number(100 * s.zero_fraction, 2),
    "gain": lambda s: number(s.gain, 4),
    "gamma mean": lambda s: number(s.gamma_mean, 3),
}
_ON_SCREEN = ("SQNR dB", "rel. MSE %", "floor %", "scale bias", "deadzone", "grid", "to zero %", "gain")
#: Units that the titles have no room for.
LEGEND = (
    "scale bias, deadzone, grid: energy of that part of the error over that of the whole error; floor: error of the "
    "ideal scale amax / 6"
)


def statistics_table(by_scheme: Mapping[str, ErrorStatistics]) -> tuple[list[str], list[list[str]]]:
    """Return headings and rows of the table on screen; the schemes' numbers are the headings of [`sqnr_tables`]."""
    rows = [
        [f"{i}  {scheme}", bits_text(scheme), *(COLUMNS[column](statistics) for column in _ON_SCREEN)]
        for i, (scheme, statistics) in enumerate(by_scheme.items(), 1)
    ]
    return ["scheme", "bits", *_ON_SCREEN], rows


def sqnr_tables(analysis: Analysis, worst: int = 5) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Yield titles, headings and rows of two tables of SQNR by scheme: of layer types, and of the worst tensors."""
    totals = analysis.totals()
    best = min(totals, key=lambda scheme: totals[scheme].total)
    types = {scheme: analysis.by_layer_type(scheme) for scheme in totals}
    tensors = {scheme: {r.name: r.statistics[scheme] for r in analysis.results} for scheme in totals}
    numbers = [str(i) for i in range(1, len(totals) + 1)]
    for title, heading, groups, names in (
        ("tensors by layer", "layer type", types, types[best]),
        (f"largest relative errors under {best}", "tensor", tensors, analysis.worst(best, worst)),
    ):
        rows = [[name, *(number(groups[scheme][name].sqnr_db, 2) for scheme in totals)] for name in names]
        yield f"{title}: SQNR in dB, by scheme", [heading, *numbers], rows


def write_analysis(analysis: Analysis, source: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write `report.json`, `tensors.csv` and `report.html` into ``folder``; their paths.

    Args:
        source: what to say about where the model came from, see [`hf_mxfp4.lab.errors.source.Source.describe`].
    """
    tensors = []
    rows = []
    for result in analysis.in_order:
        layer_type, depth = location_of(result.name)
        facts = {"name": result.name, "kind": "weight", "layer_type": layer_type, "depth": depth}
        summaries = {scheme: statistics.summary() for scheme, statistics in result.statistics.items()}
        tensors.append({**facts, "shape": list(result.shape), "dtype": result.dtype, "schemes": summaries})
        shape = "x".join(map(str, result.shape))
        for scheme, summary in summaries.items():
            rows.append([*facts.values(), shape, result.dtype, scheme, *summary.values()])
    columns = ["name", "kind", "layer_type", "depth", "shape", "dtype", "scheme", *ErrorStatistics().summary()]
    data = {"format": 1, "hf_mxfp4": __version__, **analysis_summary(analysis, source), "tensors": tensors}
    return _write(
        folder, {"report.json": data, "tensors.csv": [columns, *rows], "report.html": _page(analysis, source)}
    )


def analysis_summary(analysis: Analysis, source: Mapping[str, Any]) -> dict[str, Any]:
    """Return an analysis without the single tensors, JSON-clean: what `--json` prints. Numbers that do not exist (the
    SQNR of zeros) are null."""
    kinds = {}
    if analysis.results:
        kinds["weight"] = _weights_summary(analysis)
    skipped = {}
    for reason, names in analysis.skipped.items():
        skipped[reason] = {"count": len(names), "names": sorted(names)}
    return json_clean(
        {
            "model": analysis.model,
            "source": dict(source),
            "schemes": list(analysis.schemes),
            "kinds": kinds,
            "skipped": skipped,
            "problems": [{"where": problem.where, "reason": problem.reason} for problem in analysis.problems],
        }
    )


def _weights_summary(analysis: Analysis) -> dict[str, Any]:
    summary: dict[str, Any] = {
        "tensors": len(analysis.results),
        "total": {},
        "verdict": least_error(analysis.totals()),
        "by_layer_type": {},
        "by_depth": {},
        "worst": {},
    }
    for scheme, total in analysis.totals().items():
        summary["total"][scheme] = {**total.summary(), "delta_histogram": list(total.histogram)}
        summary["by_layer_type"][scheme] = _summaries(analysis.by_layer_type(scheme))
        summary["by_depth"][scheme] = _summaries(analysis.by_depth(scheme))
        worst = analysis.worst(scheme)
        summary["worst"][scheme] = [{"name": name, **statistics.summary()} for name, statistics in worst.items()]
    return summary


def _summaries(groups: Mapping[Any, ErrorStatistics]) -> dict[str, dict[str, float]]:
    return {str(name): statistics.summary() for name, statistics in groups.items()}


def _page(analysis: Analysis, source: Mapping[str, Any]) -> str:
    facts = [str(source[key]) for key in ("architecture", "kind") if source.get(key)]
    section = None
    if analysis.results:
        section = _section(analysis)
    skipped = []
    for reason, names in analysis.skipped.items():
        skipped.append([reason, len(names), ", ".join(sorted(names)[:3])])
    return render_page(
        "error_analysis",
        analysis=analysis,
        version=__version__,
        facts=", ".join(facts),
        section=section,
        skipped=skipped,
        columns=list(COLUMNS),
        legend=LEGEND,
        sqnr_note=SQNR_NOTE,
    )


def _section(analysis: Analysis) -> dict[str, Any]:
    """Return what the page shows of the tensors; figures that show one scheme show the first."""
    results = analysis.in_order
    totals = analysis.totals()
    first = next(iter(totals))
    types = {scheme: analysis.by_layer_type(scheme) for scheme in totals}
    depths = {scheme: analysis.by_depth(scheme) for scheme in totals}
    labels = layer_labels([result.name for result in results])
    layers = {label: result.statistics[first] for label, result in zip(labels, results, strict=True)}
    figures = [(cosine_figure(layers, f"Cosines of the error components, {first}"), "cosines per layer")]
    if any(total.blocks for total in totals.values()):
        figures.append((delta_figure(totals), "histogram of the scale over the ideal scale"))
    if depths[first]:
        figures.append((ratio_figure(depths, "depth"), "error by depth"))
    figures.append((ratio_figure(types, "layer type"), "error by layer type"))
    folded = []
    for scheme in totals:
        if depths[scheme]:
            folded.append(("depth", f"{scheme}, by depth", _rows(depths[scheme])))
        folded.append(("tensor", f"{scheme}, largest relative errors", _rows(analysis.worst(scheme))))
    return {
        "n_tensors": len(results),
        "elements": f"{totals[first].elements:,}",
        "ranking": least_error(totals),
        "totals": _rows(totals),
        "figures": figures,
        "layer_types": [(scheme, _rows(types[scheme])) for scheme in totals],
        "folded": folded,
    }


def _rows(statistics: Mapping[Any, ErrorStatistics]) -> list[list[str]]:
    return [[str(name), *(column(s) for column in COLUMNS.values())] for name, s in statistics.items()]


def write_comparison(result: Comparison, folder: Path) -> list[Path]:
    """Write `comparison.json`, `comparison.csv` and `comparison.html` into ``folder``; their paths."""
    numbers = {name: result.derive(sums) for name, sums in result.sums.items()}
    columns = list(next(iter(numbers.values()), {}))
    page = render_page("comparison", result=result, version=__version__, tables=result.tables())
    return _write(
        folder,
        {
            "comparison.json": {"hf_mxfp4": __version__, **result.to_dict()},
            "comparison.csv": [["name", *columns], *([name, *row.values()] for name, row in numbers.items())],
            "comparison.html": page,
        },
    )


def write_evaluation(evaluation: Evaluation, folder: Path) -> list[Path]:
    """Write `evaluation.json`, `texts.csv` and `evaluation.html` into ``folder``; their paths."""
    figure = None
    if any(row.kl is not None for row in evaluation.schemes):
        figure = front_figure(evaluation)
    page = render_page(
        "evaluation",
        title=f"Perplexity of {evaluation.model}",
        version=__version__,
        summary=evaluation_title(evaluation),
        legend=evaluation_legend(evaluation),
        columns=evaluation_columns(evaluation),
        rows=evaluation_table(evaluation),
        figure=figure,
        schemes=[[row.name, row.scheme.config.describe()] for row in evaluation.schemes],
    )
    scores = []
    for row in evaluation.rows:
        for index, score in enumerate(row.scores):
            scores.append([row.name, index, score.tokens, score.nll, score.kl, score.same_top])
    return _write(
        folder,
        {
            "evaluation.json": {"hf_mxfp4": __version__, **evaluation.to_dict()},
            "texts.csv": [["scheme", "text", "tokens", "nll", "kl", "same_top"], *scores],
            "evaluation.html": page,
        },
    )


def evaluation_title(evaluation: Evaluation) -> str:
    """Say in one line what was measured, on what."""
    title = f"{evaluation.model}: {evaluation.texts} texts, {evaluation.tokens:,} predicted tokens of {evaluation.text}"
    if evaluation.facts:
        title += f" ({', '.join(evaluation.facts.values())})"
    return title


def evaluation_legend(evaluation: Evaluation) -> str:
    """Say what the columns of the table mean."""
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


def evaluation_columns(evaluation: Evaluation) -> list[str]:
    """Return the headings of the table."""
    columns = ["scheme"]
    if evaluation.schemes:
        columns.append("bits")
    columns.append("perplexity")
    if evaluation.base is not None:
        columns += ["difference, nats", "KL, nats", "same top token %"]
    if evaluation.best is not None:
        columns.append("to the best, nats")
    if evaluation.schemes:
        columns.append("weight SQNR dB")
    return columns


def evaluation_table(evaluation: Evaluation) -> list[list[str]]:
    """Return a row of cells for each row of the evaluation, under [`evaluation_columns`]."""
    return [_evaluation_row(evaluation, row) for row in evaluation.rows]


def _evaluation_row(evaluation: Evaluation, row: Row) -> list[str]:
    name = row.name
    if len(evaluation.schemes) > 1 and row in evaluation.front:
        name += " *"
    cells = [name]
    if evaluation.schemes:
        cells.append("-" if row.scheme is None else f"{row.scheme.bits:.2f}")
    cells.append(f"{row.perplexity:.3f}")
    if row is evaluation.base:
        cells += ["-", "-", "-"]
    elif evaluation.base is not None:
        cells += [row.difference(evaluation.base).text(3, "+"), row.kl.text(4), f"{100 * row.same_top:.1f}"]
    if evaluation.best is not None:
        if row.scheme is None or row is evaluation.best:
            cells.append("-")
        else:
            cells.append(row.difference(evaluation.best).text(3, "+"))
    if evaluation.schemes:
        cells.append("-" if row.weight_sqnr_db is None else f"{row.weight_sqnr_db:.2f}")
    return cells


def add_perplexity(folder: str | Path, evaluation: Mapping[str, Any]) -> None:
    """Put perplexity and divergence into the generated card of a saved checkpoint; ``evaluation`` is what
    `hf-mxfp4 eval` writes to `evaluation.json`.

    Raises `FileNotFoundError` without a card, and `ValueError` when it is not a generated one, or was edited, or the
    checkpoint's own scheme was not evaluated.
    """
    card = read_generated(folder)
    rows = {row["name"]: row for row in evaluation["rows"]}
    own = rows.get("own", rows.get(AS_STORED))
    if own is None:
        raise ValueError(
            f"the evaluation has {', '.join(rows)}, none of which is the checkpoint's own scheme; run hf-mxfp4 eval "
            "with --scheme own"
        )
    cells = {"perplexity": f"{own['perplexity']:.3f}"}
    base = rows.get(evaluation["reference"])
    if base is not None and base is not own:
        name = f"`{base['name']}`"
        if base["name"] == FULL_PRECISION:
            name = "full precision (the master weights)"
        difference = Mean(own["difference"]["value"], own["difference"]["standard_error"])
        kl = Mean(own["kl"]["value"], own["kl"]["standard_error"])
        cells[f"perplexity of {name}"] = f"{base['perplexity']:.3f}"
        cells["difference, nats per token"] = difference.text(3, "+")
        cells["KL to it, nats per token"] = kl.text(4)
        cells["same likeliest token"] = f"{100 * own['same_top']:.1f} %"
    section = (
        f"On {evaluation['texts']} texts of `{evaluation['text']}`, {evaluation['tokens']} predicted "
        f"tokens, in {evaluation['dtype']} (`hf-mxfp4 eval`; ± standard errors by text).\n\n{table(cells)}"
    )
    replace_file(Path(folder) / CARD, str(with_section(card, "Perplexity", section)))


def _write(folder: Path, files: Mapping[str, Any]) -> list[Path]:
    """Write each file by its suffix, replaced in one step."""
    for name, content in files.items():
        if name.endswith(".json"):
            write_json(folder / name, json_clean(content), indent=1, allow_nan=False)
        elif name.endswith(".csv"):
            text = io.StringIO()
            # Numbers that do not exist are empty.
            csv.writer(text, lineterminator="\n").writerows(json_clean(content))
            replace_file(folder / name, text.getvalue())
        else:
            replace_file(folder / name, content)
    return [folder / name for name in files]
