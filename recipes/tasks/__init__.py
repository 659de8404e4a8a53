# SPDX-License-Identifier: Apache-2.0
"""Tasks that the recipes train and evaluate on: ``load_task("arithmetic")``, ``load_task("gsm8k", ...)``."""

import inspect
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from hf_mxfp4.recipes.common.options import build_study
from hf_mxfp4.utils import option

from .base import REWARD_FORM, Subsets, Task, check_reward, load_function, of_task
from .problems import ALPHABET, SCORES, Source, arithmetic, few_shot, few_shot_steps, gsm8k, math500, own_problems
from .tiny_model import build_byte_tokenizer, build_char_tokenizer


__all__ = ["ALPHABET", "TASKS", "Task", "TaskArguments", "TaskStudy", "build_tokenizer", "load_task", "of_task"]

_GENERATED = {"arithmetic": arithmetic, "few_shot": few_shot, "few_shot_steps": few_shot_steps}
#: Tasks that are read, with their dataset on the Hub.
_READ = {
    "gsm8k": (gsm8k, "openai/gsm8k:main"),
    "math500": (math500, "HuggingFaceH4/MATH-500"),
    "file": (own_problems, None),
}
TASKS = (*_GENERATED, *_READ)


@dataclass
class TaskStudy:
    """What studies set of a task."""

    n_train: int | None = option(None, "Rows of the train split to use; default all.")
    conversational: bool | None = option(None, "Prompts as chat messages; default: as the tokenizer has a template.")


@dataclass
class TaskArguments:
    """Options of a script that choose its task."""

    STUDY: ClassVar[type] = TaskStudy
    #: The task when neither it nor a dataset is named.
    DEFAULT_TASK: ClassVar[str] = "arithmetic"

    task: str | None = option(None, f"One of {', '.join(TASKS)}; default: file where a dataset is named.")
    dataset: str | None = option(None, "Problems: JSON lines, a folder, or a dataset on the Hub (name:config).")
    eval_dataset: str | None = option(None, "To evaluate on; default: a test split, or rows held out of the dataset.")
    prompt_column: str | None = option(None, "file: column of the prompts; prompt, question or problem.")
    answer_column: str | None = option(None, "file: column of the answers; answer.")
    score: str | None = option(None, f"file: {', '.join(SCORES)} or FILE.py:function, called as f(completion, answer).")
    reward: str | None = option(None, "FILE.py:function instead of the task's: f(completions, answer, **kwargs).")
    prompt_template: str | None = option(None, "Prompt text with the field {question}.")
    evaluate_n: int | None = option(None, "Problems or held-out texts to evaluate on; default all problems, 24 texts.")
    study: str | None = option(
        None, "What tests and studies set: a mapping of options of the script's class `...Study`."
    )

    def __post_init__(self):
        self.study = build_study(self.STUDY, self.study)
        if self.evaluate_n is not None and self.evaluate_n < 1:
            raise ValueError(f"evaluate_n={self.evaluate_n} must be at least 1")

    @property
    def task_name(self) -> str:
        """The task that is named, that of a dataset, or the default."""
        if self.task:
            return self.task
        if self.dataset is not None or self.eval_dataset is not None:
            return "file"
        return self.DEFAULT_TASK

    def load_task(self, tokenizer: PreTrainedTokenizerBase | None = None, test_only: bool = False) -> Task:
        """Load the task, for a model with this ``tokenizer``: prompts that are read become chat messages where it has a
        template. Raises as [`load_task`] does."""
        conversational = self.study.conversational
        if conversational is None and self.task_name in _READ:
            conversational = getattr(tokenizer, "chat_template", None) is not None
        return load_task(
            self.task_name,
            reward=self.reward,
            test_only=test_only,
            dataset=self.dataset,
            eval_dataset=self.eval_dataset,
            prompt_column=self.prompt_column,
            answer_column=self.answer_column,
            score=self.score,
            prompt_template=self.prompt_template,
            n_train=self.study.n_train,
            n_test=self.evaluate_n,
            conversational=conversational,
        )


def load_task(name: str, *, reward: str | None = None, test_only: bool = False, **options: Any) -> Task:
    """Load a task by name.

    Args:
        name: one of `TASKS`.
        reward: ``FILE.py:function`` in place of the task's own reward; it is tried on two problems.
        test_only: for evaluation: a train split that would have to be read is left out (the task's `train` is None).
        options: those of the task: of `Subsets`, of `Source` for one that is read, and of its function; None leaves
            one at its default.

    Raises:
        ValueError: an unknown name, an option that the task does not have, an empty split, or a function that cannot
            be a score or a reward.
        FileNotFoundError, RuntimeError: the data cannot be read.
    """
    if name not in TASKS:
        raise ValueError(f"unknown task {name!r}: the tasks are {', '.join(TASKS)}")
    function_of_reward = None if reward is None else load_function(reward, "reward", REWARD_FORM)
    given = {option: value for option, value in options.items() if value is not None}
    kind: type[Subsets]
    if name in _READ:
        kind = Source
        make_task, dataset = _READ[name]
        given = {"dataset": dataset, **given, "test_only": test_only}
    else:
        kind = Subsets
        make_task = _GENERATED[name]
    of_kind = [field.name for field in fields(kind)]
    unknown = [option for option in given if option not in (*of_kind, *inspect.signature(make_task).parameters)]
    if unknown:
        raise ValueError(
            f"the task {name!r} does not take {', '.join(unknown)}; for problems of your own use the task 'file'"
        )
    problems = kind(**{option: given.pop(option) for option in of_kind if option in given})
    task = make_task(problems, **given)
    if function_of_reward is None:
        return task
    check_reward(function_of_reward, reward, task.test.select(range(min(2, len(task.test)))))
    return replace(task, reward_funcs=[function_of_reward])


def build_tokenizer(task: str) -> PreTrainedTokenizerFast:
    """Build the smallest tokenizer that a model made for a task needs: its characters, otherwise bytes."""
    return build_char_tokenizer(ALPHABET) if task == "arithmetic" else build_byte_tokenizer()
