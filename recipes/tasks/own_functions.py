# SPDX-License-Identifier: Apache-2.0
"""Scores and rewards from a file of yours, tried on a few problems before anything runs."""

import asyncio
import importlib.util
import inspect
import math
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
        if type(verdict).__name__ not in ("bool_", "bool"):  # numpy has truth values of its own
            raise ValueError(f"score={name!r} must be {SCORE_FORM}, and gave {verdict!r} for {completion!r}")


def call_reward(
    reward: Callable[..., Any], name: str, prompts: Sequence[Any], completions: Sequence[str], answers: Sequence[str]
) -> list[float | None]:
    """Call a reward as TRL does, with texts, or messages where the prompts are conversations; return the rewards.

    Raises `ValueError` when the call fails or does not give one finite number, or None, for each completion.
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
    try:
        rewards = [None if value is None else float(value) for value in found]
    except (TypeError, ValueError):
        rewards = []
    if len(rewards) != len(completions) or not all(value is None or math.isfinite(value) for value in rewards):
        raise ValueError(
            f"reward={name!r} must be {REWARD_FORM}, a finite number or None for each of {len(completions)} "
            f"completions, and gave {found!r:.200}"
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
