# SPDX-License-Identifier: Apache-2.0
"""`report.html`: one file without external references, readable on a telephone."""

from collections.abc import Mapping
from html import escape
from typing import Any

from ..errors.results import Analysis
from ..errors.statistics import ErrorStatistics
from ..errors.sweep import SAMPLE_ELEMENTS
from ..html import image, page, table
from .columns import COLUMNS, LEGEND
from .figures import cosine_figure, delta_figure, layer_labels, precision_figure, ratio_figure
from .statements import SQNR_NOTE, statements, verdict


_TITLES = {"weight": "Weights", "activation": "Activations (inputs of the layers)"}
_SWEEP_NOTE = (
    '<p class="small">Ceiling rule, on the first '
    + f"{SAMPLE_ELEMENTS} elements (whole rows, at least one) of every tensor.</p>"
)


def render_html(analysis: Analysis, source: Mapping[str, Any], version: str) -> str:
    """The report as one HTML page, images included."""
    facts = ", ".join(str(value) for value in (source.get("architecture"), source.get("kind")) if value)
    body = [
        f"<h1>MXFP4 error of {escape(analysis.model)}</h1>",
        f'<p class="small">{escape(facts)} · hf-mxfp4 {escape(version)} · schemes: '
        f"{escape(', '.join(analysis.schemes))}</p>",
        *_problems(analysis),
        *(f"<p>{escape(note)}</p>" for note in analysis.notes),
    ]
    for kind in analysis.kinds:
        body += _kind_section(analysis, kind)
    body += _skipped(analysis)
    return page(f"MXFP4 error of {analysis.model}", body)


def _kind_section(analysis: Analysis, kind: str) -> list[str]:
    results = analysis.of_kind(kind)
    schemes = analysis.schemes_of(kind)
    totals = {scheme: analysis.total(kind, scheme) for scheme in schemes}
    types = {scheme: analysis.by_layer_type(kind, scheme) for scheme in schemes}
    depths = {scheme: analysis.by_depth(kind, scheme) for scheme in schemes}
    first = schemes[0]
    labels = layer_labels([result.name for result in results])
    layers = {label: result.statistics[first] for label, result in zip(labels, results, strict=True)}
    sweep = analysis.sweep(kind)
    parts = [
        f"<h2>{_TITLES[kind]}</h2>",
        f"<p>{len(results)} tensors, {totals[first].elements:,} elements.</p>",
        f"<p><b>{escape(verdict(totals))}</b> {escape(SQNR_NOTE)}</p>",
        _table("scheme", totals),
        f'<p class="small">{escape(LEGEND)}</p>',
        f"<p>{escape(' '.join(statements(totals)))}</p>",
        image(cosine_figure(layers, f"Cosines of the error components, {first}"), "cosines per layer"),
    ]
    if sweep.energy:
        parts.append(image(precision_figure(sweep), "error against the mantissa bits of the scale"))
        parts.append(_SWEEP_NOTE)
    if any(total.blocks for total in totals.values()):
        parts.append(image(delta_figure(totals), "histogram of the scale over the ideal scale"))
    if depths[first]:
        parts.append(image(ratio_figure(depths, "depth"), "error by depth"))
    parts.append(image(ratio_figure(types, "layer type"), "error by layer type"))
    for scheme in schemes:
        parts.append(f"<h3>{escape(scheme)}, by layer type</h3>{_table('layer type', types[scheme])}")
    for scheme in schemes:
        if depths[scheme]:
            rows = _table("depth", depths[scheme])
            parts.append(f"<details><summary>{escape(scheme)}, by depth</summary>{rows}</details>")
        worst = {r.name: r.statistics[scheme] for r in analysis.worst(kind, scheme)}
        rows = _table("tensor", worst)
        parts.append(f"<details><summary>{escape(scheme)}, largest relative errors</summary>{rows}</details>")
    return parts


def _problems(analysis: Analysis) -> list[str]:
    if not analysis.problems:
        return []
    lines = "".join(f"<li>{escape(p.where)}: {escape(p.reason)}</li>" for p in analysis.problems)
    return [f'<div class="problem"><h2>Problems</h2><p>Not part of the numbers below:</p><ul>{lines}</ul></div>']


def _skipped(analysis: Analysis) -> list[str]:
    if not analysis.skipped:
        return []
    rows = [[reason, str(len(names)), ", ".join(sorted(names)[:3])] for reason, names in analysis.skipped.items()]
    return ["<h2>Left out</h2>", table(["reason", "tensors", "such as"], rows, numbers=False)]


def _table(heading: str, statistics: Mapping[Any, ErrorStatistics]) -> str:
    rows = [[str(name), *(column(s) for column in COLUMNS.values())] for name, s in statistics.items()]
    return table([heading, *COLUMNS], rows)
