# SPDX-License-Identifier: Apache-2.0
"""What a task is: two datasets, the rewards to train on, and the scores to report; and scores and rewards from a file
of the user, which are tried on a few problems before anything runs."""

import asyncio
import inspect
import random
import runpy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import TrainerState

from hf_mxfp4.rl.rewards import guard_reward, rewards_of


COLUMNS = ("prompt", "completion", "answer")


@dataclass(frozen=True)
class Task:
    """A verifiable-reward task.

    Attributes:
        train: columns ``prompt`` (str, or a conversation ``[{"role": "user", "content": ...}]``), ``completion``
            (str: the reference completion, for supervised warm-up) and ``answer`` (str: the gold answer). None for a
            task that is only evaluated on.
        test: the same columns, disjoint from `train`.
        reward_funcs: TRL reward functions ``f(completions, answer, **kwargs) -> list[float]``.
        scores: metric name -> ``f(completion, answer) -> bool``; the first entry is the headline accuracy.
        max_completion_length: a sufficient number of new tokens.
        is_one_line: whether completions are single lines, see [`hf_mxfp4.recipes.evaluation.generate.end_with_line`].
    """

    name: str
    train: Dataset | None
    test: Dataset
    reward_funcs: list[Callable[..., list[float]]]
    scores: dict[str, Callable[[str, str], bool]]
    max_completion_length: int
    is_one_line: bool = False


def of_task(problems: Dataset, learn: str) -> Dataset:
    """Return the rows of a task in the form that ``learn`` asks for."""
    if learn == "generated":
        return problems.select_columns(["prompt"])
    prompts, completions = _as_trl_has_them(problems)
    if learn == "completion":
        return Dataset.from_dict({"prompt": prompts, "completion": completions})
    whole = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
    column = "text" if isinstance(prompts[0], str) else "messages"
    return Dataset.from_dict({column: whole})


def _as_trl_has_them(problems: Dataset) -> tuple[list, list]:
    """Return prompts and reference completions: texts, or messages where prompts are conversations."""
    prompts = list(problems["prompt"])
    completions = list(problems["completion"])
    if not isinstance(prompts[0], str):
        completions = [[{"role": "assistant", "content": text}] for text in completions]
    return prompts, completions


def choose_rows(n_rows: int, n_wanted: int | None, *, what: str, seed: int) -> list[int]:
    """Draw the indices of at most `n_wanted` of `n_rows` rows without replacement by `seed`, kept in order; None: all.
    Raises `ValueError`, which begins with ``what`` (the split or file), for a number that there cannot be."""
    if n_wanted is not None and (not isinstance(n_wanted, int) or n_wanted < 1):
        raise ValueError(f"{what} has {n_rows} rows, {n_wanted!r} were asked for; give a whole number, at least 1")
    if n_wanted is None or n_wanted >= n_rows:
        return list(range(n_rows))
    return sorted(random.Random(seed).sample(range(n_rows), n_wanted))


@dataclass(frozen=True, kw_only=True)
class Subsets:
    """Which problems of a task are used, and in which form.

    Attributes:
        seed: of generated problems, of their split and of subsets: the same in training and evaluation.
        n_train, n_test: draw at most so many rows of a split; None: all.
        conversational: prompts are conversations of one user message, for chat models.
    """

    seed: int = 0
    n_train: int | None = None
    n_test: int | None = None
    conversational: bool = False

    def split(self, name: str, groups: list[list[tuple[str, str, str]]], n_held_out: int) -> dict[str, Dataset]:
        """Shuffle groups of problems (prompt, completion, answer) and split them: the first ``n_held_out`` problems are
        the test split. Those of a group, of which one tells the answer of the others, stay together."""
        random.Random(self.seed).shuffle(groups)
        parts: dict[str, list[tuple[str, str, str]]] = {"test": [], "train": []}
        for group in groups:
            has_room = len(parts["test"]) + len(group) <= n_held_out
            parts["test" if has_room else "train"] += group
        splits = {}
        for split, wanted in (("test", self.n_test), ("train", self.n_train)):
            chosen = choose_rows(len(parts[split]), wanted, what=f"{name}: the {split} split", seed=self.seed)
            splits[split] = self.as_dataset([parts[split][index] for index in chosen])
        return splits

    def as_dataset(self, rows: list[tuple[str, str, str]]) -> Dataset:
        """Make a dataset of rows of prompt, completion and answer."""
        columns: dict[str, list[Any]] = {name: [row[i] for row in rows] for i, name in enumerate(COLUMNS)}
        if self.conversational:
            columns["prompt"] = [[{"role": "user", "content": text}] for text in columns["prompt"]]
        return Dataset.from_dict(columns)


# ---- scores and rewards of the user ----------------------------------------------------------------------------------

#: How they are called.
SCORE_FORM = "f(completion, answer) -> bool"
REWARD_FORM = "f(completions, answer, **kwargs) -> list[float]"


def load_function(name: str, option: str, form: str) -> Callable[..., Any]:
    """Load ``FILE.py:function``; ``option`` names it, and ``form`` is how it is called, for error messages.

    Raises `FileNotFoundError`, or `ValueError` when ``name`` has another form or the file has no such function.
    """
    path, _, function = name.rpartition(":")
    if not path.endswith(".py") or not function:
        raise ValueError(f"{option}={name!r} must be FILE.py:function, a function {form}")
    if not Path(path).is_file():
        raise FileNotFoundError(f"{option}={name!r}: there is no file {path}")
    found = runpy.run_path(path).get(function)
    if not callable(found):
        raise ValueError(f"{option}={name!r}: {path} has no function {function!r}")
    return found


def reward_of(score: Callable[[str, str], float]) -> Callable[..., list[float]]:
    """Make a reward function of a score, which gives a number, or whether the completion is right (1.0, else 0.0)."""

    def reward(completions, answer, **kwargs):
        return rewards_of(score, completions, answer)

    reward.__name__ = score.__name__
    return reward


def check_score(score: Callable[..., Any], name: str, completions: Sequence[str], answers: Sequence[str]) -> None:
    """Raise `ValueError` unless ``score`` can be called on texts and says whether they are right."""
    for completion, answer in zip(completions, answers, strict=True):
        verdict = _try(f"score={name!r}", SCORE_FORM, score, completion, answer)
        if type(verdict).__name__ not in ("bool_", "bool"):  # numpy has truth values of its own
            raise ValueError(f"score={name!r} must be {SCORE_FORM}, and gave {verdict!r} for {completion!r}")


def check_reward(reward: Callable[..., Any], name: str, problems: Dataset) -> None:
    """Call a reward as TRL does on reference completions, with texts, or messages where prompts are conversations.

    Raises `ValueError` when the call fails or does not give one finite number, or None, for each completion.
    """
    prompts, completions = _as_trl_has_them(problems)
    others = {column: list(problems[column]) for column in problems.column_names if column not in COLUMNS[:2]}
    rewards = _try(
        f"reward={name!r}",
        REWARD_FORM,
        guard_reward(reward, name),
        prompts=prompts,
        completions=completions,
        completion_ids=[[0] for _ in problems],
        trainer_state=TrainerState(max_steps=1),
        log_extra=lambda *args, **kwargs: None,
        log_metric=lambda *args, **kwargs: None,
        **others,
    )
    if len(rewards) != len(problems):
        raise ValueError(f"reward={name!r} must give one number for each completion, not {rewards!r:.200}")


def _try(what: str, form: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return what a function of the user returns; name the function in a `ValueError` where it raises."""
    try:
        result = function(*args, **kwargs)
        return asyncio.run(result) if inspect.iscoroutine(result) else result
    except Exception as error:
        raise ValueError(
            f"{what}, with the signature {inspect.signature(function)}, failed on problems of the task: "
            f"{type(error).__name__}: {error}; it must be callable as {form}"
        ) from error
