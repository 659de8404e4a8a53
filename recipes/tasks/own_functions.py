# SPDX-License-Identifier: Apache-2.0
"""Scores and rewards from a file of yours, tried on a few problems before anything runs."""

import asyncio
import importlib.util
import inspect
import math
import numbers
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


#: How they are called.
SCORE_FORM = "f(completion, answer) -> bool"
REWARD_FORM = "f(completions, answer, **kwargs) -> list[float]"


def load_function(name: str, option: str, form: str) -> Callable[..., Any]:
    """Load ``FILE.py:function``.

    Args:
        option: that names it, for error messages.
        form: how it is called.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: ``name`` has another form, the file cannot be run, or has no such function.
    """
    path, _, function = name.rpartition(":")
    if not path.endswith(".py") or not function:
        raise ValueError(f"{option}={name!r} must be FILE.py:function, a function {form}")
    if not Path(path).is_file():
        raise FileNotFoundError(f"{option}={name!r}: there is no file {path}")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"{option}={name!r}: {path} cannot be run: {type(error).__name__}: {error}") from error
    found = getattr(module, function, None)
    if not callable(found):
        known = ", ".join(key for key, value in vars(module).items() if inspect.isfunction(value))
        raise ValueError(f"{option}={name!r}: {path} has no function {function!r}; it has {known or 'none'}")
    return found


def check_score(score: Callable[..., Any], name: str, completions: Sequence[str], answers: Sequence[str]) -> None:
    """Raise `ValueError` unless ``score`` can be called on texts and says whether they are right."""
    for completion, answer in zip(completions, answers, strict=True):
        verdict = _try(f"score={name!r}", SCORE_FORM, score, completion, answer)
        # numpy has truth values of its own.
        if type(verdict).__name__ not in ("bool_", "bool"):
            raise ValueError(f"score={name!r} must be {SCORE_FORM}, and gave {verdict!r} for {completion!r}")


def check_reward(
    reward: Callable[..., Any], name: str, prompts: Sequence[Any], completions: Sequence[str], answers: Sequence[str]
) -> None:
    """Raise `ValueError` unless ``reward`` can be called as TRL does and gives a number, or None, for each text."""
    for value, text in zip(call_reward(reward, name, prompts, completions, answers), completions, strict=True):
        if value is not None and not (isinstance(value, numbers.Real) and math.isfinite(value)):
            raise ValueError(f"reward={name!r} must give finite numbers or None, and gave {value!r} for {text!r}")


def call_reward(
    reward: Callable[..., Any], name: str, prompts: Sequence[Any], completions: Sequence[str], answers: Sequence[str]
) -> list[Any]:
    """Call a reward as TRL does, with texts, or messages where the prompts are conversations; return the rewards.

    Raises `ValueError` when the call fails or does not give one reward for each completion.
    """
    if not isinstance(prompts[0], str):
        completions = [[{"role": "assistant", "content": text}] for text in completions]
    found = _try(
        f"reward={name!r}",
        REWARD_FORM,
        reward,
        prompts=list(prompts),
        completions=list(completions),
        completion_ids=[[] for _ in completions],
        answer=list(answers),
        trainer_state=None,
        log_extra=lambda *args, **kwargs: None,
        log_metric=lambda *args, **kwargs: None,
    )
    if isinstance(found, str) or not hasattr(found, "__iter__"):
        raise ValueError(f"reward={name!r} must be {REWARD_FORM}, and gave {found!r}")
    rewards = [value.item() if hasattr(value, "item") else value for value in found]
    if len(rewards) != len(completions):
        raise ValueError(
            f"reward={name!r} gave {len(rewards)} rewards for {len(completions)} completions, not one for each"
        )
    return rewards


def _try(what: str, form: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        found = function(*args, **kwargs)
        return asyncio.run(found) if inspect.iscoroutine(found) else found
    except Exception as error:
        raise ValueError(
            f"{what}, with the signature {inspect.signature(function)}, failed on problems of the task: "
            f"{type(error).__name__}: {error}; it must be callable as {form}"
        ) from error
