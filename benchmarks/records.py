# SPDX-License-Identifier: Apache-2.0
"""Records of benchmarks, and how their numbers are written in tables."""

import json
from pathlib import Path


ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PLOTS = ROOT / "docs" / "plots"

DISTRIBUTIONS = ("Gaussian", "Laplace", "Student-t(4)")
DATA = (*DISTRIBUTIONS, "trained weights")


def records(name: str) -> list[dict]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def scheme_error() -> dict[tuple[str, str], dict]:
    return {(record["on"], record["name"]): record for record in records("scheme_error")}


def table(columns: list[str], rows: list[list[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def percent(value: float, digits: int = 3) -> str:
    return f"{100 * value:.{digits}f}"


def interval(statistics: dict, factor: float, digits: int) -> str:
    """Mean and 95 % interval."""
    if statistics["mean"] is None:
        return "diverged"
    text = f"{factor * statistics['mean']:+.{digits}f}"
    if statistics["interval"] is None:
        return text
    low, high = (factor * bound for bound in statistics["interval"])
    return f"{text} [{low:+.{digits}f}, {high:+.{digits}f}]"
