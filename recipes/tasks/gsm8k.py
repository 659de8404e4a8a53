# SPDX-License-Identifier: Apache-2.0
"""GSM8K (grade-school maths, Cobbe et al., arXiv 2110.14168), from the Hub or from local JSON lines."""

from __future__ import annotations

import re
from typing import Any

from hf_mxfp4.rl.rewards.numbers import (
    gsm8k_gold,
    gsm8k_strict_reward,
    is_flexible_correct,
    is_strict_correct,
)

from .base import Task
from .sources import read_task


_INSTRUCTION = 'Reason step by step, and finish with the final answer on a line of its own as "#### <number>".'
_ANNOTATION = re.compile(r"<<[^<>\n]*>>")


def strip_annotations(solution: str) -> str:
    """A reference solution without its calculator annotations: ``"48/2=<<48/2=24>>24" -> "48/2=24"``."""
    return _ANNOTATION.sub("", solution)


def load(**options: Any) -> Task:
    """GSM8K, or anything in its format. Options and errors are those of [`read_task`]; a solution without
    ``#### <number>`` is a `ValueError`."""
    return read_task(
        "gsm8k",
        dataset=("openai/gsm8k", "main"),
        columns=("question", "answer"),
        read_row=lambda row: (row["question"], strip_annotations(row["answer"]), gsm8k_gold(row["answer"])),
        template="Question: {question}\n" + _INSTRUCTION + "\nAnswer:",
        chat_template="{question}\n\n" + _INSTRUCTION,
        reward=gsm8k_strict_reward,
        scores={"strict": is_strict_correct, "flexible": is_flexible_correct},
        metric="number_answer",
        max_completion_length=512,
        **options,
    )
