# SPDX-License-Identifier: Apache-2.0
"""The files of an analysis: `report.json`, `tensors.csv` and `report.html`. The same analysis gives the same bytes."""

import csv
import io
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...files import json_clean, replace_file, write_json
from ..errors.results import Analysis
from ..errors.statistics import ErrorStatistics
from ..errors.sweep import SAMPLE_ELEMENTS
from .page import render_html
from .statements import least_error, statements


FORMAT = 1
JSON_NAME, CSV_NAME, HTML_NAME = "report.json", "tensors.csv", "report.html"


def build_report(analysis: Analysis, source: Mapping[str, Any], version: str) -> dict[str, Any]:
    """The whole analysis as JSON-clean data. Numbers that do not exist (the SQNR of zeros) are null.

    Args:
        source: what to say about where the model came from.
        version: of this package.
    """
    return json_clean(
        {
            "format": FORMAT,
            "hf_mxfp4": version,
            **build_summary(analysis, source),
            "tensors": [
                {
                    "name": result.name,
                    "kind": kind,
                    "layer_type": result.location.layer_type,
                    "depth": result.location.depth,
                    "shape": list(result.shape),
                    "dtype": result.dtype,
                    "schemes": {scheme: stats.summary() for scheme, stats in result.statistics.items()},
                }
                for kind in analysis.kinds
                for result in analysis.of_kind(kind)
            ],
        }
    )


def build_summary(analysis: Analysis, source: Mapping[str, Any]) -> dict[str, Any]:
    """[`build_report`] without the single tensors: what `--json` prints."""
    return json_clean(
        {
            "model": analysis.model,
            "source": dict(source),
            "schemes": list(analysis.schemes),
            "kinds": {kind: _kind_summary(analysis, kind) for kind in analysis.kinds},
            "skipped": {
                reason: {"count": len(names), "names": sorted(names)} for reason, names in analysis.skipped.items()
            },
            "problems": [{"where": problem.where, "reason": problem.reason} for problem in analysis.problems],
            "notes": list(analysis.notes),
            **({} if analysis.evaluation is None else {"perplexity": analysis.evaluation.to_dict()}),
        }
    )


def write_reports(analysis: Analysis, source: Mapping[str, Any], version: str, folder: Path) -> list[Path]:
    """Write the three files into ``folder``, each replaced in one step; their paths."""
    paths = [folder / JSON_NAME, folder / CSV_NAME, folder / HTML_NAME]
    write_json(paths[0], build_report(analysis, source, version), indent=1, allow_nan=False)
    replace_file(paths[1], _csv_text(analysis))
    replace_file(paths[2], render_html(analysis, source, version))
    return paths


def _kind_summary(analysis: Analysis, kind: str) -> dict[str, Any]:
    schemes = analysis.schemes_of(kind)
    totals = {scheme: analysis.total(kind, scheme) for scheme in schemes}
    sweep = analysis.sweep(kind)
    return {
        "tensors": len(analysis.of_kind(kind)),
        "total": {scheme: {**t.summary(), "delta_histogram": list(t.histogram)} for scheme, t in totals.items()},
        "verdict": least_error(totals),
        "statements": statements(totals),
        "by_layer_type": _groups(schemes, lambda scheme: analysis.by_layer_type(kind, scheme)),
        "by_depth": _groups(schemes, lambda scheme: analysis.by_depth(kind, scheme)),
        "worst": {
            scheme: [
                {"name": result.name, **result.statistics[scheme].summary()} for result in analysis.worst(kind, scheme)
            ]
            for scheme in schemes
        },
        "scale_precision": {
            "sample": f"the first {SAMPLE_ELEMENTS} elements (whole rows, at least one) of every tensor",
            "floor_relative_mse": sweep.floor_relative_mse,
            "relative_mse_per_block": list(sweep.relative_mse(32)),
            "relative_mse_shared_by_128": list(sweep.relative_mse(128)),
        },
    }


def _groups(
    schemes: Sequence[str], grouped: Callable[[str], Mapping[Any, ErrorStatistics]]
) -> dict[str, dict[str, dict[str, float]]]:
    return {scheme: {str(group): stats.summary() for group, stats in grouped(scheme).items()} for scheme in schemes}


def _csv_text(analysis: Analysis) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    columns = list(ErrorStatistics().summary())
    writer.writerow(["name", "kind", "layer_type", "depth", "shape", "dtype", "scheme", *columns])
    for kind in analysis.kinds:
        for result in analysis.of_kind(kind):
            location, shape = result.location, "x".join(map(str, result.shape))
            depth = "" if location.depth is None else location.depth
            for scheme, stats in result.statistics.items():
                numbers = ["" if _missing(value) else value for value in stats.summary().values()]
                writer.writerow([result.name, kind, location.layer_type, depth, shape, result.dtype, scheme, *numbers])
    return out.getvalue()


def _missing(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
