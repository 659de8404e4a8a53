# SPDX-License-Identifier: Apache-2.0
"""What records of runs share: the machine, versions of packages, and numbers and tables as text."""

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from hf_mxfp4.utils import cpu_name, installed_version


def hardware(threads: int | None = None) -> str:
    """Describe this machine: GPU, processor, cores, and the threads that torch uses (or ``threads``)."""
    gpu = f"{torch.cuda.get_device_name()}, " if torch.cuda.is_available() else ""
    return f"{gpu}{cpu_name()}, {os.cpu_count()} logical cores, {threads or torch.get_num_threads()} threads"


def versions(packages: Iterable[str]) -> dict[str, str | None]:
    """Look up the installed version of each package; None for one that is not installed."""
    return {package: installed_version(package) for package in packages}


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a table in Markdown, a line for each row."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def with_interval(
    statistics: Mapping[str, Any],
    factor: float,
    digits: int,
    *,
    unit: str = "",
    missing: str = "not finite",
    alone: str = " (one seed)",
) -> str:
    """Format ``factor`` times a mean and its interval, such as ``"+1.25 % [+0.80, +1.70]"``.

    Args:
        statistics: ``mean`` and ``interval`` (low and high).
        digits: after the point.
        unit: written after the mean.
        missing: what stands for a mean that is None.
        alone: what follows a mean without an interval.
    """
    if statistics["mean"] is None:
        return missing
    text = f"{factor * statistics['mean']:+.{digits}f}{unit}"
    if statistics["interval"] is None:
        return f"{text}{alone}"
    low, high = (factor * bound for bound in statistics["interval"])
    return f"{text} [{low:+.{digits}f}, {high:+.{digits}f}]"
