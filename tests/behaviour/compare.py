# SPDX-License-Identifier: Apache-2.0
"""What differs between two records."""

import difflib
import fnmatch
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open


#: Lines of a changed text that are shown.
_SHOWN_LINES = 6


@dataclass(frozen=True)
class Difference:
    """``name``: ``section/entry``; ``kind``: ``"missing"``, ``"new"`` or ``"changed"``; ``detail``: what, in words."""

    name: str
    kind: str
    detail: str


def differences(before: Path, after: Path) -> list[Difference]:
    """All differences of two records, by name.

    Raises `ValueError` when a folder holds no record.
    """
    sections = sorted(_sections(before) | _sections(after))
    return [found for section in sections for found in _of_section(section, before, after)]


def read_intended(path: Path) -> list[tuple[str, str]]:
    """Pattern and reason of each line ``GLOB: reason``; empty lines and those that begin with ``#`` do not count.

    Raises `ValueError` for a line without a reason.
    """
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        pattern, colon, reason = line.partition(": ")
        if not colon or not reason.strip():
            raise ValueError(f"{path}, line {number}: expected 'GLOB: reason', got {line!r}")
        found.append((pattern.strip(), reason.strip()))
    return found


def split(
    found: Sequence[Difference], intended: Sequence[tuple[str, str]]
) -> tuple[list[Difference], list[tuple[Difference, str]], list[str]]:
    """Unexplained differences, explained ones with the reason, and patterns that explain nothing."""
    unexplained, explained, used = [], [], set()
    for difference in found:
        line = next((line for line in intended if fnmatch.fnmatchcase(difference.name, line[0])), None)
        if line is None:
            unexplained.append(difference)
        else:
            explained.append((difference, line[1]))
            used.add(line[0])
    return unexplained, explained, [pattern for pattern, _ in intended if pattern not in used]


def _sections(folder: Path) -> set[str]:
    found = {path.stem for path in folder.glob("*.json")}
    if not found:
        raise ValueError(f"{folder} holds no record; make one with `python -m tests.behaviour record {folder}`")
    return found


def _of_section(section: str, before: Path, after: Path) -> list[Difference]:
    old, new = (_entries(folder / f"{section}.json") for folder in (before, after))
    if old is None or new is None:
        return [Difference(f"{section}/*", "new" if old is None else "missing", "the whole section")]
    found = []
    for name in sorted(old.keys() | new.keys()):
        if name not in new:
            found.append(Difference(f"{section}/{name}", "missing", _summary(old[name])))
        elif name not in old:
            found.append(Difference(f"{section}/{name}", "new", _summary(new[name])))
        elif any(old[name].get(key) != new[name].get(key) for key in ("sha256", "shape", "dtype", "kind")):
            detail = _change(section, name, old[name], new[name], before, after)
            found.append(Difference(f"{section}/{name}", "changed", detail))
    return found


def _entries(path: Path) -> dict[str, dict[str, Any]] | None:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def _summary(entry: dict[str, Any]) -> str:
    if entry["kind"] == "tensor":
        return f"{entry['dtype']} {entry['shape']}"
    return f"{entry['kind']} {entry.get('text', '')[:200]!r}"


def _change(section: str, name: str, old: dict, new: dict, before: Path, after: Path) -> str:
    if old["kind"] != new["kind"] or old["kind"] == "file":
        return f"{_summary(old)} became {_summary(new)}; {old.get('bytes')} and {new.get('bytes')} bytes"
    if old["kind"] == "text":
        lines = difflib.unified_diff(old["text"].splitlines(), new["text"].splitlines(), lineterm="", n=0)
        shown = [line[:200] for line in lines if not line.startswith(("---", "+++", "@@"))]
        more = f"\n    ... {len(shown) - _SHOWN_LINES} more lines" if len(shown) > _SHOWN_LINES else ""
        return f"{len(shown)} lines of text\n    " + "\n    ".join(shown[:_SHOWN_LINES]) + more
    if old["kind"] == "value":
        return f"{old['text'][:400]} became {new['text'][:400]}"
    if (old["shape"], old["dtype"]) != (new["shape"], new["dtype"]):
        return f"{_summary(old)} became {_summary(new)}"
    return _distance(*(_load(folder / f"{section}.safetensors", name) for folder in (before, after)))


def _load(path: Path, name: str) -> torch.Tensor:
    with safe_open(path, "pt") as file:
        return file.get_tensor(name)


def _distance(old: torch.Tensor, new: torch.Tensor) -> str:
    """How far apart two tensors of one shape and dtype are, in words."""
    a, b = old.double(), new.double()
    changed = int((~((a == b) | (a.isnan() & b.isnan()))).sum())
    both = a.isfinite() & b.isfinite()
    if not both.any():
        return f"{changed} of {a.numel()} elements, none of them finite"
    largest, scale = float((a - b)[both].abs().max()), float(a[both].abs().max())
    return f"{changed} of {a.numel()} elements, max abs difference {largest:.3g} (largest value {scale:.3g})"
