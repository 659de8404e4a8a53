# SPDX-License-Identifier: Apache-2.0
"""The table of what a model of compiled kernels says, for GPUs that were not there."""

from ..records import MODELLED, records, table


#: Heading of a column -> GPU.
COLUMNS = ("H100", "H200", "B200", "RTX 5090", "MI355X")


def modelled() -> str:
    """A row per case: part of the ceiling, and speed beside BF16 where there is some, before and now."""
    found = records(MODELLED, modelled=True)
    by_case: dict[tuple, dict[tuple, dict]] = {}
    for record in found:
        case = record["name"], tuple(record["shape"])
        by_case.setdefault(case, {})[record["gpu"], record["state"]] = record
    rows = []
    for (name, shape), of_case in by_case.items():
        cells = [_cell(of_case.get((gpu, "before")), of_case.get((gpu, "now"))) for gpu in COLUMNS]
        last = of_case.get((COLUMNS[0], "now")) or of_case.get((COLUMNS[0], "before")) or {}
        what = f"`{name.split(' / ')[0]}` {name.split(' / ')[1]}"
        rows.append(
            [what, "x".join(map(str, shape)), *cells, str(last.get("launches", "")), last.get("bottleneck", "")]
        )
    made = {record["state"]: record for record in found}
    lines = [
        f"{state}: `{r['command']}`, Triton {r['versions'].get('triton')}, {r['date']}" for state, r in made.items()
    ]
    columns = ["case", "shape", *COLUMNS, "launches", f"bound on {COLUMNS[0]}"]
    return f"{table(columns, rows)}\n{'; '.join(lines)}\n"


def _cell(before: dict | None, now: dict | None) -> str:
    shown = [_shown(record) for record in (before, now) if record is not None]
    return " → ".join(dict.fromkeys(shown))


def _shown(record: dict) -> str:
    if record["status"] != "ok":
        return "failed"
    if record["ratio"] is not None:
        return f"{record['ratio']:.2f}x"
    return f"{100 * record['ceiling_fraction']:.0f} %"
