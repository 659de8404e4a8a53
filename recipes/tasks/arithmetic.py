# SPDX-License-Identifier: Apache-2.0
"""Addition of two small numbers: a task that a 0.6M-parameter model learns on two CPU cores in minutes."""

from __future__ import annotations

import random

from hf_mxfp4.rl.rewards.numbers import exact_match_reward, is_exact_match

from .base import Task, as_prompt, choose_rows, make_dataset


ALPHABET = "0123456789+="


def load(
    *,
    seed: int = 0,
    n_train: int | None = None,
    n_test: int | None = None,
    conversational: bool = False,
    limit: int = 50,
) -> Task:
    """Prompts ``"a+b="`` for all pairs 0 <= a, b < `limit`, shuffled by `seed`; one fifth is held out as the test.

    With limit 50: 2500 pairs, 500 test and 2000 train, disjoint as ordered pairs (``"3+4="`` may be in one split and
    ``"4+3="`` in the other). `n_train` and `n_test` draw a subset; they never move a pair to the other split. The same
    `seed` must be used for training and evaluation.

    Raises:
        ValueError: `limit` is too small to hold out a pair, or a subset is empty or larger than its split.
    """
    if limit < 3:
        raise ValueError(f"limit must be at least 3 so that both splits have pairs, got {limit}")
    pairs = [(a, b) for a in range(limit) for b in range(limit)]
    random.Random(seed).shuffle(pairs)
    n_held_out = len(pairs) // 5
    splits = {}
    for split, part, wanted in (("test", pairs[:n_held_out], n_test), ("train", pairs[n_held_out:], n_train)):
        rows = []
        for index in choose_rows(len(part), wanted, what=f"arithmetic: the {split} split", seed=seed):
            a, b = part[index]
            prompt = as_prompt(f"{a}+{b}=", conversational)
            rows.append({"prompt": prompt, "completion": str(a + b), "answer": str(a + b)})
        splits[split] = make_dataset(rows)
    return Task(
        name="arithmetic",
        train=splits["train"],
        test=splits["test"],
        reward_funcs=[exact_match_reward],
        scores={"exact_match": is_exact_match},
        max_completion_length=len(str(2 * (limit - 1))) + 2,  # the digits, the end, and one to get wrong
    )
