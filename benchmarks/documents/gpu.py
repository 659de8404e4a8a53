# SPDX-License-Identifier: Apache-2.0
"""Tables of what was measured on GPUs."""

import json
from pathlib import Path

from ..gpu.bench import INTERPRETER
from ..records import RESULTS, records, table


def gpu(folder: Path = RESULTS) -> str:
    """Return a table for each section of records, grouped by hardware, commit and date.

    A section is what names of records begin with. The command that a record names exists at its commit. Raises
    `ValueError` for records of interpreted or tiny runs.
    """
    places: dict[str, dict[str, list[dict]]] = {}
    for path in sorted(folder.glob("gpu_*.json")):
        for record in json.loads(path.read_text()):
            if record["tiny"] or record["hardware"] == INTERPRETER:
                raise ValueError(f"{path} is of a run that only checks that everything runs; no number to publish")
            place = f"On {record['hardware']}; commit {record['commit']}, {record['date']}:\n"
            section, _ = record["name"].split(" / ", 1)
            places.setdefault(place, {}).setdefault(section, []).append(record)
    parts = []
    for place, sections in places.items():
        parts.append(place)
        for section, of_section in sections.items():
            parts += [f"`{section}`\n", _section(of_section)]
    return "\n".join(parts)


def _section(records: list[dict]) -> str:
    """Return the table of a section, and below it what was not measured."""
    measured = [record for record in records if record["status"] == "ok"]
    peers: list[str] = []
    for record in measured:
        for name, peer in record.get("peers", {}).items():
            if "ratio" in peer and name not in peers:
                peers.append(name)
    parts = []
    if measured:
        columns = ["case", "shape", "measured", "of ceiling", *(f"faster than {peer}" for peer in peers)]
        parts.append(table(columns, [_row(record, peers) for record in measured]))
    for record in records:
        if record["status"] != "ok":
            parts.append(f"Not measured: {record['name']} {_shape(record)}: {record['reason']}\n")
    return "\n".join(parts)


def _row(record: dict, peers: list[str]) -> list[str]:
    """Return a row with a column for each of the ``peers``; another baseline stands next to the value."""
    _, case = record["name"].split(" / ", 1)
    value = f"{record['value']:.4g} {record['unit']}"
    if record["ratio"] is not None and record["baseline"] not in peers:
        value += f" ({record['ratio']:.2f}x {record['baseline']})"
    fraction = record["ceiling_fraction"]
    row = [case, _shape(record), value, "" if fraction is None else f"{100 * fraction:.0f} %"]
    ratios = {record["baseline"]: record["ratio"]}
    for name, peer in record.get("peers", {}).items():
        ratios[name] = peer.get("ratio")
    for peer in peers:
        ratio = ratios.get(peer)
        row.append("" if ratio is None else f"{ratio:.2f}x")
    return row


def _shape(record: dict) -> str:
    return "x".join(map(str, record["shape"]))


def decode_modelled() -> str:
    """Return modelled times of the products of a decoding step, a row for each model."""
    rows = []
    by_name = {record["name"]: record for record in records("decode_modelled")}
    for name, record in by_name.items():
        if not name.endswith(", BF16"):
            continue
        model = name.removesuffix(", BF16")
        cells = [model.removeprefix("decode / "), f"{record['value']:.2f} ms"]
        for arm in ("packed", "packed, joined"):
            packed = by_name[f"{model}, {arm}"]
            cells.append(f"{packed['value']:.2f} ms ({packed['ratio']:.2f}x)")
        rows.append(cells)
    return table(["Qwen2.5", "BF16", "packed", "packed, joined"], rows)


def training_modelled() -> str:
    """Return modelled times of both passes of a linear layer, and from which size they are below those of BF16."""
    rows = []
    sizes: dict[str, dict[int, int]] = {}
    for record in records("training_modelled"):
        kind, name = record["name"].split(" / ")
        if kind == "linear":
            rows.append([name, f"{record['value']:.2f} ms ({record['ratio']:.2f}x)"])
        else:
            sizes.setdefault(name, {})[record["shape"][0]] = record["value"]
    columns = ["", "8192 x 4096 x 14336"]
    tokens = sorted({count for of_name in sizes.values() for count in of_name})
    columns += [f"faster from, {count} tokens" for count in tokens]
    for row in rows:
        row += [str(sizes.get(row[0], {}).get(count, "")) for count in tokens]
    return table(columns, rows)


def host_time() -> str:
    """Return what the host does for packed layers."""
    rows = [[record["name"].removeprefix("host_time / "), *_host(record)] for record in records("host_time")]
    return table(["", "median (quartiles)", "counted"], rows)


def _host(record: dict) -> tuple[str, str]:
    """Return microseconds, with their quartiles, and the counts of a record."""
    low, _, high = record["quartiles"]
    counts = []
    for name in ("frames", "launches", "graph_inputs", "guards"):
        if name in record:
            counts.append(f"{record[name]} {name.replace('_', ' ')}")
    return f"{record['value']:.0f} us ({low:.0f} to {high:.0f})", ", ".join(counts)
