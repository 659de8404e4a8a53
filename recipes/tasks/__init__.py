# SPDX-License-Identifier: Apache-2.0
"""Tasks that the recipes train and evaluate on: ``load_task("arithmetic")``, ``load_task("gsm8k", ...)``."""

from __future__ import annotations

import difflib
import os

from . import arithmetic, gsm8k
from .base import Task


__all__ = ["TASKS", "Task", "load_task"]

TASKS = ("arithmetic", "gsm8k")


def load_task(
    name: str,
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
) -> Task:
    """Loads a task by name.

    Args:
        name: one of `TASKS`.
        train_file, test_file: local JSON lines (gsm8k only); a split without a file is loaded from the Hub.
        dataset_name, dataset_config: a Hub dataset in the same format (gsm8k only).
        seed: of the split (arithmetic) and of the subsets.
        n_train, n_test: the number of rows to draw; None takes all.
        prompt_template: a format string with the field ``{question}`` (gsm8k only).
        conversational: prompts are ``[{"role": "user", "content": ...}]`` instead of text.

    Raises:
        ValueError: an unknown name, an option that the task does not have, or an empty split.
        FileNotFoundError, RuntimeError: the data cannot be read.
    """
    sources = {
        "train_file": train_file,
        "test_file": test_file,
        "dataset_name": dataset_name,
        "dataset_config": dataset_config,
        "prompt_template": prompt_template,
    }
    common = {"seed": seed, "n_train": n_train, "n_test": n_test, "conversational": conversational}
    if name == "gsm8k":
        return gsm8k.load(**sources, **common)
    if name == "arithmetic":
        unused = [key for key, value in sources.items() if value is not None]
        if unused:
            raise ValueError(f"the task 'arithmetic' generates its problems and does not take {', '.join(unused)}")
        return arithmetic.load(**common)
    guess = difflib.get_close_matches(str(name).lower(), TASKS, n=1, cutoff=0.5)
    hint = f"did you mean {guess[0]!r}? " if guess else ""
    raise ValueError(f"unknown task {name!r}: {hint}the tasks are {', '.join(map(repr, TASKS))}")
