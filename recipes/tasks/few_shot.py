# SPDX-License-Identifier: Apache-2.0
"""Sums and differences after two solved ones: what a small language model half knows."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from hf_mxfp4.rl.rewards.numbers import is_exact_match, rewards_of

from .base import Task, as_prompt, choose_rows, make_dataset


SHOTS = "12-5=7\n8+9=17\n"
#: Numbers are from 1 to this.
LARGEST = 20


def is_first_line_correct(completion: str, answer: str) -> bool:
    """Whether the first line of `completion` is `answer`: models that continue text go on with a next sum."""
    return is_exact_match(completion.split("\n", 1)[0], answer)


def first_line_reward(completions: Sequence[Any], answer: Sequence[str], **kwargs: Any) -> list[float]:
    """1.0 where [`is_first_line_correct`], else 0.0. Arguments and errors as [`rewards_of`] has them."""
    return rewards_of(is_first_line_correct, completions, answer)


def load(*, seed: int = 0, n_train: int | None = None, n_test: int | None = None, conversational: bool = False) -> Task:
    """Prompts ``"12-5=7\\n8+9=17\\n14+9="``, sums and differences of numbers from 1 to 20, none negative, shuffled by
    `seed`; a third is held out as the test. `n_train` and `n_test` draw subsets of these.

    Raises:
        ValueError: a subset is empty or larger than its split.
    """
    numbers = range(1, LARGEST + 1)
    problems = [(f"{a}+{b}=", a + b) for a in numbers for b in numbers]
    problems += [(f"{a}-{b}=", a - b) for a in numbers for b in range(1, a + 1)]
    random.Random(seed).shuffle(problems)
    n_held_out = len(problems) // 3
    splits = {}
    for split, part, wanted in (("test", problems[:n_held_out], n_test), ("train", problems[n_held_out:], n_train)):
        chosen = choose_rows(len(part), wanted, what=f"few_shot: the {split} split", seed=seed)
        rows = [part[index] for index in chosen]
        splits[split] = make_dataset(
            [
                {"prompt": as_prompt(SHOTS + question, conversational), "completion": f"{gold}\n", "answer": str(gold)}
                for question, gold in rows
            ]
        )
    return Task(
        name="few_shot",
        train=splits["train"],
        test=splits["test"],
        reward_funcs=[first_line_reward],
        scores={"first_line": is_first_line_correct},
        max_completion_length=3,  # two digits and the end of the line
    )
