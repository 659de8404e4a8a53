# SPDX-License-Identifier: Apache-2.0
"""What a task is: two datasets, the rewards to train on, and the scores to report."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from datasets import Dataset


COLUMNS = ("prompt", "completion", "answer")


@dataclass(frozen=True)
class Task:
    """A verifiable-reward task.

    Attributes:
        name: what `load_task` was asked for.
        train: columns ``prompt`` (str, or a conversation ``[{"role": "user", "content": ...}]``), ``completion``
            (str: the reference completion, for supervised warm-up) and ``answer`` (str: the gold answer). None for a
            task that is only evaluated on.
        test: the same columns, disjoint from `train`.
        reward_funcs: TRL reward functions ``f(completions, answer, **kwargs) -> list[float]``.
        scores: metric name -> ``f(completion, answer) -> bool``; the first entry is the headline accuracy.
        max_completion_length: a sufficient number of new tokens (a hint).
    """

    name: str
    train: Dataset | None
    test: Dataset
    reward_funcs: list[Callable[..., list[float]]]
    scores: dict[str, Callable[[str, str], bool]]
    max_completion_length: int


def choose_rows(n_rows: int, n_wanted: int | None, *, what: str, seed: int) -> list[int]:
    """Draw the indices of `n_wanted` of `n_rows` rows without replacement by `seed`, kept in order; None: all.

    Args:
        what: the split or file, for error messages.

    Raises:
        ValueError: there are no rows, none or a negative number is asked for, or more than there are.
    """
    if n_rows == 0:
        raise ValueError(f"{what} is empty")
    if n_wanted is None:
        return list(range(n_rows))
    if not isinstance(n_wanted, int) or n_wanted < 1:
        raise ValueError(f"{what}: {n_wanted!r} rows were asked for; give a whole number, at least 1")
    if n_wanted > n_rows:
        raise ValueError(f"{what} has {n_rows} rows, {n_wanted} were asked for")
    return sorted(random.Random(seed).sample(range(n_rows), n_wanted))


@dataclass(frozen=True, kw_only=True)
class Subsets:
    """Which problems of a task are used, and in which form.

    Attributes:
        seed: of generated problems, of their split and of subsets: the same in training and evaluation.
        n_train, n_test: draw so many rows of a split; None: all. They never move a problem to the other split.
        conversational: prompts are conversations of one user message, for chat models.
    """

    seed: int = 0
    n_train: int | None = None
    n_test: int | None = None
    conversational: bool = False

    def split(self, name: str, problems: list[tuple[str, str, str]], n_held_out: int) -> dict[str, Dataset]:
        """Split problems (prompt, completion, answer), the first ``n_held_out`` of which are the test split."""
        parts = {"test": problems[:n_held_out], "train": problems[n_held_out:]}
        splits = {}
        for split, wanted in (("test", self.n_test), ("train", self.n_train)):
            chosen = choose_rows(len(parts[split]), wanted, what=f"{name}: the {split} split", seed=self.seed)
            splits[split] = self.dataset([parts[split][index] for index in chosen])
        return splits

    def dataset(self, rows: list[tuple[str, str, str]]) -> Dataset:
        """Make a dataset of rows of prompt, completion and answer."""
        columns: dict[str, list[Any]] = {name: [row[i] for row in rows] for i, name in enumerate(COLUMNS)}
        if self.conversational:
            columns["prompt"] = [[{"role": "user", "content": text}] for text in columns["prompt"]]
        return Dataset.from_dict(columns)
