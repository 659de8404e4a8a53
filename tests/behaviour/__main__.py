# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.behaviour``: see the package."""

import argparse
import fnmatch
import importlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from . import compare
from .record import open_record


#: Section: the module that records it, and what it gets beside the record.
SECTIONS = {
    "numerics": ("numerics", ()),
    "interpreted": ("interpreted", ()),
    "models": ("models", ()),
    "training": ("training", ()),
    "files": ("files", ()),
    "commands": ("commands", ()),
    "kernels_sm90": ("kernels", (90,)),
    "kernels_sm100": ("kernels", (100,)),
    "demo": ("demo", ()),
}
#: What every section runs under.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_MXFP4_VERBOSITY": "warning",
    "WANDB_MODE": "disabled",
    "COLUMNS": "200",
    "NO_COLOR": "1",
    "CI": "1",
}


def main() -> int:
    """Run the command; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.behaviour", description="Record and compare behaviour.")
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("record", help="write a record of what the project computes")
    making.add_argument("out", type=Path)
    making.add_argument("--only", default="*", help="sections or patterns of them, with commas between")
    making.add_argument("--demo", action="store_true", help="the section 'demo' too, which takes minutes")
    comparing = commands.add_parser("compare", help="list what differs; ends with 1 where something unexplained does")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    comparing.add_argument("--intended", type=Path, help="file with a line 'GLOB: reason' per intended difference")
    one = commands.add_parser("section", help="one section, in this process; what `record` starts")
    one.add_argument("name", choices=SECTIONS)
    one.add_argument("out", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "compare":
        return _compare(arguments.before, arguments.after, arguments.intended)
    if arguments.command == "section":
        return _record_section(arguments.name, arguments.out)
    return _record(arguments.out, arguments.only, arguments.demo)


def _record(out: Path, only: str, demo: bool) -> int:
    patterns = only.split(",")
    wanted = [name for name in SECTIONS if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]
    wanted = [name for name in wanted if name != "demo" or demo or "demo" in patterns]
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
    module, arguments = SECTIONS[name]
    with open_record(out, name) as record:
        importlib.import_module(f".{module}", __package__).record(record, *arguments)
    errors = [entry for entry in record.entries if entry.endswith("/error")]
    print(f"{name}: {len(record.entries)} entries, {len(errors)} of them errors")
    for entry in errors:
        print(f"    {entry}: {record.entries[entry]['text'][:300]}")
    return 0


def _compare(before: Path, after: Path, intended: Path | None) -> int:
    try:
        found = compare.differences(before, after)
        unexplained, explained, idle = compare.split(found, compare.read_intended(intended) if intended else [])
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


if __name__ == "__main__":
    sys.exit(main())
