# SPDX-License-Identifier: Apache-2.0
"""The table that a run ends with, in plain text of 120 columns."""

from .bench import Bench
from .beside import beside


WIDTH = 120


def report(bench: Bench, seconds: float) -> str:
    """All records, a section after the other; what was skipped or failed, with its reason, below."""
    lines = ["", f"{bench.machine.hardware}; {seconds:.0f} s"]
    if bench.machine.tiny:
        lines.append("tiny shapes: everything below says that it runs, nothing says how fast")
    found = [record for records in bench.records.values() for record in records]
    for section, records in bench.records.items():
        measured = [record for record in records if record["status"] == "ok"]
        if measured:
            lines += ["", section]
            lines += [line for record in measured for line in row(record)]
    for status in ("skipped", "failed"):
        others = [record for record in found if record["status"] == status]
        if others:
            lines += ["", status]
            lines += [_cut(f"  {r['name']} {_shape(r['shape'])}: {r['reason']}") for r in others]
    peers = _absent(found)
    if peers:
        lines += ["", "peers that did not take part"]
        lines += [_cut(f"  {name}: {reason}") for name, reason in peers.items()]
    counts = {status: sum(r["status"] == status for r in found) for status in ("ok", "skipped", "failed")}
    aims = [aim for record in found for aim in record.get("aims", ()) if aim["reached"] is not None]
    met = sum(aim["reached"] >= aim["least"] for aim in aims)
    lines += ["", f"{counts['ok']} measured, {counts['skipped']} skipped, {counts['failed']} failed; "
              f"{met} of {len(aims)} aims reached"]  # fmt: skip
    return "\n".join(lines)


def row(record: dict) -> list[str]:
    """A record in one or two lines: value, part of the ceiling, how many times faster than each peer, aims, and what
    the model says."""
    what = f"{record['name'].split(' / ', 1)[1]} {_shape(record['shape'])}"
    value = f"{record['value']:.4g} {record['unit']}"
    fraction = record["ceiling_fraction"]
    ceiling = "" if fraction is None else f"{100 * fraction:.0f} % of ceiling"
    peers = record.get("peers", {})
    ratios = [f"{name} {peer['ratio']:.2f}x" for name, peer in peers.items() if peer["status"] == "ok"]
    aims = [aim["text"] for aim in record.get("aims", ())]
    remarks = [*record.get("remarks", ()), *filter(None, [beside(record)])]
    if record.get("no_graph"):
        remarks.append(f"no CUDA graph ({record['no_graph']:.40})")
    return _wrap(f"  {what:<46} {value:>16}  {ceiling:<16}", [*ratios, *aims, *remarks])


def _wrap(first: str, parts: list[str]) -> list[str]:
    lines = [first]
    for part in parts:
        if len(lines[-1]) + len(part) + 2 > WIDTH:
            lines.append(" " * 6)
        lines[-1] += f"  {part}"
    return [_cut(line) for line in lines]


def _cut(line: str) -> str:
    return line if len(line) <= WIDTH else f"{line[: WIDTH - 3]}..."


def _shape(shape: object) -> str:
    return "x".join(map(str, shape)) if isinstance(shape, list) else str(shape)


def _absent(records: list[dict]) -> dict[str, str]:
    """First reason of each peer that was never measured, and of each failure of one."""
    reasons: dict[str, str] = {}
    measured = {name for r in records for name, peer in r.get("peers", {}).items() if peer["status"] == "ok"}
    for record in records:
        for name, peer in record.get("peers", {}).items():
            if peer["status"] == "failed":
                reasons.setdefault(f"{name} (failed in {record['name']})", peer["reason"])
            elif peer["status"] == "absent" and name not in measured:
                reasons.setdefault(name, peer["reason"])
    return reasons
