# SPDX-License-Identifier: Apache-2.0
"""The difference between two results on the same problems: what a control is for."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from hf_mxfp4.stats import Estimate, paired_mean_difference, paired_share_difference, pass_at_k

from .results import GREEDY


def compare(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Paired differences, first less second, of every score and measure that both results have.

    Returns:
        One dictionary per difference: ``score``, ``measure``, ``first`` and ``second`` (the values), ``difference``
        (an `Estimate` as a dictionary), and for greedy accuracies ``p_value`` (McNemar's exact test) and
        ``only_first``, ``only_second`` (problems that one of the two alone solves).

    Raises:
        ValueError: the results are of other problems, or have no score and measure in common.
    """
    keys, others = first["problems"]["keys"], second["problems"]["keys"]
    check_same_problems(keys, first["task"], second)
    # By the problem, whatever its place; equal problems are alike in both.
    orders = [sorted(range(len(of)), key=of.__getitem__) for of in (keys, others)]
    rows = []
    for score, measures in first["scores"].items():
        for measure, estimate in measures.items():
            theirs = second["scores"].get(score, {}).get(measure)
            if theirs is None:
                continue
            row = {"score": score, "measure": measure, "first": estimate["value"], "second": theirs["value"]}
            rows.append(row | _difference(first, second, orders, score, measure))
    if not rows:
        raise ValueError("the two results have no score and measure in common")
    return rows


def check_same_problems(keys: Sequence[str], task: str, other: Mapping[str, Any]) -> None:
    """Raise `ValueError` unless the problems ``keys`` of ``task`` are those of the result ``other``."""
    others = other["problems"]["keys"]
    if sorted(keys) != sorted(others):
        raise ValueError(
            f"the two results are not of the same problems ({len(keys)} of {task} and {len(others)} of "
            f"{other['task']}, {len(set(keys) & set(others))} in common): evaluate both with the same --task, --limit, "
            "--data_seed, files and prompts"
        )


def _difference(first: Mapping, second: Mapping, orders: list[list[int]], score: str, measure: str) -> dict[str, Any]:
    name = GREEDY if measure == GREEDY else "sampled"
    counts = [
        [result["problems"]["correct"][name][score][i] for i in order]
        for result, order in zip((first, second), orders, strict=True)
    ]
    samples = [result["problems"]["samples"] for result in (first, second)]
    if measure == GREEDY or samples == [1, 1]:
        a, b = ([bool(count) for count in of] for of in counts)
        difference, p_value = paired_share_difference(a, b)
        only = {
            "only_first": sum(x and not y for x, y in zip(a, b, strict=True)),
            "only_second": sum(y and not x for x, y in zip(a, b, strict=True)),
        }
        return {"difference": difference.to_dict(), "p_value": p_value, **only}
    k = int(measure.removeprefix("pass@"))
    a, b = ([pass_at_k(n, count, k) for count in of] for n, of in zip(samples, counts, strict=True))
    return {"difference": paired_mean_difference(a, b).to_dict()}


def table(rows: list[dict[str, Any]], first: Mapping[str, Any], second: Mapping[str, Any]) -> Table:
    """Differences for people."""
    shown = Table(title="first less second, on the same problems", caption=_caption(first, second))
    for heading in ("score", "first", "second", "difference", "interval", "only first / second", "p"):
        shown.add_column(heading, overflow="fold")
    for row in rows:
        of = Estimate(**row["difference"])
        only = f"{row['only_first']} / {row['only_second']}" if "only_first" in row else ""
        shown.add_row(
            f"{row['score']}, {row['measure']}",
            f"{row['first']:.3f}",
            f"{row['second']:.3f}",
            f"{of.value:+.3f}",
            Text(f"[{of.low:+.3f}, {of.high:+.3f}]"),
            only,
            f"{row['p_value']:.2g}" if "p_value" in row else "",
        )
    return shown


def _caption(first: Mapping[str, Any], second: Mapping[str, Any]) -> Text:
    lines = [f"{name}: {of['model']}, {of['computed_in']}" for name, of in (("first", first), ("second", second))]
    return Text(
        "\n".join([*lines, "interval: 95 %, Bonett-Price for shares, paired bootstrap else; p: McNemar, exact"])
    )
