# SPDX-License-Identifier: Apache-2.0
import asyncio
import functools
import math

import pytest
from torch import nn

from hf_mxfp4.rl.rewards.guard import RewardError, guard_reward


def length(completions, **kwargs):
    return [len(text) for text in completions]


def test_good_rewards_pass_unchanged_and_the_name_stays():
    guarded = guard_reward(length)
    assert guarded(completions=["a", "bcd"]) == [1.0, 3.0]
    assert guarded.__name__ == "length"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_reward_names_function_and_completion(value):
    def broken(completions, **kwargs):
        return [0.0, value]

    with pytest.raises(RewardError, match=r"'broken' returned .* for completion 1: 'second'"):
        guard_reward(broken)(completions=["first", "second"])


def test_exception_names_the_function_and_keeps_its_cause():
    def broken(completions, **kwargs):
        return 1 / 0

    with pytest.raises(RewardError, match="'broken' raised ZeroDivisionError") as caught:
        guard_reward(broken)(completions=["x"])
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize("value", [3.0, ["high"], [[1.0]], None], ids=["scalar", "text", "nested", "none"])
def test_what_is_no_list_of_numbers_is_an_error(value):
    with pytest.raises(RewardError, match="one number"):
        guard_reward(lambda completions, **kwargs: value)(completions=["x"])


def test_async_functions_stay_async_and_are_guarded():
    async def slow(completions, **kwargs):
        return [math.nan]

    guarded = guard_reward(slow)
    assert asyncio.iscoroutinefunction(guarded)
    with pytest.raises(RewardError, match="'slow' returned nan"):
        asyncio.run(guarded(completions=["x"]))


def test_rewards_beyond_float32_are_refused():
    assert guard_reward(lambda completions, **kwargs: [3.4e38])(completions=["x"]) == [3.4e38]
    with pytest.raises(RewardError, match=r"returned -1e\+39, which is no finite float32 number"):
        guard_reward(lambda completions, **kwargs: [-1e39])(completions=["x"])


def test_reward_models_and_names_are_left_alone():
    model = nn.Linear(1, 1)
    assert guard_reward(model) is model
    assert guard_reward("org/reward-model") == "org/reward-model"


def test_partials_have_the_name_of_their_function_and_stay_async():
    async def judged(completions, scale, **kwargs):
        return [scale * len(text) for text in completions]

    twice = functools.partial(functools.partial(judged, scale=2.0))
    names = [guard_reward(function).__name__ for function in (functools.partial(length), twice)]
    assert names == ["length", "judged"]
    assert asyncio.iscoroutinefunction(guard_reward(twice))
    assert asyncio.run(guard_reward(twice)(completions=["abc"])) == [6.0]

    class Judge:
        async def __call__(self, completions, scale, **kwargs):
            return [math.nan]

    guarded = guard_reward(functools.partial(Judge(), scale=1.0))
    with pytest.raises(RewardError, match="'Judge' returned nan"):
        asyncio.run(guarded(completions=["x"]))
