# SPDX-License-Identifier: Apache-2.0
"""The tables of GPU numbers, from records of real GPUs alone; what a model says has a table of its own."""

import json
from collections.abc import Iterable
from pathlib import Path

from matplotlib.figure import Figure

from ..gpu.beside import beside
from ..gpu.machine import INTERPRETER
from ..records import MODELLED, RESULTS, of_kind, table


COMMAND = "python -m benchmarks.gpu --out benchmarks/results"
NONE_YET = (
    "No GPU number has been measured yet. On a machine with a GPU, this measures them and puts them here:\n\n"
    f"```bash\n{COMMAND}\npython -m benchmarks.write_docs\n```\n"
)


def gpu(folder: Path = RESULTS) -> str:
    """A table per section of `benchmarks.gpu`, in words where there is none.

    Raises `ValueError` for records of interpreted or tiny runs, whose times say nothing about a GPU, and for those that
    were not measured at all.
    """
    parts = []
    for path in _measured(folder):
        found = of_kind(json.loads(path.read_text()), path)
        for record in found:
            if record["tiny"] or record["hardware"] == INTERPRETER:
                raise ValueError(f"{path} is of a run that only checks that everything runs; no number to publish")
        parts.append(_section(path.stem.removeprefix("gpu_"), found))
    return "\n".join(parts) if parts else NONE_YET


def figures(folder: Path = RESULTS) -> dict[str, Figure]:
    """By file name, a plot per section that measured something beside peers: how many times faster than each."""
    made = {}
    for path in _measured(folder):
        found = _beside_peers(of_kind(json.loads(path.read_text()), path))
        if found:
            made[path.stem] = _figure(found)
    return made


def _measured(folder: Path) -> list[Path]:
    """Files of records of `benchmarks.gpu`."""
    return [path for path in sorted(folder.glob("gpu_*.json")) if path.stem != MODELLED]


def _beside_peers(found: list[dict]) -> list[dict]:
    return [r for r in found if any("ratio" in peer for peer in r.get("peers", {}).values())]


def _figure(found: list[dict]) -> Figure:
    names = list(dict.fromkeys(name for r in found for name, peer in r["peers"].items() if "ratio" in peer))
    figure = Figure(figsize=(8.5, 1.2 + 0.3 * len(found)), layout="constrained")
    axes = figure.subplots()
    for name in names:
        points = [(r["peers"][name]["ratio"], i) for i, r in enumerate(found) if "ratio" in r["peers"].get(name, {})]
        axes.plot(*zip(*points, strict=True), "o", label=name)
    axes.axvline(1, color="0.5", linewidth=1)
    axes.set_yticks(range(len(found)), [f"{r['name'].split(' / ', 1)[1]}, {_shape(r)}" for r in found])
    axes.invert_yaxis()
    axes.set(xscale="log", xlabel="times faster than")
    axes.grid(axis="x", alpha=0.3, which="both")
    axes.legend(fontsize=8)
    return figure


def _section(name: str, found: list[dict]) -> str:
    measured = [record for record in found if record["status"] == "ok"]
    names = list(dict.fromkeys(peer for r in measured for peer, p in r.get("peers", {}).items() if p["status"] == "ok"))
    rows = [_row(record, names) for record in measured]
    columns = [
        "case",
        "shape",
        "measured",
        "of ceiling",
        *(f"faster than {peer}" for peer in names),
        "aims",
        "modelled",
    ]
    lines = [f"`{name}` on {found[0]['hardware']}; `{found[0]['command']}`, {found[0]['date']}\n"]
    if rows:
        lines.append(table(columns, rows))
    if _beside_peers(found):
        lines.append(f"![{name}](plots/gpu_{name}.svg)\n")
    lines += [f"Not measured: {r['name'].split(' / ', 1)[1]} {_shape(r)}: {r['reason']}\n" for r in _others(found)]
    return "\n".join(lines)


def _row(record: dict, names: Iterable[str]) -> list[str]:
    fraction = record["ceiling_fraction"]
    cells = [record["name"].split(" / ", 1)[1], _shape(record), f"{record['value']:.4g} {record['unit']}"]
    cells.append("" if fraction is None else f"{100 * fraction:.0f} %")
    for name in names:
        ratio = record.get("peers", {}).get(name, {}).get("ratio")
        cells.append("" if ratio is None else f"{ratio:.2f}x")
    return [*cells, "; ".join(aim["text"] for aim in record.get("aims", ())), beside(record).removeprefix("modelled ")]


def _others(found: list[dict]) -> list[dict]:
    return [record for record in found if record["status"] != "ok"]


def _shape(record: dict) -> str:
    shape = record["shape"]
    return "x".join(map(str, shape)) if isinstance(shape, list) else str(shape)
