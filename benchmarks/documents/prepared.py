# SPDX-License-Identifier: Apache-2.0
"""Tables of prepared checkpoints: smoothed, rounded, distilled, exported."""

import math
from statistics import fmean, stdev

from hf_mxfp4.lab.evaluation.intervals import ratio_of_sums

from ..records import records, table
from .evidence import Record, short_text


#: Calibrations that need no data, as records name them.
WITHOUT_DATA = ("own samples", "random ids")
#: Held-out texts of distillation, by the name in records.
DISTILLED_ON = {"test": "GSM8K test", "python_topics": "Python topics"}


def preparation() -> str:
    """Return a row for each step, model, scheme and text: what it loses by calibration, and by how much that is more
    than with texts, paired by text."""
    places: dict[tuple[str, str, str, str], dict[tuple[str, str], list[Record]]] = {}
    for record in records("preparation"):
        place = (record["step"], record["model"], record["name"], record["text"])
        calibration = record["calibration"]
        size = f"{calibration['rows']} x {calibration['length']}"
        places.setdefault(place, {}).setdefault((calibration["kind"], size), []).append(record)
    rows = []
    for (step, model, scheme, text), by_calibration in places.items():
        without = on_text = None
        for (kind, _), of_calibration in by_calibration.items():
            if kind == "none":
                without = of_calibration
            elif kind == "GSM8K":
                on_text = of_calibration
        sizes = dict.fromkeys(size for kind, size in by_calibration if kind in WITHOUT_DATA)
        for size in sizes:
            groups = [without, on_text, *(by_calibration.get((kind, size)) for kind in WITHOUT_DATA)]
            cells = [_compared(group, on_text) for group in groups]
            rows.append([f"{step}, {size}", model, f"`{scheme}`", short_text(text), *cells])
    columns = ["step, rows x tokens", "model", "scheme", "text", "without", "GSM8K", *WITHOUT_DATA]
    return table(columns, rows)


def _compared(group: list[Record] | None, on_text: list[Record] | None) -> str:
    """Return the mean KL over the seeds of a calibration, with its difference from calibration on texts.

    The standard error of the difference is that of texts and seeds. Calibration on texts has its own standard error.
    """
    if not group:
        return ""
    mean = fmean(record["value"] for record in group)
    if group is on_text or not on_text:
        return f"{mean:.3f} ± {group[0]['standard_error']:.3f}"
    by_text = zip(*(record["kl_by_text"] for record in group), strict=True)
    expected = on_text[0]["kl_by_text"]
    differences = [fmean(kls) - kl for kls, kl in zip(by_text, expected, strict=True)]
    difference, error = ratio_of_sums(differences, on_text[0]["tokens_by_text"])
    seeds = ""
    if len(group) > 1:
        error = math.hypot(error, stdev(record["value"] for record in group) / len(group) ** 0.5)
        seeds = f", {len(group)} seeds"
    return f"{mean:.3f} ({difference:+.3f} ± {error:.3f}{seeds})"


def distillation() -> str:
    """Return a row for each run, with its divergence on each held-out text before and after."""
    runs: dict[str, dict[str, Record]] = {}
    for record in records("distillation"):
        runs.setdefault(record["command"], {})[record["name"]] = record
    columns = ["scheme", "bits", "start", "rate", "steps"]
    for name, shown in DISTILLED_ON.items():
        baseline = next(iter(runs.values()))[name]["baseline"]
        columns += [f"KL, {shown}", f"perplexity ({baseline:.2f})"]
    rows = []
    for by_text in runs.values():
        run = by_text["test"]
        scheme, _, details = run["scheme"].partition(" ")
        if "rotation" in details:
            scheme += ", H64"
        row = [scheme, f"{run['bits']:.2f}", run["start"], f"{run['learning_rate']:.0e}", f"{run['steps']}"]
        for name in DISTILLED_ON:
            record = by_text[name]
            row.append(f"{record['kl_before']:.3f} → {record['kl']:.3f}")
            row.append(f"{record['perplexity_before']:.2f} → {record['value']:.2f}")
        rows.append(row)
    return table(columns, rows)
