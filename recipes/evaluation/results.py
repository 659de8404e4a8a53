# SPDX-License-Identifier: Apache-2.0
"""What an evaluation found: estimates with intervals, per problem and in total, as JSON and as a table."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from hf_mxfp4.files import write_json
from hf_mxfp4.stats import Estimate, mean_pass_at_k, wilson

from .records import ScoredCompletion


#: Those that decide what is measured.
PACKAGES = ("hf-mxfp4", "torch", "transformers", "peft", "accelerate", "evaluate", "math-verify")
GREEDY = "greedy"
#: Its name in the folder of an evaluation.
RESULT_FILE = "result.json"


def problem_keys(prompts: Sequence[Any], answers: Sequence[str]) -> list[str]:
    """A name for each problem that depends on its prompt and answer alone."""
    texts = (json.dumps([prompt, answer]) for prompt, answer in zip(prompts, answers, strict=True))
    return [hashlib.sha256(text.encode()).hexdigest()[:12] for text in texts]


def summarize(
    completions: Iterable[ScoredCompletion],
    keys: Sequence[str],
    scores: Sequence[str],
    *,
    greedy: bool,
    samples: int,
    ks: Sequence[int],
    seed: int,
) -> dict[str, Any]:
    """Estimates and counts of whole passes over the problems ``keys``.

    Returns:
        ``n``: problems; ``scores``: by score and measure (``greedy``, ``pass@k``) an `Estimate` as a dictionary;
        ``lengths``: by pass (``greedy``, ``sampled``) the completions, how many of them ran into the limit, and their
        mean length in tokens; ``problems``: what a paired comparison needs.

    Raises:
        ValueError: a completion is missing.
    """
    by_key = {completion.key: completion for completion in completions}
    passes = {GREEDY: [None]} if greedy else {}
    if samples:
        passes["sampled"] = list(range(samples))
    lengths, correct = {}, {}
    for name, numbers in passes.items():
        wanted = [(number, problem) for problem in range(len(keys)) for number in numbers]
        missing = sum(key not in by_key for key in wanted)
        if missing:
            raise ValueError(f"{missing} of {len(wanted)} {name} completions are missing")
        found = [by_key[key] for key in wanted]
        lengths[name] = {
            "completions": len(found),
            "truncated": sum(completion.truncated for completion in found),
            "mean_tokens": sum(completion.n_tokens for completion in found) / len(found),
        }
        correct[name] = {
            score: [sum(by_key[number, problem].correct[score] for number in numbers) for problem in range(len(keys))]
            for score in scores
        }
    estimates: dict[str, dict[str, Any]] = {score: {} for score in scores}
    for score in scores:
        if greedy:
            estimates[score][GREEDY] = wilson(sum(correct[GREEDY][score]), len(keys)).to_dict()
        for k in ks if samples else ():
            estimates[score][f"pass@{k}"] = mean_pass_at_k(correct["sampled"][score], samples, k, seed).to_dict()
    problems = {"keys": list(keys), "samples": samples, "correct": correct}
    return {"n": len(keys), "scores": estimates, "lengths": lengths, "problems": problems}


def write_result(result: Mapping[str, Any], path: Path) -> None:
    """Write a result so that no reader ever sees a part of it."""
    write_json(path, result, indent=1, ensure_ascii=False)


def read_result(path: str | Path) -> dict[str, Any]:
    """A result that [`write_result`] wrote.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not a result of an evaluation.
    """
    try:
        result = json.loads(Path(path).read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    expected = ("task", "model", "computed_in", "scores", "problems")
    missing = [key for key in expected if not isinstance(result, dict) or key not in result]
    if missing:
        raise ValueError(f"{path} is no result of evaluate.py: it has no {', '.join(missing)}")
    return result


def table(result: Mapping[str, Any]) -> Table:
    """The closing table of an evaluation."""
    shown = Table(title=f"{result['task']} · {result['n']} problems", show_header=False)
    shown.add_column(style="bold")
    shown.add_column(overflow="fold")
    shown.add_row("model", Text(result["model"] + (f" on {result['adapter_on']}" if result["adapter_on"] else "")))
    shown.add_row("computed in", Text(result["computed_in"]))
    sqnr = "" if result["weight_sqnr_db"] is None else f", weight SQNR {result['weight_sqnr_db']:.1f} dB"
    skipped = "" if result["n_skipped"] is None else f" ({result['n_skipped']} left in full precision)"
    shown.add_row("quantized layers", f"{result['n_quantized']}{skipped}{sqnr}")
    for score, measures in result["scores"].items():
        for measure, estimate in measures.items():
            shown.add_row(f"{score}, {measure}", Text(f"{Estimate(**estimate)}  ({_basis(result, estimate, measure)})"))
    for name, estimate in result.get("reward", {}).items():
        if name != "name":
            shown.add_row(f"mean reward, {name}", Text(f"{Estimate(**estimate)}  ({_basis(result, estimate, name)})"))
    for name, of in result["lengths"].items():
        share = of["truncated"] / of["completions"]
        cut = f"{of['truncated']} cut off ({share:.1%})"
        shown.add_row(name, f"{of['completions']} completions of {of['mean_tokens']:.1f} tokens on average, {cut}")
    shown.add_row("time", f"{result['seconds']:.0f} s for {result['generated']} completions")
    return shown


def _basis(result: Mapping[str, Any], estimate: Mapping[str, Any], measure: str) -> str:
    samples = "" if measure == GREEDY else f", {result['problems']['samples']} samples each"
    return f"{estimate['confidence']:.0%} {estimate['method']}, n = {estimate['n']}{samples}"
