# SPDX-License-Identifier: Apache-2.0
"""Single numbers in the sentences of documents, from the records."""

from collections.abc import Callable
from statistics import median

from hf_mxfp4.lab.evaluation.intervals import with_interval
from hf_mxfp4.recipes.ablations.results import statistics

from ..records import records
from .runs import reported_runs, runs_at_the_best_rate


#: Cells whose runs the first paragraph of the README counts.
_DECIDING = ("bf16", "w4a8_smoothed")


def _minus_bf16(cell: str, key: str = "difference") -> str:
    """Return accuracy points of a cell minus BF16 with the 95 % interval; of the earlier grid where the declared one
    has no two runs of it yet."""
    for runs, where in ((reported_runs(), ""), (runs_at_the_best_rate(), ", by an earlier protocol")):
        for row in statistics(runs):
            if row["cell"] == cell and row[key] is not None and row[key]["interval"] is not None:
                return with_interval(row[key], 100, 1) + where
    return "(not run yet)"


def _number_of_runs() -> str:
    """Return how many runs each of the deciding cells has, as one number or a range."""
    counts = {len(row["seeds"]) for row in statistics(reported_runs()) if row["cell"] in _DECIDING} or {0}
    return " to ".join(str(count) for count in sorted({min(counts), max(counts)}))


def _ratio(file: str, name: str) -> str:
    """Return the speed over BF16 of a record."""
    [ratio] = [record["ratio"] for record in records(file) if record["name"] == name]
    return f"{ratio:.2f}"


def _decoding() -> str:
    """Return the lowest and the highest speed over BF16 of products of few rows."""
    ratios = [record["ratio"] for record in records("gpu_decode")]
    return f"{min(ratios):.1f} to {max(ratios):.1f}"


def _seconds_of_runs(*cells: str) -> str:
    """Return the median time of RL runs on an H100 by cell."""
    medians = []
    for cell in cells:
        taken = [record["seconds"] for record in runs_at_the_best_rate() if record["cell"] == cell]
        medians.append(f"{median(taken):.0f} s")
    return " and ".join(medians)


#: By the names of markers.
VALUES: dict[str, Callable[[], str]] = {
    "runs": _number_of_runs,
    "smoothed_end": lambda: _minus_bf16("w4a8_smoothed"),
    "smoothed_curve": lambda: _minus_bf16("w4a8_smoothed", "curve_difference"),
    "distilled_end": lambda: _minus_bf16("w4a8_distilled"),
    "distilled_curve": lambda: _minus_bf16("w4a8_distilled", "curve_difference"),
    "gpu_forward": lambda: _ratio("gpu_forward", "forward / w4a8"),
    "gpu_training": lambda: _ratio("gpu_linear", "linear / w4a8"),
    "gpu_decoding": _decoding,
    "gpu_generate": lambda: _ratio("gpu_generate", "generate / packed w4a16"),
    "gpu_generate_static": lambda: _ratio("gpu_generate", "generate / packed w4a16, static cache"),
    "rl_seconds": lambda: _seconds_of_runs("bf16", "w4a8"),
}
