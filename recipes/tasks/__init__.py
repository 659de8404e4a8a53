# SPDX-License-Identifier: Apache-2.0
"""Tasks that the recipes train and evaluate on: ``load_task("arithmetic")``, ``load_task("gsm8k", ...)``."""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from dataclasses import replace

from transformers import PreTrainedTokenizerFast

from . import arithmetic, few_shot, file, gsm8k, math500, word_problems
from .base import Task
from .own_functions import REWARD_FORM, check_reward, load_function
from .tiny_model import build_byte_tokenizer, build_char_tokenizer
from .word_tokenizer import build_word_tokenizer


__all__ = ["TASKS", "Task", "build_tokenizer", "load_task"]

TASKS = ("arithmetic", "gsm8k", "math500", "file", "word_problems", "few_shot")
_READING = {"gsm8k": gsm8k, "math500": math500, "file": file}


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
    problem_count: int | None = None,
    problem_steps: Sequence[int] | None = None,
    test_only: bool = False,
    prompt_column: str | None = None,
    answer_column: str | None = None,
    score: str | None = None,
    reward: str | None = None,
) -> Task:
    """Load a task by name.

    Args:
        name: one of `TASKS`.
        train_file, test_file: local JSON lines (gsm8k, math500, file); a split without a file is loaded from the Hub.
        dataset_name, dataset_config: a Hub dataset in the same format (gsm8k, math500, file).
        seed: of the split (arithmetic) and of the subsets.
        n_train, n_test: the number of rows to draw; None takes all.
        prompt_template: a format string with the field ``{question}`` (gsm8k, math500, file).
        problem_count, problem_steps: how many problems to generate, and from how many to how many steps each
            (word_problems only).
        conversational: prompts are ``[{"role": "user", "content": ...}]`` instead of text.
        test_only: for evaluation: a train split that would have to be read is left out (the task's `train` is None).
        prompt_column, answer_column, score: see `file.load` (file only).
        reward: ``FILE.py:function`` in place of the task's own reward; it is tried on two problems.

    Raises:
        ValueError: an unknown name, an option that the task does not have, an empty split, or a function that cannot
            be a score or a reward.
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
    _check_numbers({"problem_count": problem_count, **common}, problem_steps)
    generated = {"problem_count": problem_count, "problem_steps": problem_steps}
    columns = {"prompt_column": prompt_column, "answer_column": answer_column, "score": score}
    own = None if reward is None else load_function(reward, "reward", REWARD_FORM)
    if name not in TASKS:
        guess = difflib.get_close_matches(str(name).lower(), TASKS, n=1, cutoff=0.5)
        hint = f"did you mean {guess[0]!r}? " if guess else ""
        raise ValueError(f"unknown task {name!r}: {hint}the tasks are {', '.join(map(repr, TASKS))}")
    if name != "file":
        _refuse(name, "has columns and scores of its own", columns, "; for your own problems use the task 'file'")
    if name in _READING:
        _refuse(name, "reads its problems", generated)
        options = columns if name == "file" else {}
        task = _READING[name].load(**sources, **common, **options, test_only=test_only)
    else:
        _refuse(name, "generates its problems", sources, "; for your own problems use the task 'file'")
        if name == "word_problems":
            sizes = {} if problem_count is None else {"size": problem_count}
            sizes |= {} if problem_steps is None else {"steps": tuple(problem_steps)}
            task = word_problems.load(**common, **sizes)
        else:
            _refuse(name, "generates its problems", generated)
            task = {"arithmetic": arithmetic, "few_shot": few_shot}[name].load(**common)
    if own is None:
        return task
    tried = task.test.select(range(min(2, len(task.test))))
    check_reward(own, reward, tried["prompt"], tried["completion"], tried["answer"])
    return replace(task, reward_funcs=[own])


def _check_numbers(options: dict[str, object], problem_steps: object) -> None:
    """YAML gives whatever was written. All `options` but `conversational` are whole numbers, where they are given."""
    for key, value in options.items():
        if key != "conversational" and value is not None and not _is_whole(value):
            raise ValueError(f"{key}={value!r} must be a whole number")
    if problem_steps is None:
        return
    if not isinstance(problem_steps, Sequence) or not all(map(_is_whole, problem_steps)):
        raise ValueError(f"problem_steps={problem_steps!r} must be the fewest and the most steps, such as [2, 4]")


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _refuse(task: str, does: str, options: dict[str, object], instead: str = "") -> None:
    unused = [key for key, value in options.items() if value is not None]
    if unused:
        raise ValueError(f"the task {task!r} {does} and does not take {', '.join(unused)}{instead}")


def build_tokenizer(task: str) -> PreTrainedTokenizerFast:
    """The smallest tokenizer that a model made for a task needs: its characters or words; bytes where the text is
    anybody's."""
    if task == "arithmetic":
        return build_char_tokenizer(arithmetic.ALPHABET)
    if task == "word_problems":
        return build_word_tokenizer(word_problems.vocabulary())
    return build_byte_tokenizer()
