# SPDX-License-Identifier: Apache-2.0
"""A record of what the project computes, and the comparison of two: the proof that moving code changed nothing.

    python -m tests.behaviour record OUT [--only NAMES]                 # from the root of the repository
    python -m tests.behaviour compare BEFORE AFTER [--intended FILE]

CONTRIBUTING.md shows how to record another version with these very scripts, which are found since ``tests`` has no
``__init__.py``.

The scripts only use names that outlive a reorganisation: those that the packages export, options, files, commands. Each
section runs in a process of its own, on one thread, seeded. An entry has a name and the digest of its bytes; tensors
are in ``SECTION.safetensors`` and texts, errors among them, in ``SECTION.json``. ``compare`` lists what differs, is
missing or new, and ends with 1 unless each difference matches a line ``GLOB: reason`` of the file of intended ones.

Sections:
    numerics          bits and values of tensors under many schemes, eager and by the CPU library
    interpreted       the same, and layers, by the Triton kernels, interpreted
    models            logits, losses and gradients of tiny models: presets, modes, backends, adapters, noise, compiled
    training          logs, completions and weights of GRPO runs, and of resumed ones
    files             what is saved, packed, exported and imported, to the byte
    commands          what the command line prints
    kernels_sm90      PTX of every kernel that the public functions of `mxfp4_kernels` launch, for sm_90
    kernels_sm100     and for sm_100
"""

import argparse
import difflib
import fnmatch
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open

from .record import open_record


#: Section: the module that records it, and what it gets beside the record.
SECTIONS: dict[str, tuple] = {name: (name,) for name in ("numerics", "interpreted", "models", "training", "files")}
SECTIONS |= {"commands": ("files", "commands"), "kernels_sm90": ("kernels", 90), "kernels_sm100": ("kernels", 100)}
#: What every section runs under.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false", "HF_MXFP4_VERBOSITY": "warning", "WANDB_MODE": "disabled",
    "COLUMNS": "200", "NO_COLOR": "1", "CI": "1",
}  # fmt: skip


def main() -> int:
    """Run the command; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.behaviour", description="Record and compare behaviour.")
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("record", help="write a record of what the project computes")
    making.add_argument("out", type=Path)
    making.add_argument("--only", default="*", help="sections or patterns of them, with commas between")
    comparing = commands.add_parser("compare", help="list what differs; ends with 1 where something unexplained does")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    comparing.add_argument("--intended", type=Path, help="file with a line 'GLOB: reason' per intended difference")
    one = commands.add_parser("section", help="one section, in this process; what `record` starts")
    one.add_argument("name", choices=SECTIONS)
    one.add_argument("out", type=Path)
    options = vars(parser.parse_args())
    return {"compare": _compare, "section": _record_section, "record": _record}[options.pop("command")](**options)


def _record(out: Path, only: str) -> int:
    patterns = only.split(",")
    wanted = [name for name in SECTIONS if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]
    if not wanted:
        print(f"--only {only}: no such section; there are {', '.join(SECTIONS)}", file=sys.stderr)
        return 2
    failed = []
    for name in wanted:
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as cache:
            # Caches that hold what kernels were compiled to, and what was measured on a GPU, are empty.
            environment = {**os.environ, **ENVIRONMENT, "TRITON_CACHE_DIR": cache, "HF_MXFP4_CACHE": cache}
            environment["TRITON_INTERPRET"] = "1" if name == "interpreted" else "0"
            command = [sys.executable, "-m", "tests.behaviour", "section", name, str(out)]
            code = subprocess.run(command, env=environment).returncode
        print(f"{name}: {'done' if code == 0 else 'FAILED'} in {time.monotonic() - started:.0f} s", flush=True)
        failed += [name] * (code != 0)
    return 1 if failed else 0


def _record_section(name: str, out: Path) -> int:
    module, *arguments = SECTIONS[name]
    with open_record(out, name) as record:
        importlib.import_module(f".{module}", __package__).record(record, *arguments)
    errors = [entry for entry in record.entries if entry.endswith("/error")]
    print(f"{name}: {len(record.entries)} entries, {len(errors)} of them errors")
    for entry in errors:
        print(f"    {entry}: {record.entries[entry]['text'][:300]}")
    return 0


def _compare(before: Path, after: Path, intended: Path | None) -> int:
    try:
        found = differences(before, after)
        unexplained, explained, idle = split(found, read_intended(intended) if intended else [])
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for difference in unexplained:
        print(f"{difference.kind}: {difference.name}: {difference.detail}")
    for difference, reason in explained:
        print(f"intended, {difference.kind}: {difference.name}: {reason}")
    for pattern in idle:
        print(f"nothing differs that matches {pattern!r}, which is listed as intended")
    print(f"{len(unexplained)} unexplained differences, {len(explained)} intended ones")
    return 1 if unexplained else 0


class Difference(NamedTuple):
    """``name``: ``section/entry``; ``kind``: ``"missing"``, ``"new"`` or ``"changed"``; ``detail``: what, in words."""

    name: str
    kind: str
    detail: str


def differences(before: Path, after: Path) -> list[Difference]:
    """All differences of two records, by name. Raises `ValueError` when a folder holds no record."""
    sections = sorted(_sections(before) | _sections(after))
    return [found for section in sections for found in _of_section(section, before, after)]


def read_intended(path: Path) -> list[tuple[str, str]]:
    """Pattern and reason of each line ``GLOB: reason``, but for empty lines and those that begin with ``#``.

    Raises `ValueError` for a line without a reason.
    """
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        pattern, _, reason = (part.strip() for part in line.partition(": "))
        if line.strip() and not line.startswith("#"):
            if not reason:
                raise ValueError(f"{path}, line {number}: expected 'GLOB: reason', got {line!r}")
            found.append((pattern, reason))
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
    files = before / f"{section}.json", after / f"{section}.json"
    if not all(file.exists() for file in files):
        return [Difference(f"{section}/*", "missing" if files[0].exists() else "new", "the whole section")]
    old, new = (json.loads(file.read_text(encoding="utf-8")) for file in files)
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
        more = f"\n    ... {len(shown) - 6} more lines" if len(shown) > 6 else ""
        return f"{len(shown)} lines of text\n    " + "\n    ".join(shown[:6]) + more
    if old["kind"] == "value":
        return f"{old['text'][:400]} became {new['text'][:400]}"
    if (old["shape"], old["dtype"]) != (new["shape"], new["dtype"]):
        return f"{_summary(old)} became {_summary(new)}"
    paths = [folder / f"{section}.safetensors" for folder in (before, after)]
    return _distance(*(safe_open(path, "pt").get_tensor(name) for path in paths))


def _distance(old: torch.Tensor, new: torch.Tensor) -> str:
    """How far apart two tensors of one shape and dtype are, in words."""
    a, b = old.double(), new.double()
    changed = int((~((a == b) | (a.isnan() & b.isnan()))).sum())
    both = a.isfinite() & b.isfinite()
    if not both.any():
        return f"{changed} of {a.numel()} elements, none of them finite"
    largest, scale = float((a - b)[both].abs().max()), float(a[both].abs().max())
    return f"{changed} of {a.numel()} elements, max abs difference {largest:.3g} (largest value {scale:.3g})"


if __name__ == "__main__":
    sys.exit(main())
