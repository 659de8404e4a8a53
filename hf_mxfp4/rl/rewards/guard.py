# SPDX-License-Identifier: Apache-2.0
"""Reward functions that fail say so: which one, on which completion, and why."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn


LARGEST_REWARD = torch.finfo(torch.float32).max


class RewardError(RuntimeError):
    """A reward function raised, or returned something that is no reward. The message names the function."""


def guard_reward(function: Any) -> Any:
    """Wrap a reward function so that its failures become [`RewardError`]; its name and signature stay. A
    `functools.partial` has the name of its function, as in TRL.

    Reward models and model names are returned as they are. A function may return `None` for a completion it does not
    apply to, but not NaN or infinity.
    """
    if isinstance(function, (str, nn.Module)) or not callable(function):
        return function
    name = getattr(_without_partial(function), "__name__", type(_without_partial(function)).__name__)

    @functools.wraps(function)
    def guarded(*args, **kwargs):
        with _named(name):
            rewards = function(*args, **kwargs)
        return _checked(rewards, name, kwargs.get("completions"))

    @functools.wraps(function)
    async def guarded_async(*args, **kwargs):
        with _named(name):
            rewards = await function(*args, **kwargs)
        return _checked(rewards, name, kwargs.get("completions"))

    wrapped = guarded_async if _is_async(function) else guarded
    wrapped.__name__ = name
    return wrapped


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise RewardError(f"reward function {name!r} raised {type(error).__name__}: {error}") from error


def _without_partial(function: Callable) -> Callable:
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _is_async(function: Callable) -> bool:
    function = _without_partial(function)
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _checked(rewards: Any, name: str, completions: list | None) -> list[float | None]:
    try:
        rewards = [None if reward is None else float(reward) for reward in rewards]
    except (TypeError, ValueError) as error:
        raise RewardError(
            f"reward function {name!r} must return one number (or None) per completion, got {rewards!r:.200}"
        ) from error
    for index, reward in enumerate(rewards):
        # Rewards become float32 tensors, in which larger numbers are infinite.
        if reward is not None and not abs(reward) <= LARGEST_REWARD:
            completion = repr(completions[index])[:200] if completions and index < len(completions) else "unknown"
            raise RewardError(
                f"reward function {name!r} returned {reward}, which is no finite float32 number, for completion "
                f"{index}: {completion}"
            )
    return rewards
