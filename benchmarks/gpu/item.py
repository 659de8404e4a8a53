# SPDX-License-Identifier: Apache-2.0
"""One item of `benchmarks.gpu.timed`, in a process of its own.

It imports what it needs, then waits for a line with its seconds, so that it can start while another item measures.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from hf_mxfp4.recipes.common.reporting import hardware as machine

from ..records import made
from . import cases, end_to_end, host
from .bench import Bench, Case, find_device, hardware


PACKAGES = ("torch", "triton", "transformers", "trl", "peft", "hf-mxfp4", "bitsandbytes", "torchao")
#: Items that are lists of cases, and those that run themselves.
CASES: dict[str, Callable[[bool], Iterator[Case]]] = {
    "experts": cases.experts,
    "host": host.cases,
    "training": cases.training,
    "products": cases.products,
    "schemes": cases.schemes,
}
RUNS: dict[str, Callable[[Bench], None]] = {
    "generate": end_to_end.generate,
    "decode": end_to_end.decode,
    "grpo_step": end_to_end.grpo_step,
    "generate_batch": end_to_end.generate_batch,
}


def main() -> None:
    """Measure one item, for the seconds that standard input says."""
    options = argparse.ArgumentParser()
    options.add_argument("name", choices=[*CASES, *RUNS])
    options.add_argument("--out", type=Path, required=True)
    options.add_argument("--tiny", action="store_true")
    options.add_argument("--commit")
    chosen = options.parse_args()
    order = sys.stdin.read()
    if not order:
        return  # the command has ended
    device = find_device(chosen.tiny)
    told = json.loads(order)
    run(
        chosen.name,
        Bench(device, chosen.tiny, chosen.out, common(device, told["command"], chosen.commit), told["seconds"]),
    )


def common(device: torch.device, command: str, commit: str | None) -> dict[str, Any]:
    """Return what each record of a run ends with.

    Args:
        device: what is measured.
        command: what the user has called.
        commit: of the checkout; by default what git says, where it can.
    """
    return {**made(command, PACKAGES, hardware(device), commit), "host": machine()}


def run(name: str, bench: Bench) -> None:
    """Measure an item."""
    if name == "training":
        bench.measure_ceilings()
    if name in RUNS:
        RUNS[name](bench)
        return
    for case in CASES[name](bench.tiny):
        bench.run(case)


if __name__ == "__main__":
    main()
