# SPDX-License-Identifier: Apache-2.0
"""What a task is: two datasets, the rewards to train on, and the scores to report."""

from __future__ import annotations

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
            (str: the reference completion, for supervised warm-up) and ``answer`` (str: the gold answer).
        test: the same columns, disjoint from `train`.
        reward_funcs: TRL reward functions ``f(completions, answer, **kwargs) -> list[float]``.
        scores: metric name -> ``f(completion, answer) -> bool``; the first entry is the headline accuracy.
        max_completion_length: a sufficient number of new tokens (a hint).
        metric: the folder in `recipes/metrics` that gives the same scores as an `evaluate` metric, if there is one.

    A task that is only evaluated on has no `train`.

    Raises:
        ValueError: a split is empty or lacks a column, or there is no reward function or no score.
    """

    name: str
    train: Dataset | None
    test: Dataset
    reward_funcs: list[Callable[..., list[float]]]
    scores: dict[str, Callable[[str, str], bool]]
    max_completion_length: int
    metric: str | None = None

    def __post_init__(self) -> None:
        for split, dataset in (("train", self.train), ("test", self.test)):
            if dataset is None and split == "train":
                continue
            if len(dataset) == 0:
                raise ValueError(f"task {self.name!r}: the {split} split is empty")
            missing = [column for column in COLUMNS if column not in dataset.column_names]
            if missing:
                raise ValueError(f"task {self.name!r}: the {split} split has no column {', '.join(missing)}")
        if not self.reward_funcs or not self.scores:
            raise ValueError(f"task {self.name!r} needs at least one reward function and one score")

    @property
    def headline(self) -> str:
        """The name of the score to quote when only one is quoted."""
        return next(iter(self.scores))


def choose_rows(n_rows: int, n_wanted: int | None, *, what: str, seed: int) -> list[int]:
    """The indices of `n_wanted` of `n_rows` rows, drawn without replacement by `seed` and kept in order; None: all.

    Args:
        what: the split or file, for error messages.

    Raises:
        ValueError: there are no rows, none or a negative number is asked for, or more than there are.
    """
    if n_rows == 0:
        raise ValueError(f"{what} is empty")
    if n_wanted is None:
        return list(range(n_rows))
    if n_wanted < 1:
        raise ValueError(f"{what} would be empty: {n_wanted} rows were asked for, at least 1 is needed")
    if n_wanted > n_rows:
        raise ValueError(f"{what} has {n_rows} rows, {n_wanted} were asked for")
    return sorted(random.Random(seed).sample(range(n_rows), n_wanted))


def as_prompt(text: str, conversational: bool) -> str | list[dict[str, str]]:
    """`text` as a prompt: itself, or a conversation of one user message."""
    return [{"role": "user", "content": text}] if conversational else text


def make_dataset(rows: list[dict[str, Any]]) -> Dataset:
    """A dataset with exactly the columns of a task, in their order."""
    return Dataset.from_dict({column: [row[column] for row in rows] for column in COLUMNS})
