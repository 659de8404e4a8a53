# SPDX-License-Identifier: Apache-2.0
"""The files that commands leave: one JSON, CSV and HTML file each of an analysis, a comparison and an evaluation, and
the tables that they have in common with the screen. The same results give the same bytes."""

import csv
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from .evaluation.results import Evaluation
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
    for title, heading, groups, names in (
        ("tensors by layer", "layer type", types, types[best]),
        (f"largest relative errors under {best}", "tensor", tensors, analysis.worst(best, worst)),
    ):
        rows = [[name, *(number(groups[scheme][name].sqnr_db, 2) for scheme in totals)] for name in names]
        headings = [heading, *(str(i) for i in range(1, len(totals) + 1))]
        yield f"{title}: SQNR in dB, by scheme", headings, rows


def write_analysis(analysis: Analysis, source: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write `report.json`, `tensors.csv` and `report.html` into ``folder``; their paths.

    Args:
        source: what to say about where the model came from, see [`hf_mxfp4.lab.errors.source.Source.describe`].
    """
    tensors, rows = [], []
    for result in analysis.in_order:
        layer_type, depth = location_of(result.name)
        facts = {"name": result.name, "kind": "weight", "layer_type": layer_type, "depth": depth}
        summaries = {scheme: stats.summary() for scheme, stats in result.statistics.items()}
        tensors.append({**facts, "shape": list(result.shape), "dtype": result.dtype, "schemes": summaries})
        shape = "x".join(map(str, result.shape))
        rows += [[*facts.values(), shape, result.dtype, scheme, *s.values()] for scheme, s in summaries.items()]
    columns = ["name", "kind", "layer_type", "depth", "shape", "dtype", "scheme", *ErrorStatistics().summary()]
    data = {"format": 1, "hf_mxfp4": __version__, **analysis_summary(analysis, source), "tensors": tensors}
    return _write(
        folder, {"report.json": data, "tensors.csv": [columns, *rows], "report.html": _page(analysis, source)}
    )


def analysis_summary(analysis: Analysis, source: Mapping[str, Any]) -> dict[str, Any]:
    """Return an analysis without the single tensors, JSON-clean: what `--json` prints. Numbers that do not exist (the
    SQNR of zeros) are null."""
    return json_clean(
        {
            "model": analysis.model,
            "source": dict(source),
            "schemes": list(analysis.schemes),
            "kinds": {"weight": _weights_summary(analysis)} if analysis.results else {},
            "skipped": {
                reason: {"count": len(names), "names": sorted(names)} for reason, names in analysis.skipped.items()
            },
            "problems": [{"where": problem.where, "reason": problem.reason} for problem in analysis.problems],
        }
    )


def _weights_summary(analysis: Analysis) -> dict[str, Any]:
    schemes, totals = analysis.schemes, analysis.totals()

    def summaries(grouped: Callable[[str], Mapping[Any, ErrorStatistics]]) -> dict[str, dict]:
        return {scheme: {str(name): s.summary() for name, s in grouped(scheme).items()} for scheme in schemes}

    return {
        "tensors": len(analysis.results),
        "total": {scheme: {**t.summary(), "delta_histogram": list(t.histogram)} for scheme, t in totals.items()},
        "verdict": least_error(totals),
        "by_layer_type": summaries(analysis.by_layer_type),
        "by_depth": summaries(analysis.by_depth),
        "worst": {
            scheme: [{"name": name, **s.summary()} for name, s in analysis.worst(scheme).items()] for scheme in schemes
        },
    }


def _page(analysis: Analysis, source: Mapping[str, Any]) -> str:
    return render_page(
        "error_analysis",
        analysis=analysis,
        version=__version__,
        facts=", ".join(str(value) for value in (source.get("architecture"), source.get("kind")) if value),
        section=_section(analysis) if analysis.results else None,
        skipped=[[reason, len(names), ", ".join(sorted(names)[:3])] for reason, names in analysis.skipped.items()],
        columns=list(COLUMNS),
        legend=LEGEND,
        sqnr_note=SQNR_NOTE,
    )


def _section(analysis: Analysis) -> dict[str, Any]:
    """Return what the page shows of the tensors; figures that show one scheme show the first."""
    results, totals = analysis.in_order, analysis.totals()
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
            "comparison.csv": [["name", *columns], *([name, *each.values()] for name, each in numbers.items())],
            "comparison.html": page,
        },
    )


def write_evaluation(evaluation: Evaluation, folder: Path) -> list[Path]:
    """Write `evaluation.json`, `texts.csv` and `evaluation.html` into ``folder``; their paths."""
    rows = evaluation.rows
    compared = any(row.kl is not None for row in evaluation.schemes)
    page = render_page(
        "evaluation",
        title=f"Perplexity of {evaluation.model}",
        version=__version__,
        summary=evaluation_title(evaluation),
        legend=evaluation_legend(evaluation),
        columns=evaluation_columns(evaluation),
        rows=evaluation_table(evaluation),
        figure=front_figure(evaluation) if compared else None,
        schemes=[[row.name, row.scheme.config.describe()] for row in evaluation.schemes],
    )
    scores = [
        [row.name, index, score.tokens, score.nll, score.kl, score.same_top]
        for row in rows
        for index, score in enumerate(row.scores)
    ]
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
    facts = ", ".join(evaluation.facts.values())
    return (
        f"{evaluation.model}: {evaluation.texts} texts, {evaluation.tokens:,} predicted tokens of {evaluation.text}"
        + (f" ({facts})" if facts else "")
    )


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
    compared = ["difference, nats", "KL, nats", "same top token %"] if evaluation.base is not None else []
    against = ["to the best, nats"] if evaluation.best is not None else []
    bits, sqnr = (["bits"], ["weight SQNR dB"]) if evaluation.schemes else ([], [])
    return ["scheme", *bits, "perplexity", *compared, *against, *sqnr]


def evaluation_table(evaluation: Evaluation) -> list[list[str]]:
    """Return a row of cells for each row of the evaluation, under [`evaluation_columns`]."""
    front = {row.name for row in evaluation.front} if len(evaluation.schemes) > 1 else set()
    cells = []
    for row in evaluation.rows:
        line = [f"{row.name} *" if row.name in front else row.name]
        if evaluation.schemes:
            line.append("-" if row.scheme is None else f"{row.scheme.bits:.2f}")
        line.append(f"{row.perplexity:.3f}")
        if evaluation.base is not None:
            difference = row.difference(evaluation.base)
            shown = [difference.text(3, "+"), row.kl.text(4), f"{100 * row.same_top:.1f}"]
            line += ["-"] * 3 if row is evaluation.base else shown
        if evaluation.best is not None:
            compared = row.scheme is not None and row is not evaluation.best
            line.append(row.difference(evaluation.best).text(3, "+") if compared else "-")
        if evaluation.schemes:
            line.append("-" if row.weight_sqnr_db is None else f"{row.weight_sqnr_db:.2f}")
        cells.append(line)
    return cells


def add_perplexity(folder: str | Path, evaluation: Mapping[str, Any]) -> None:
    """Put perplexity and divergence into the generated card of a saved checkpoint; ``evaluation`` is what
    `hf-mxfp4 eval` writes to `evaluation.json`.

    Raises `FileNotFoundError` without a card, and `ValueError` when it is not a generated one, or was edited, or the
    checkpoint's own scheme was not evaluated.
    """
    card = read_generated(folder)
    rows = {row["name"]: row for row in evaluation["rows"]}
    own = rows.get("own", rows.get("as stored"))
    if own is None:
        raise ValueError(
            f"the evaluation has {', '.join(rows)}, none of which is the checkpoint's own scheme; run hf-mxfp4 eval "
            "with --scheme own"
        )
    cells, base = {"perplexity": f"{own['perplexity']:.3f}"}, rows.get(evaluation["reference"])
    if base is not None and base is not own:
        name = "full precision (the master weights)" if base["name"] == "full precision" else f"`{base['name']}`"
        cells |= {
            f"perplexity of {name}": f"{base['perplexity']:.3f}",
            "difference, nats per token": _with_error(own["difference"], 3, "+"),
            "KL to it, nats per token": _with_error(own["kl"], 4),
            "same likeliest token": f"{100 * own['same_top']:.1f} %",
        }
    section = (
        f"On {evaluation['texts']} texts of `{evaluation['text']}`, {evaluation['tokens']} predicted "
        f"tokens, in {evaluation['dtype']} (`hf-mxfp4 eval`; ± standard errors by text).\n\n{table(cells)}"
    )
    replace_file(Path(folder) / CARD, str(with_section(card, "Perplexity", section)))


def _with_error(mean: Mapping[str, float | None], digits: int, sign: str = "") -> str:
    error = "" if mean["standard_error"] is None else f" ± {mean['standard_error']:.{digits}f}"
    return f"{mean['value']:{sign}.{digits}f}{error}"


def _write(folder: Path, files: Mapping[str, Any]) -> list[Path]:
    """Write each file by its suffix, replaced in one step."""
    for name, content in files.items():
        if name.endswith(".json"):
            write_json(folder / name, json_clean(content), indent=1, allow_nan=False)
        else:
            replace_file(folder / name, _csv_text(content) if name.endswith(".csv") else content)
    return [folder / name for name in files]


def _csv_text(rows: Iterable[Sequence[Any]]) -> str:
    out = io.StringIO()
    # Numbers that do not exist are empty.
    csv.writer(out, lineterminator="\n").writerows(json_clean(list(rows)))
    return out.getvalue()
