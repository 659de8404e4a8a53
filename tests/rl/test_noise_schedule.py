# SPDX-License-Identifier: Apache-2.0
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_mxfp4.rl import NoiseSchedule


def test_values_are_those_of_the_formula():
    values = [NoiseSchedule(1.0, 0.01, 4).sigma(step, 8) for step in range(8)]
    assert values == pytest.approx([0, 0, 1.0, 1.0, 0.1, 0.1, 0.01, 0.01])


@pytest.mark.parametrize(
    ("stages", "expected"),
    [(1, [0.5, 0.5, 0.5, 0.5]), (2, [0, 0, 0.5, 0.5]), (3, [0, 0, 0.5, 0.1])],
    ids=["one-stage-is-constant", "two-stages", "three-stages"],
)
def test_schedule_with_few_stages(stages, expected):
    schedule = NoiseSchedule(0.5, 0.1, stages)
    assert [schedule.sigma(step, 4) for step in range(4)] == pytest.approx(expected)


@pytest.mark.parametrize(
    "arguments", [(1e-3, 1e-2, 10), (1e-2, 0.0, 10), (1e-2, 1e-3, 0), (math.inf, 1e-3, 10), (math.nan, 1e-3, 10)]
)
def test_schedule_refuses_what_is_no_schedule(arguments):
    with pytest.raises(ValueError):
        NoiseSchedule(*arguments)


@given(
    stages=st.integers(1, 40),
    max_steps=st.integers(1, 500),
    start=st.floats(1e-3, 1.0),
    ratio=st.floats(1e-3, 1.0),
)
@settings(max_examples=150, deadline=None)
def test_sigma_is_finite_bounded_and_never_rises_after_it_set_in(stages, max_steps, start, ratio):
    schedule = NoiseSchedule(start, start * ratio, stages)
    values = [schedule.sigma(step, max_steps) for step in range(max_steps + 5)]
    assert all(math.isfinite(value) for value in values)
    silent = -(-max_steps // stages) if stages > 1 else 0
    assert not any(values[:silent]) and all(values[silent:])
    noisy = values[silent:]
    assert all(start * ratio * (1 - 1e-9) <= value <= start * (1 + 1e-9) for value in noisy)
    assert all(a >= b * (1 - 1e-12) for a, b in zip(noisy, noisy[1:], strict=False))
    assert len(set(values[max_steps:])) == 1
    if max_steps >= stages:  # otherwise steps leave stages out
        assert noisy[0] == pytest.approx(start)


def test_fewer_steps_than_stages_leave_step_0_alone_without_noise():
    values = [NoiseSchedule(1.0, 0.1, 10).sigma(step, 4) for step in range(4)]
    assert values[0] == 0 and all(value > 0 for value in values[1:])
