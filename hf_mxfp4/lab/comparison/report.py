# SPDX-License-Identifier: Apache-2.0
"""The files of a comparison: `comparison.json`, `comparison.csv` and `comparison.html`."""

import csv
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...files import json_clean, replace_file, write_json
from ..page import render_page
from .checkpoints import Comparison


JSON_NAME, CSV_NAME, HTML_NAME = "comparison.json", "comparison.csv", "comparison.html"


def write_comparison(result: Comparison, version: str, folder: Path) -> list[Path]:
    """Write the three files into ``folder``, each replaced in one step; their paths.

    Args:
        version: of this package.
    """
    data = {"hf_mxfp4": version, **result.to_dict()}
    paths = [folder / JSON_NAME, folder / CSV_NAME, folder / HTML_NAME]
    write_json(paths[0], data, indent=1, allow_nan=False)
    replace_file(paths[1], _csv_text(result))
    replace_file(paths[2], _html_text(result, version))
    return paths


def _csv_text(result: Comparison) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    names = list(result.numbers(result.zero))
    writer.writerow(["name", *names])
    for name, pair in result.pairs.items():
        cells = json_clean(result.numbers(pair)).values()
        writer.writerow([name, *("" if cell is None else cell for cell in cells)])
    return out.getvalue()


def _html_text(result: Comparison, version: str) -> str:
    tables = []
    if result.pairs:
        tables.append((result.groups_title, _rows(result, {"all": result.total(), **result.by_layer_type()})))
        tables.append((result.worst_title, _rows(result, {name: result.pairs[name] for name in result.worst()})))
    return render_page("comparison", result=result, version=version, tables=tables)


def _rows(result: Comparison, pairs: Mapping[str, Any]) -> list[list[str]]:
    return [[name, *(cell(pair) for cell in result.columns.values())] for name, pair in pairs.items()]
