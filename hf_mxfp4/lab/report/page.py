# SPDX-License-Identifier: Apache-2.0
"""`report.html`: what the template `error_analysis` shows of an analysis."""

from collections.abc import Mapping
from typing import Any

from ..errors.results import Analysis
from ..errors.statistics import ErrorStatistics
from ..errors.sweep import SAMPLE_ELEMENTS
from ..page import render_page
from .columns import COLUMNS, LEGEND
from .figures import cosine_figure, delta_figure, layer_labels, precision_figure, ratio_figure
from .statements import SQNR_NOTE, least_error, statements


_TITLES = {"weight": "Weights", "activation": "Activations (inputs of the layers)"}
_SWEEP_NOTE = f"Ceiling rule, on the first {SAMPLE_ELEMENTS} elements (whole rows, at least one) of every tensor."


def render_html(analysis: Analysis, source: Mapping[str, Any], version: str) -> str:
    """The report as one HTML page, images included."""
    return render_page(
        "error_analysis",
        analysis=analysis,
        version=version,
        facts=", ".join(str(value) for value in (source.get("architecture"), source.get("kind")) if value),
        sections=[_kind_section(analysis, kind) for kind in analysis.kinds],
        skipped=[[reason, len(names), ", ".join(sorted(names)[:3])] for reason, names in analysis.skipped.items()],
        columns=list(COLUMNS),
        legend=LEGEND,
        sqnr_note=SQNR_NOTE,
        perplexity=_perplexity(analysis),
    )


def _perplexity(analysis: Analysis) -> dict[str, Any] | None:
    if analysis.evaluation is None:
        return None
    from ..perplexity.report import page_section  # it brings the layers along

    return page_section(analysis.evaluation)


def _kind_section(analysis: Analysis, kind: str) -> dict[str, Any]:
    """What the page shows of one kind of tensors; the figures are of the first scheme where they show one."""
    results = analysis.of_kind(kind)
    schemes = analysis.schemes_of(kind)
    first = schemes[0]
    totals = {scheme: analysis.total(kind, scheme) for scheme in schemes}
    types = {scheme: analysis.by_layer_type(kind, scheme) for scheme in schemes}
    depths = {scheme: analysis.by_depth(kind, scheme) for scheme in schemes}
    labels = layer_labels([result.name for result in results])
    layers = {label: result.statistics[first] for label, result in zip(labels, results, strict=True)}
    sweep = analysis.sweep(kind)

    figures = [(cosine_figure(layers, f"Cosines of the error components, {first}"), "cosines per layer", "")]
    if sweep.energy:
        figures.append((precision_figure(sweep), "error against the mantissa bits of the scale", _SWEEP_NOTE))
    if any(total.blocks for total in totals.values()):
        figures.append((delta_figure(totals), "histogram of the scale over the ideal scale", ""))
    if depths[first]:
        figures.append((ratio_figure(depths, "depth"), "error by depth", ""))
    figures.append((ratio_figure(types, "layer type"), "error by layer type", ""))

    folded = []
    for scheme in schemes:
        if depths[scheme]:
            folded.append(("depth", f"{scheme}, by depth", _rows(depths[scheme])))
        worst = {result.name: result.statistics[scheme] for result in analysis.worst(kind, scheme)}
        folded.append(("tensor", f"{scheme}, largest relative errors", _rows(worst)))
    return {
        "title": _TITLES[kind],
        "n_tensors": len(results),
        "elements": f"{totals[first].elements:,}",
        "ranking": least_error(totals),
        "statements": " ".join(statements(totals)),
        "totals": _rows(totals),
        "figures": figures,
        "layer_types": [(scheme, _rows(types[scheme])) for scheme in schemes],
        "folded": folded,
    }


def _rows(statistics: Mapping[Any, ErrorStatistics]) -> list[list[str]]:
    return [[str(name), *(column(s) for column in COLUMNS.values())] for name, s in statistics.items()]
