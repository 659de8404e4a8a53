# SPDX-License-Identifier: Apache-2.0
"""The table of architectures that were tried."""

from collections import Counter

from ..records import records, table


def architectures() -> str:
    found = records("architectures")
    counts = Counter(record["outcome"] for record in found)
    summary = ", ".join(f"{counts[outcome]} {outcome}" for outcome in ("right", "refused", "wrong", "not tried"))
    rows = [[f"`{r['name']}`", f"`{r['class']}`", r["kind_of_model"], r["outcome"], _cell(r["detail"])] for r in found]
    header = ["model type", "class", "kind", "result", "quantized layers of the tiny model, or the reason"]
    return f"{len(found)} architectures: {summary}.\n\n{table(header, rows)}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
