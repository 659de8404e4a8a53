# SPDX-License-Identifier: Apache-2.0
"""Your own problems: a prompt and an answer in columns of your choice, and one of several scores or your own."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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

from .base import Task
from .own_functions import SCORE_FORM, check_score, is_own, load_function
from .sources import read_task


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
    *, prompt_column: str | None = None, answer_column: str | None = None, score: str | None = None, **options: Any
) -> Task:
    """Problems from JSON lines or a dataset of the Hub, with the prompt column alone as the prompt by default.

    Args:
        prompt_column, answer_column: default ``prompt`` and ``answer``.
        score: one of `SCORES`, default ``exact_match``, or ``FILE.py:function``; see [`own_functions`].
        options: those of [`read_task`].

    Raises as [`read_task`] does, and `ValueError` for an unknown score or an answer that the score cannot read.
    """
    score = score or "exact_match"
    own = load_function(score, "score", SCORE_FORM) if is_own(score) else None
    if own is None and score not in SCORES:
        guess = difflib.get_close_matches(score, SCORES, n=1)
        hint = f"did you mean {guess[0]!r}? " if guess else ""
        raise ValueError(f"unknown score {score!r}: {hint}the scores are {', '.join(SCORES)} and FILE.py:function")
    scoring = _own_scoring(own) if own else SCORES[score]
    prompt, answer = prompt_column or "prompt", answer_column or "answer"

    def read_row(row: dict[str, Any]) -> tuple[str, str, str]:
        scoring.check(row[answer])
        return row[prompt], row[answer], row[answer]

    task = read_task(
        "file",
        columns=(prompt, answer),
        read_row=read_row,
        template="{question}",
        chat_template="{question}",
        reward=scoring.reward,
        scores=scoring.scores,
        metric=scoring.metric,
        max_completion_length=512,
        **options,
    )
    if own:
        tried = task.test.select(range(min(2, len(task.test))))
        check_score(own, score, tried["completion"], tried["answer"])
    return task
