# SPDX-License-Identifier: Apache-2.0
"""Tables of what was measured on GPUs."""

import json
from pathlib import Path

from ..gpu.bench import INTERPRETER
from ..records import MODELLED, RESULTS, of_kind, table


def gpu(folder: Path = RESULTS) -> str:
    """Return a table per section of `benchmarks.gpu`; where it was measured, unless it was where the section above was.
    Raises `ValueError` for records of interpreted or tiny runs, and for those that were not measured at all."""
    parts, place = [], ""
    for path in sorted(folder.glob("gpu_*.json")):
        if path.stem == MODELLED:
            continue
        found = of_kind(json.loads(path.read_text()), path)
        if any(record["tiny"] or record["hardware"] == INTERPRETER for record in found):
            raise ValueError(f"{path} is of a run that only checks that everything runs; no number to publish")
        above, place = place, f" on {found[0]['hardware']}; `{found[0]['command']}`, {found[0]['date']}"
        parts.append(f"`{path.stem.removeprefix('gpu_')}`{'' if place == above else place}\n\n{_section(found)}")
    return "\n".join(parts)


def _section(found: list[dict]) -> str:
    measured = [record for record in found if record["status"] == "ok"]
    peers = list(dict.fromkeys(name for r in measured for name, peer in r.get("peers", {}).items() if "ratio" in peer))
    rows = []
    for r in measured:
        fraction = r["ceiling_fraction"]
        ratios = {r["baseline"]: r["ratio"]} | {name: p.get("ratio") for name, p in r.get("peers", {}).items()}
        rows.append([r["name"].split(" / ", 1)[1], _shape(r), f"{r['value']:.4g} {r['unit']}"])
        rows[-1].append("" if fraction is None else f"{100 * fraction:.0f} %")
        rows[-1] += ["" if ratios.get(peer) is None else f"{ratios[peer]:.2f}x" for peer in peers]
        if r["ratio"] is not None and r["baseline"] not in peers:
            rows[-1][2] += f" ({r['ratio']:.2f}x {r['baseline']})"
    columns = ["case", "shape", "measured", "of ceiling", *(f"faster than {peer}" for peer in peers)]
    missing = [f"Not measured: {r['name']} {_shape(r)}: {r['reason']}\n" for r in found if r["status"] != "ok"]
    return "\n".join([*([table(columns, rows)] if rows else []), *missing])


def _shape(record: dict) -> str:
    return "x".join(map(str, record["shape"]))
