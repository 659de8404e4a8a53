# SPDX-License-Identifier: Apache-2.0
"""GSM8K (grade-school maths, Cobbe et al., arXiv 2110.14168), from the Hub or from local JSON lines."""

from __future__ import annotations

import os
import re

from hf_mxfp4.rl.rewards.numbers import (
    gsm8k_gold,
    gsm8k_strict_reward,
    is_flexible_correct,
    is_strict_correct,
)

from .base import Task, as_prompt
from .sources import check_template, make_splits, read_split


DATASET_NAME, DATASET_CONFIG = "openai/gsm8k", "main"
_INSTRUCTION = 'Reason step by step, and finish with the final answer on a line of its own as "#### <number>".'
DEFAULT_TEMPLATE = "Question: {question}\n" + _INSTRUCTION + "\nAnswer:"
DEFAULT_CHAT_TEMPLATE = "{question}\n\n" + _INSTRUCTION
_ANNOTATION = re.compile(r"<<[^<>\n]*>>")


def strip_annotations(solution: str) -> str:
    """A reference solution without its calculator annotations: ``"48/2=<<48/2=24>>24" -> "48/2=24"``."""
    return _ANNOTATION.sub("", solution)


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
    """GSM8K, or anything in its format. A split without a file comes from `dataset_name` on the Hub.

    Rows keep the order of their source; `n_train` and `n_test` draw a subset by `seed`.

    Args:
        dataset_name: default ``openai/gsm8k``, whose configuration is ``main``.
        prompt_template: a format string with the field ``{question}``.
        conversational: prompts are conversations of one user message, for chat models.
        test_only: read no train split.

    Raises:
        FileNotFoundError, RuntimeError: a source cannot be read.
        ValueError: a malformed or empty source, a solution without ``#### <number>``, or a bad `prompt_template`.
    """
    template = prompt_template
    if template is None:
        template = DEFAULT_CHAT_TEMPLATE if conversational else DEFAULT_TEMPLATE
    check_template(template)
    if dataset_name is None:
        dataset_name, dataset_config = DATASET_NAME, dataset_config or DATASET_CONFIG

    def read(split, path):
        return read_split(dataset_name, dataset_config, split, path, ("question", "answer"))

    def make_row(row):
        answer = gsm8k_gold(row["answer"])
        prompt = as_prompt(template.format(question=row["question"]), conversational)
        return {"prompt": prompt, "completion": strip_annotations(row["answer"]), "answer": answer}

    files = {"test": test_file} if test_only else {"train": train_file, "test": test_file}
    sizes = {"train": n_train, "test": n_test}
    splits = make_splits("gsm8k", read, make_row, files=files, sizes=sizes, seed=seed)
    return Task(
        name="gsm8k",
        train=splits.get("train"),
        test=splits["test"],
        reward_funcs=[gsm8k_strict_reward],
        scores={"strict": is_strict_correct, "flexible": is_flexible_correct},
        max_completion_length=512,
        metric="number_answer",
    )
