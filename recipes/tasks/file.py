# SPDX-License-Identifier: Apache-2.0
"""Your own problems: a prompt and an answer in columns of your choice, and one of several scores or your own."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable
from dataclasses import dataclass

from hf_mxfp4.rl.rewards.math import check_math_answer, is_boxed_correct, is_math_correct
from hf_mxfp4.rl.rewards.numbers import (
    exact_match_reward,
    gsm8k_flexible_reward,
    is_exact_match,
    is_flexible_correct,
    is_strict_correct,
    math_reward,
    normalize_number,
    rewards_of,
)

from .base import Task, as_prompt
from .own_functions import SCORE_FORM, check_score, is_own, load_function
from .sources import check_template, make_splits, read_split


@dataclass(frozen=True)
class _Scoring:
    check: Callable[[str], object]
    scores: dict[str, Callable[[str, str], bool]]
    reward: Callable[..., list[float]]
    metric: str | None


#: How completions can be scored: as the answer to the letter, as numbers, or as mathematics.
SCORES = {
    "exact_match": _Scoring(str, {"exact_match": is_exact_match}, exact_match_reward, None),
    "number": _Scoring(
        normalize_number,
        {"strict": is_strict_correct, "flexible": is_flexible_correct},
        gsm8k_flexible_reward,
        "number_answer",
    ),
    "math": _Scoring(
        check_math_answer, {"boxed": is_boxed_correct, "flexible": is_math_correct}, math_reward, "math_answer"
    ),
}


def _own_scoring(score: Callable[[str, str], bool]) -> _Scoring:
    def reward(completions, answer, **kwargs):
        return rewards_of(score, completions, answer)

    reward.__name__ = score.__name__
    return _Scoring(str, {score.__name__: score}, reward, None)


def load(
    *,
    train_file: str | os.PathLike[str] | None = None,
    test_file: str | os.PathLike[str] | None = None,
    dataset_name: str | None = None,
    dataset_config: str | None = None,
    seed: int = 0,
    n_train: int | None = None,
    n_test: int | None = None,
    prompt_template: str | None = None,
    conversational: bool = False,
    test_only: bool = False,
    prompt_column: str | None = None,
    answer_column: str | None = None,
    score: str | None = None,
) -> Task:
    """Problems from JSON lines or a dataset of the Hub.

    Args:
        train_file, test_file: JSON lines; a split without a file comes from ``dataset_name``.
        prompt_template: a format string with the field ``{question}``, which stands for the prompt column; by default
            the column alone.
        prompt_column, answer_column: default ``prompt`` and ``answer``.
        score: one of `SCORES`, default ``exact_match``, or ``FILE.py:function``; see [`own_functions`].

    Raises:
        FileNotFoundError, RuntimeError: there is no such file or dataset.
        ModuleNotFoundError: the score ``math`` without math-verify.
        ValueError: a file is not given, malformed or empty, an unknown score, or an answer that the score cannot read.
    """
    score = score or "exact_match"
    own = load_function(score, "score", SCORE_FORM) if is_own(score) else None
    if own is None and score not in SCORES:
        guess = difflib.get_close_matches(score, SCORES, n=1)
        hint = f"did you mean {guess[0]!r}? " if guess else ""
        raise ValueError(f"unknown score {score!r}: {hint}the scores are {', '.join(SCORES)} and FILE.py:function")
    template, scoring = prompt_template or "{question}", _own_scoring(own) if own else SCORES[score]
    check_template(template)
    columns = prompt_column or "prompt", answer_column or "answer"

    def read(split, path):
        if path is None and dataset_name is None:
            raise ValueError(
                f"the task 'file' needs {split}_file, JSON lines with {' and '.join(map(repr, columns))}, "
                "or dataset_name"
            )
        return read_split(dataset_name, dataset_config, split, path, columns)

    def make_row(row):
        question, answer = (row[column] for column in columns)
        scoring.check(answer)
        prompt = as_prompt(template.format(question=question), conversational)
        return {"prompt": prompt, "completion": answer, "answer": answer}

    files = {"test": test_file} if test_only else {"train": train_file, "test": test_file}
    sizes = {"train": n_train, "test": n_test}
    splits = make_splits("file", read, make_row, files=files, sizes=sizes, seed=seed)
    if own:
        tried = splits["test"].select(range(min(2, len(splits["test"]))))
        check_score(own, score, tried["completion"], tried["answer"])
    return Task(
        name="file",
        train=splits.get("train"),
        test=splits["test"],
        reward_funcs=[scoring.reward],
        scores=scoring.scores,
        max_completion_length=512,
        metric=scoring.metric,
    )
