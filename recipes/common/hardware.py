# SPDX-License-Identifier: Apache-2.0
"""What something ran on: the machine, and the versions of packages."""

import importlib.metadata
import os
import platform
from collections.abc import Iterable
from pathlib import Path

import torch


def hardware(threads: int | None = None) -> str:
    """Describe this machine: GPU, processor, cores, and the threads that torch uses (or `threads`, where that was
    another process)."""
    model = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    gpu = f"{torch.cuda.get_device_name()}, " if torch.cuda.is_available() else ""
    return f"{gpu}{model}, {os.cpu_count()} logical cores, {threads or torch.get_num_threads()} threads"


def versions(packages: Iterable[str]) -> dict[str, str | None]:
    """Look up the installed version of each package; None for one that is not installed."""
    found: dict[str, str | None] = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found
