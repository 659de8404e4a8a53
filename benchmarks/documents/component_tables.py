# SPDX-License-Identifier: Apache-2.0
"""Components of the errors of weights and activations beside the damage that schemes do to a real model."""

from collections.abc import Sequence
from statistics import correlation

from ..records import records, table


#: Component -> its name in tables.
PARTS = {"scale_bias": "scale bias", "deadzone": "deadzone", "grid": "grid", "total": "all"}
SIDES = ("weights", "activations")


def _with_damage() -> list[tuple[dict, dict]]:
    """Components of a scheme, and what it does to the checkpoint as it is, on the same text; the least damage first."""
    components = {(r["model"], r["text"], r["name"]): r for r in records("evidence_components")}
    found = [
        (components[key], r)
        for r in records("evidence")
        if r["variant"] == "as it is" and (key := (r["model"], r["text"], r["name"])) in components
    ]
    return sorted(found, key=lambda pair: pair[1]["kl"])


def ranks(values: Sequence[float]) -> list[float]:
    """From 1, equal values sharing the mean of theirs."""
    ordered = sorted(values)
    return [ordered.index(value) + (ordered.count(value) + 1) / 2 for value in values]


def evidence_components() -> str:
    """Every scheme of both operands: its components in percent of the tensor's energy, and KL."""
    found = _with_damage()
    rows = [
        [f"`{r['name']}`", f"{r['kl']:.3f}"]
        + [f"{100 * components[side][part]:.2f}" for side in SIDES for part in PARTS]
        for components, r in found
    ]
    columns = ["scheme", "KL", *(f"{side}: {name}" for side in SIDES for name in PARTS.values())]
    one = found[0][0]
    note = f"{one['model']}, {one['text']}, inputs of {one['shape'][1]:,} tokens; `{one['command']}`"
    return f"{table(columns, rows)}\n{note}\n"


def evidence_predictors() -> str:
    """How well each component orders schemes by KL: Spearman's rank correlation."""
    found = _with_damage()
    kl = ranks([r["kl"] for _, r in found])
    rows = []
    for part, name in PARTS.items():
        sides = {side: [components[side][part] for components, _ in found] for side in SIDES}
        both = [sum(pair) for pair in zip(*sides.values(), strict=True)]
        rows.append([name, *(f"{correlation(ranks(values), kl):.2f}" for values in (*sides.values(), both))])
    return f"{table(['component', *SIDES, 'sum of both'], rows)}\n{len(found)} schemes\n"
