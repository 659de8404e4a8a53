# SPDX-License-Identifier: Apache-2.0
"""Tables of what was measured on GPUs."""

import json
from pathlib import Path

from ..gpu.bench import INTERPRETER
from ..records import MODELLED, RESULTS, of_kind, table


def gpu(folder: Path = RESULTS) -> str:
    """Return a table per section of `benchmarks.gpu`, by where it was measured. Raises `ValueError` for records of
    interpreted or tiny runs, and for those that were not measured at all."""
    places: dict[str, dict[str, list[dict]]] = {}
    for path in sorted(folder.glob("gpu_*.json")):
        if path.stem == MODELLED:
            continue
        found = of_kind(json.loads(path.read_text()), path)
        if any(record["tiny"] or record["hardware"] == INTERPRETER for record in found):
            raise ValueError(f"{path} is of a run that only checks that everything runs; no number to publish")
        for r in found:
            place = f"On {r['hardware']}; `{r['command']}`, {r['date']}:\n"
            places.setdefault(place, {}).setdefault(f"`{path.stem.removeprefix('gpu_')}`\n", []).append(r)
    texts = []
    for place, sections in places.items():
        texts += [place, *(part for name, found in sections.items() for part in (name, _section(found)))]
    return "\n".join(texts)


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
