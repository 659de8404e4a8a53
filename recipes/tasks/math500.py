# SPDX-License-Identifier: Apache-2.0
"""MATH-500 (Hendrycks et al., arXiv 2103.03874; the 500 problems of Lightman et al., arXiv 2305.20050), from the Hub or
from local JSON lines. Answers are compared by math-verify."""

from __future__ import annotations

import os

from hf_mxfp4.rl.rewards.math import check_math_answer, is_boxed_correct, is_math_correct
from hf_mxfp4.rl.rewards.numbers import math_reward

from .base import Task, as_prompt
from .sources import check_template, make_splits, read_split


DATASET_NAME = "HuggingFaceH4/MATH-500"
_INSTRUCTION = "Reason step by step, and put the final answer within \\boxed{{}}."
DEFAULT_TEMPLATE = "Problem: {question}\n" + _INSTRUCTION + "\nSolution:"
DEFAULT_CHAT_TEMPLATE = "{question}\n\n" + _INSTRUCTION
_COLUMNS = ("problem", "solution", "answer")


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
) -> Task:
    """MATH-500, or anything with its columns ``problem``, ``solution`` and ``answer`` (LaTeX). Options as those of
    GSM8K; MATH-500 itself has no train split.

    Raises:
        FileNotFoundError, RuntimeError: a source cannot be read.
        ModuleNotFoundError: math-verify is not installed.
        ValueError: a malformed or empty source, an answer that math-verify cannot read, or a bad `prompt_template`.
    """
    template = prompt_template
    if template is None:
        template = DEFAULT_CHAT_TEMPLATE if conversational else DEFAULT_TEMPLATE
    check_template(template)

    def read(split, path):
        return read_split(dataset_name or DATASET_NAME, dataset_config, split, path, _COLUMNS)

    def make_row(row):
        check_math_answer(row["answer"])
        prompt = as_prompt(template.format(question=row["problem"]), conversational)
        return {"prompt": prompt, "completion": row["solution"], "answer": row["answer"]}

    files = {"test": test_file} if test_only else {"train": train_file, "test": test_file}
    sizes = {"train": n_train, "test": n_test}
    splits = make_splits("math500", read, make_row, files=files, sizes=sizes, seed=seed)
    return Task(
        name="math500",
        train=splits.get("train"),
        test=splits["test"],
        reward_funcs=[math_reward],
        scores={"boxed": is_boxed_correct, "flexible": is_math_correct},
        max_completion_length=2048,
        metric="math_answer",
    )
