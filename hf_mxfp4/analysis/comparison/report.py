# SPDX-License-Identifier: Apache-2.0
"""The files of a comparison: `comparison.json`, `comparison.csv` and `comparison.html`."""

import csv
import io
import json
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from ...files import json_clean, replace_file
from ..html import page, table
from .checkpoints import Comparison


JSON_NAME, CSV_NAME, HTML_NAME = "comparison.json", "comparison.csv", "comparison.html"


def write_comparison(result: Comparison, version: str, folder: Path) -> list[Path]:
    """Write the three files into ``folder``, each replaced in one step; their paths.

    Args:
        version: of this package.
    """
    folder.mkdir(parents=True, exist_ok=True)
    data = {"hf_mxfp4": version, **result.to_dict()}
    paths = [folder / JSON_NAME, folder / CSV_NAME, folder / HTML_NAME]
    replace_file(paths[0], json.dumps(data, indent=1, allow_nan=False) + "\n")
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
    title = f"{result.first} and {result.second}"
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="small">hf-mxfp4 {escape(version)}</p>',
        *(f"<p>{escape(line)}</p>" for line in result.lines()),
    ]
    if result.problems:
        lines = "".join(f"<li>{escape(p.where)}: {escape(p.reason)}</li>" for p in result.problems)
        body.append(
            f'<div class="problem"><h2>Problems</h2><p>Not part of the numbers below:</p><ul>{lines}</ul></div>'
        )
    if result.pairs:
        body += _section(result, result.groups_title, {"all": result.total(), **result.by_layer_type()})
        body += _section(result, result.worst_title, {name: result.pairs[name] for name in result.worst()})
    for side, names in (("A", result.only_first), ("B", result.only_second)):
        if names:
            body.append(f"<h2>Only in {side}</h2><p>{escape(', '.join(names))}</p>")
    return page(title, body)


def _section(result: Comparison, title: str, pairs: Mapping[str, Any]) -> list[str]:
    rows = [[name, *(cell(pair) for cell in result.columns.values())] for name, pair in pairs.items()]
    return [f"<h2>{escape(title)}</h2>", table(["tensors", *result.columns], rows)]
