# SPDX-License-Identifier: Apache-2.0
"""What an evaluation found: estimates with intervals, per problem and in total, and differences between two results."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from hf_mxfp4.lab.evaluation.intervals import (
    Estimate,
    mcnemar,
    mean_pass_at_k,
    paired_mean_difference,
    paired_share_difference,
    pass_at_k,
    wilson,
)
from hf_mxfp4.recipes.common.reporting import layers_text, print_table

from .arguments import EvaluationArguments
from .generate import Completion


GREEDY = "greedy"
#: Its name in the folder of an evaluation.
RESULT_FILE = "result.json"


def problem_keys(prompts: Sequence[Any], answers: Sequence[str]) -> list[str]:
    """Name each problem by its prompt and answer alone."""
    return [digest([prompt, answer]) for prompt, answer in zip(prompts, answers, strict=True)]


def digest(value: Any) -> str:
    """Return 12 digits of the SHA-256 of a value as JSON."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:12]


def summarize(
    completions: Iterable[Completion], keys: Sequence[str], scores: Sequence[str], options: EvaluationArguments
) -> dict[str, Any]:
    """Estimate accuracies from whole passes over the problems ``keys``.

    Returns:
        ``n``: problems; ``scores``: by score and measure (``greedy``, ``pass@k``) an `Estimate` as a dictionary;
        ``lengths``: by pass (``greedy``, ``sampled``) the completions, how many of them ran into the limit, and their
        mean length in tokens; ``problems``: what a paired comparison needs.
    """
    by_key = {completion.key: completion for completion in completions}
    passes = {GREEDY: [None]}
    if options.samples:
        passes["sampled"] = list(range(options.samples))
    lengths: dict[str, Any] = {}
    correct: dict[str, dict[str, list[int]]] = {}
    for name, samples in passes.items():
        written = [by_key[sample, problem] for problem in range(len(keys)) for sample in samples]
        lengths[name] = {
            "completions": len(written),
            "truncated": sum(completion.truncated for completion in written),
            "mean_tokens": fmean(completion.n_tokens for completion in written),
        }
        # How many samples of each problem are right.
        correct[name] = {score: [0] * len(keys) for score in scores}
        for completion in written:
            for score in scores:
                correct[name][score][completion.problem] += completion.correct[score]
    estimates: dict[str, dict[str, Any]] = {score: {} for score in scores}
    for score, measures in estimates.items():
        measures[GREEDY] = wilson(sum(correct[GREEDY][score]), len(keys)).to_dict()
        for k in options.ks:
            estimate = mean_pass_at_k(correct["sampled"][score], options.samples, k, options.seed)
            measures[f"pass@{k}"] = estimate.to_dict()
    problems = {"keys": list(keys), "samples": options.samples, "correct": correct}
    return {"n": len(keys), "scores": estimates, "lengths": lengths, "problems": problems}


def read_result(path: str | Path) -> dict[str, Any]:
    """Read a `result.json`. Raises `FileNotFoundError`, or `ValueError` for what is not a result of an evaluation."""
    try:
        result = json.loads(Path(path).read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    expected = ("task", "model", "computed_in", "scores", "problems")
    missing = [key for key in expected if not isinstance(result, dict) or key not in result]
    if missing:
        raise ValueError(f"{path} is no result of evaluate.py: it has no {', '.join(missing)}")
    return result


def show(result: Mapping[str, Any]) -> None:
    """Print the closing table of an evaluation."""
    model = result["model"]
    if result["adapter_on"]:
        model += f" on {result['adapter_on']}"
    rows = {"model": model, "computed in": result["computed_in"], "quantized layers": layers_text(result)}
    for score, measures in result["scores"].items():
        for measure, estimate in measures.items():
            basis = f"{estimate['confidence']:.0%} {estimate['method']}, n = {estimate['n']}"
            if measure != GREEDY:
                basis += f", {result['problems']['samples']} samples each"
            rows[f"{score}, {measure}"] = f"{Estimate(**estimate)}  ({basis})"
    for name, lengths in result["lengths"].items():
        share = lengths["truncated"] / lengths["completions"]
        cut = f"{lengths['truncated']} cut off ({share:.1%})"
        rows[name] = f"{lengths['completions']} completions of {lengths['mean_tokens']:.1f} tokens on average, {cut}"
    rows["time"] = f"{result['seconds']:.0f} s for {result['generated']} completions"
    print_table(f"{result['task']} · {result['n']} problems", rows.items())


# ---- two results on the same problems -------------------------------------------------------------------------------


def check_same_problems(keys: Sequence[str], task: str, other: Mapping[str, Any]) -> None:
    """Raise `ValueError` unless the problems ``keys`` of ``task`` are those of the result ``other``."""
    others = other["problems"]["keys"]
    if sorted(keys) != sorted(others):
        raise ValueError(
            f"the two results are not of the same problems ({len(keys)} of {task} and {len(others)} of "
            f"{other['task']}, {len(set(keys) & set(others))} in common): evaluate both with the same --task, "
            "--dataset, --evaluate_n and prompts"
        )


def compare(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Compute paired differences, first less second, of every score and measure that both results have.

    Each has ``score``, ``measure``, ``first`` and ``second`` (the values), ``difference`` (an `Estimate` as a
    dictionary), and for greedy accuracies ``p_value`` (McNemar's exact test) and ``only_first``, ``only_second``
    (problems that one of the two alone solves). Raises `ValueError` for results of other problems, or without a score
    and measure in common.
    """
    check_same_problems(first["problems"]["keys"], first["task"], second)
    rows = []
    for score, measures in first["scores"].items():
        for measure, estimate in measures.items():
            other = second["scores"].get(score, {}).get(measure)
            if other is None:
                continue
            row = {"score": score, "measure": measure, "first": estimate["value"], "second": other["value"]}
            rows.append(row | _difference(first, second, score, measure))
    if not rows:
        raise ValueError("the two results have no score and measure in common")
    return rows


def _difference(first: Mapping, second: Mapping, score: str, measure: str) -> dict[str, Any]:
    """Return the paired difference of one score and measure."""
    correct_in_first = _correct_by_problem(first, score, measure)
    correct_in_second = _correct_by_problem(second, score, measure)
    n_first = first["problems"]["samples"]
    n_second = second["problems"]["samples"]
    if measure == GREEDY or n_first == n_second == 1:
        difference, only_first, only_second = paired_share_difference(
            [bool(count) for count in correct_in_first], [bool(count) for count in correct_in_second]
        )
        p_value = mcnemar(only_first, only_second)
        return {
            "difference": difference.to_dict(),
            "p_value": p_value,
            "only_first": only_first,
            "only_second": only_second,
        }
    k = int(measure.removeprefix("pass@"))
    difference = paired_mean_difference(
        [pass_at_k(n_first, count, k) for count in correct_in_first],
        [pass_at_k(n_second, count, k) for count in correct_in_second],
    )
    return {"difference": difference.to_dict()}


def _correct_by_problem(result: Mapping[str, Any], score: str, measure: str) -> list[int]:
    """Return how many completions of each problem are right, in the order of the problems' keys.

    So results are paired by the problem, whatever its place; equal problems are alike in both.
    """
    problems = result["problems"]
    counts = problems["correct"][GREEDY if measure == GREEDY else "sampled"][score]
    order = sorted(range(len(counts)), key=problems["keys"].__getitem__)
    return [counts[place] for place in order]


def show_differences(rows: list[dict[str, Any]], first: Mapping[str, Any], second: Mapping[str, Any]) -> None:
    """Print a table of differences."""
    caption = [
        f"first: {first['model']}, {first['computed_in']}",
        f"second: {second['model']}, {second['computed_in']}",
        "interval: 95 %, Bonett-Price for shares, paired bootstrap else; p: McNemar, exact",
    ]
    headings = ("score", "first", "second", "difference", "interval", "only first / second", "p")
    lines = []
    for row in rows:
        difference = Estimate(**row["difference"])
        only = ""
        p_value = ""
        if "p_value" in row:
            only = f"{row['only_first']} / {row['only_second']}"
            p_value = f"{row['p_value']:.2g}"
        lines.append(
            [
                f"{row['score']}, {row['measure']}",
                f"{row['first']:.3f}",
                f"{row['second']:.3f}",
                f"{difference.value:+.3f}",
                f"[{difference.low:+.3f}, {difference.high:+.3f}]",
                only,
                p_value,
            ]
        )
    print_table("first less second, on the same problems", lines, headings, "\n".join(caption))
