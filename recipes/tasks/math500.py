# SPDX-License-Identifier: Apache-2.0
"""MATH-500 (Hendrycks et al., arXiv 2103.03874; the 500 problems of Lightman et al., arXiv 2305.20050), from the Hub or
from local JSON lines. Answers are compared by math-verify."""

from __future__ import annotations

from typing import Any

from hf_mxfp4.rl.rewards.math import check_math_answer, is_boxed_correct, is_math_correct
from hf_mxfp4.rl.rewards.numbers import math_reward

from .base import Task
from .sources import read_task


_INSTRUCTION = "Reason step by step, and put the final answer within \\boxed{{}}."


def load(**options: Any) -> Task:
    """MATH-500, or anything with its columns ``problem``, ``solution`` and ``answer`` (LaTeX). Options and errors are
    those of [`read_task`]; an answer that math-verify cannot read is a `ValueError`. MATH-500 has no train split."""

    def read_row(row: dict[str, Any]) -> tuple[str, str, str]:
        check_math_answer(row["answer"])
        return row["problem"], row["solution"], row["answer"]

    return read_task(
        "math500",
        dataset=("HuggingFaceH4/MATH-500", None),
        columns=("problem", "solution", "answer"),
        read_row=read_row,
        template="Problem: {question}\n" + _INSTRUCTION + "\nSolution:",
        chat_template="{question}\n\n" + _INSTRUCTION,
        reward=math_reward,
        scores={"boxed": is_boxed_correct, "flexible": is_math_correct},
        metric="math_answer",
        max_completion_length=2048,
        **options,
    )
