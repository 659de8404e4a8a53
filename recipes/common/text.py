# SPDX-License-Identifier: Apache-2.0
"""Numbers and tables as text, for terminals and documents."""

from collections.abc import Mapping, Sequence
from typing import Any


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown, a line for each row."""
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
    """``factor`` times a mean and its interval, such as ``"+1.25 % [+0.80, +1.70]"``.

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
