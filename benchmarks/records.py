# SPDX-License-Identifier: Apache-2.0
"""Records of benchmarks: how they are written and read, and how their numbers stand in tables."""

import argparse
import datetime
import functools
import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hf_mxfp4.files import write_json
from hf_mxfp4.lab.evaluation.intervals import with_interval
from hf_mxfp4.recipes.common.reporting import hardware, markdown_table, source_commit
from hf_mxfp4.utils import installed_version


ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PLOTS = ROOT / "docs" / "plots"

DISTRIBUTIONS = ("Gaussian", "Laplace", "Student-t(4)")
DATA = (*DISTRIBUTIONS, "trained weights")

#: Tables of the documents are Markdown.
table = markdown_table


# ---- writing --------------------------------------------------------------------------------------------------------


def option_parser(description: str, name: str | None = None) -> argparse.ArgumentParser:
    """Return a command line, described by the first line of a benchmark's documentation.

    Args:
        name: of its records; then there is ``--out``, by default their file in `benchmarks/results`.
    """
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    if name is not None:
        path = str(RESULTS / f"{name}.json")
        parser.add_argument("--out", default=path, help="file of the records; - writes none")
    return parser


def made(
    command: str, packages: Iterable[str], machine: str | None = None, commit: str | None = None
) -> dict[str, Any]:
    """Return what every record ends with: hardware, versions, command, date and commit.

    Args:
        packages: those whose versions matter; one that is not installed is left out.
        machine: what was measured on; by default this machine, its GPU and its threads.
        commit: of the code that was measured; by default what git says, "unknown" where it cannot.
    """
    return {
        "hardware": machine or hardware(),
        "versions": installed(packages),
        "command": command,
        "date": datetime.date.today().isoformat(),
        "commit": commit or source_commit() or "unknown",
    }


def installed(packages: Iterable[str]) -> dict[str, str]:
    """Look up the versions of those packages that are installed."""
    return {package: version for package in packages if (version := installed_version(package)) is not None}


def median_ratio(times: Sequence[float], others: Sequence[float]) -> float:
    """Return the median over rounds of a time over another of the same round."""
    return statistics.median(time / other for time, other in zip(times, others, strict=True))


def write(found: Sequence[dict], out: str | Path, indent: int = 2) -> None:
    """Write records to the file ``out``; ``-`` writes none."""
    if str(out) != "-":
        write_json(out, found, indent=indent)


# ---- reading --------------------------------------------------------------------------------------------------------


def recorded(out: str | Path) -> list[dict]:
    """Return the records that a file has already, for benchmarks that add to it; none where there is no file."""
    path = Path(out)
    return json.loads(path.read_text()) if path.is_file() else []


@functools.cache
def records(name: str) -> list[dict]:
    """Return the records of a file in `benchmarks/results`."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def scheme_error() -> dict[tuple[str, str], dict]:
    return {(record["on"], record["name"]): record for record in records("scheme_error")}


def percent(value: float, digits: int = 3) -> str:
    return f"{100 * value:.{digits}f}"


def interval(statistics: dict, factor: float, digits: int) -> str:
    """Mean and 95 % interval over seeds; "diverged" for a mean that is not finite."""
    return with_interval(statistics, factor, digits, missing="diverged", alone="")
