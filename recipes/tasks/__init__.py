# SPDX-License-Identifier: Apache-2.0
"""Tasks that the recipes train and evaluate on: ``load_task("arithmetic")``, ``load_task("gsm8k", ...)``."""

import inspect
from dataclasses import dataclass, fields, replace
from typing import Any

from transformers import PreTrainedTokenizerFast

from hf_mxfp4.utils import option

from .base import REWARD_FORM, Subsets, Task, check_reward, load_function, of_task
from .problems import ALPHABET, SCORES, Source, arithmetic, few_shot, gsm8k, math500, own_problems
from .tiny_model import build_byte_tokenizer, build_char_tokenizer


__all__ = ["ALPHABET", "TASKS", "Task", "TaskArguments", "build_tokenizer", "load_task", "of_task"]

_GENERATED = {"arithmetic": arithmetic, "few_shot": few_shot}
#: Tasks that are read, with their dataset on the Hub.
_READ = {
    "gsm8k": (gsm8k, {"dataset_name": "openai/gsm8k", "dataset_config": "main"}),
    "math500": (math500, {"dataset_name": "HuggingFaceH4/MATH-500"}),
    "file": (own_problems, {}),
}
TASKS = (*_GENERATED, *_READ)


@dataclass
class TaskArguments:
    """Options of a script that choose its task."""

    task: str = option("arithmetic", f"One of {', '.join(TASKS)}.")
    dataset_name: str | None = option(None, "gsm8k, math500, file: Hub dataset; openai/gsm8k, HuggingFaceH4/MATH-500.")
    dataset_config: str | None = option(None, "Its configuration; gsm8k: main.")
    train_file: str | None = option(None, "JSON lines to train on instead of a Hub dataset.")
    test_file: str | None = option(None, "JSON lines to evaluate on instead.")
    n_train: int | None = option(None, "Rows of the train split to use; default all.")
    n_test: int | None = option(None, "Rows of the test split to use; default all.")
    data_seed_split: int = option(0, "Seed of the task's split and subsets.")
    prompt_column: str | None = option(None, "file: column of the prompts; prompt.")
    answer_column: str | None = option(None, "file: column of the answers; answer.")
    score: str | None = option(None, f"file: {', '.join(SCORES)} or FILE.py:function, called as f(completion, answer).")
    reward: str | None = option(None, "FILE.py:function instead of the task's: f(completions, answer, **kwargs).")
    conversational: bool = option(False, "Send prompts as chat messages.")
    prompt_template: str | None = option(None, "Prompt text with the field {question}.")

    def load_task(self, test_only: bool = False) -> Task:
        """Load the task; raises as [`load_task`] does."""
        options = {own.name: getattr(self, own.name) for own in fields(TaskArguments)}
        return load_task(options.pop("task"), seed=options.pop("data_seed_split"), test_only=test_only, **options)


def load_task(name: str, *, reward: str | None = None, test_only: bool = False, **options: Any) -> Task:
    """Load a task by name.

    Args:
        name: one of `TASKS`.
        reward: ``FILE.py:function`` in place of the task's own reward; it is tried on two problems.
        test_only: for evaluation: a train split that would have to be read is left out (the task's `train` is None).
        options: those of the task, see [`TaskArguments`]; None leaves one at its default.

    Raises:
        ValueError: an unknown name, an option that the task does not have, an empty split, or a function that cannot
            be a score or a reward.
        FileNotFoundError, RuntimeError: the data cannot be read.
    """
    if name not in TASKS:
        raise ValueError(f"unknown task {name!r}: the tasks are {', '.join(TASKS)}")
    own = None if reward is None else load_function(reward, "reward", REWARD_FORM)
    given = {option: value for option, value in options.items() if value is not None}
    kind, function = (Source, _READ[name][0]) if name in _READ else (Subsets, _GENERATED[name])
    shared = [field.name for field in fields(kind)]
    unknown = [option for option in given if option not in (*shared, *inspect.signature(function).parameters)]
    if unknown:
        raise ValueError(
            f"the task {name!r} does not take {', '.join(unknown)}; for problems of your own use the task 'file'"
        )
    which = {option: given.pop(option) for option in shared if option in given}
    if name in _READ:
        dataset = {} if "dataset_name" in which else _READ[name][1]
        which = {**dataset, **which, "test_only": test_only}
    task = function(kind(**which), **given)
    if own is None:
        return task
    check_reward(own, reward, task.test.select(range(min(2, len(task.test)))))
    return replace(task, reward_funcs=[own])


def build_tokenizer(task: str) -> PreTrainedTokenizerFast:
    """Build the smallest tokenizer that a model made for a task needs: its characters, otherwise bytes."""
    return build_char_tokenizer(ALPHABET) if task == "arithmetic" else build_byte_tokenizer()
