# SPDX-License-Identifier: Apache-2.0
"""Section ``demo``: what a run of the recipe on the demo's config reports."""

import json
import os
import subprocess
import sys
from pathlib import Path

import hf_mxfp4

from .record import Record


#: Results that depend on the machine.
_MACHINE = ("time", "second", "memory", "version", "hardware", "command", "path", "dir")


def record(record: Record) -> None:
    """Record everything of this section: minutes."""
    root = Path(hf_mxfp4.__file__).parents[1]
    out = record.workplace / "demo"
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "1", "--num_machines", "1"]
    launcher += ["--mixed_precision", "no", "--dynamo_backend", "no"]
    recipe = [root / "recipes/grpo.py", "--config", root / "recipes/configs/tiny_cpu.yaml", "--output_dir", out]
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    result = subprocess.run([*launcher, *map(str, recipe)], cwd=root, env=environment, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"the demo failed:\n{result.stderr[-4000:]}")
    for line in result.stdout.splitlines():
        print(line)
    for key, value in _flat(json.loads((out / "summary.json").read_text())):
        if not any(word in key.lower() for word in _MACHINE):
            record.value(key, value)


def _flat(value: object, place: str = "") -> list[tuple[str, object]]:
    if isinstance(value, dict):
        return [found for key, one in value.items() for found in _flat(one, f"{place}/{key}" if place else str(key))]
    return [(place, value)]
