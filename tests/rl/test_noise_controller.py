# SPDX-License-Identifier: Apache-2.0
"""Noise that follows a target entropy, on plants that answer to it, and in training."""

import logging
import math
import random

import pytest
import torch
from grpo_runs import logged, prompts
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_mxfp4.rl import EntropyNoiseController


class Plant:
    """A policy whose entropy goes, a share of the way each step, to a level that noise raises."""

    def __init__(self, base=0.2, gain=20.0, speed=0.3, jitter=0.0):
        self.base, self.gain, self.speed, self.jitter = base, gain, speed, jitter
        self.entropy, self.random = 2 * base, random.Random(0)

    def step(self, sigma):
        self.entropy += self.speed * (self.base + self.gain * sigma - self.entropy)
        return self.entropy * math.exp(self.jitter * self.random.gauss(0, 1))


def drive(controller, plant, steps):
    sigmas, entropies = [], []
    for _ in range(steps):
        entropies.append(plant.step(controller.sigma))
        sigmas.append(controller.sigma)
        controller.observe(entropies[-1])
        controller.update()
    return sigmas, entropies


@pytest.mark.parametrize("speed", [1.0, 0.3, 0.1])
def test_entropy_settles_at_the_target(speed):
    sigmas, entropies = drive(EntropyNoiseController(1e-3, 5e-2, target=0.5), Plant(speed=speed), 600)
    assert entropies[-100:] == pytest.approx([0.5] * 100, rel=0.01)
    assert sigmas[-1] == pytest.approx((0.5 - 0.2) / 20, rel=0.02)


def test_entropy_stays_near_the_target_when_it_is_measured_on_small_batches():
    _, entropies = drive(EntropyNoiseController(1e-3, 5e-2, target=0.5), Plant(jitter=0.1), 800)
    tail = entropies[-400:]
    assert sum(tail) / len(tail) == pytest.approx(0.5, rel=0.05)


@given(
    target=st.floats(0.05, 5.0),
    rate=st.floats(0.005, 0.5),
    base=st.floats(0.0, 2.0),
    speed=st.floats(0.02, 1.0),
    jitter=st.floats(0.0, 1.0),
)
@settings(max_examples=60, deadline=None)
def test_sigma_keeps_its_bounds_and_its_rate_whatever_the_policy_does(target, rate, base, speed, jitter):
    controller = EntropyNoiseController(1e-4, 1e-2, target=target, rate_limit=rate)
    sigmas, _ = drive(controller, Plant(base=base, speed=speed, jitter=jitter), 60)
    assert sigmas[0] == 0 and sigmas[1] == 1e-4
    assert all(1e-4 <= sigma <= 1e-2 for sigma in sigmas[1:])
    changes = [abs(math.log(b / a)) for a, b in zip(sigmas[1:], sigmas[2:], strict=False)]
    assert max(changes) <= rate * (1 + 1e-9)


def test_a_target_out_of_reach_saturates_with_one_warning(caplog):
    recorded = []
    controller = EntropyNoiseController(
        1e-3, 1e-2, target=5.0, rate_limit=0.2, record=lambda name, value: recorded.append((name, value))
    )
    with caplog.at_level(logging.WARNING, "hf_mxfp4"):
        sigmas, _ = drive(controller, Plant(), 40)
    assert sigmas[-1] == 1e-2 and controller.saturated == 1
    assert sum("is not enough to raise it" in record.message for record in caplog.records) == 1
    assert recorded[:2] == [("aqn/target_entropy", 5.0), ("aqn/saturated", 0)]
    assert recorded[-1] == ("aqn/saturated", 1)


def test_entropy_that_noise_cannot_lower_saturates_below():
    controller = EntropyNoiseController(1e-3, 1e-2, target=0.01)
    sigmas, _ = drive(controller, Plant(), 40)
    assert sigmas[-1] == 1e-3 and controller.saturated == -1


def test_a_collapsed_policy_gets_more_noise_and_no_error():
    controller = EntropyNoiseController(1e-3, 1e-2, target=0.3, rate_limit=0.1)
    for _ in range(3):
        controller.observe(0.0)
        controller.update()
    assert controller.sigma == pytest.approx(1e-3 * math.exp(0.2))


def test_without_a_target_half_of_the_entropy_at_the_start_is_kept():
    controller = EntropyNoiseController(1e-3, 1e-2)
    for entropy in (1.0, 2.0, 3.0):
        assert controller.sigma == 0 and controller.target is None
        controller.observe(entropy)
        controller.update()
    assert controller.target == 1.0 and controller.sigma == 1e-3


def test_micro_batches_of_a_step_are_averaged_and_empty_ones_left_out():
    controller = EntropyNoiseController(1e-3, 1e-2, target=1.0, rate_limit=1.0)
    controller.observe(1.0)
    controller.update()
    for entropy in (0.25, 0.75, math.nan):
        controller.observe(entropy)
    controller.update()
    assert controller.sigma == pytest.approx(1e-3 * 2**0.25)
    before = controller.sigma
    controller.observe(math.nan)
    controller.update()
    assert controller.sigma == before


def test_no_entropy_is_an_error():
    with pytest.raises(RuntimeError, match="does not log"):
        EntropyNoiseController(1e-3, 1e-2).update()
    controller = EntropyNoiseController(1e-3, 1e-2)
    with pytest.raises(RuntimeError, match="give aqn_target_entropy"):
        drive(controller, Plant(base=0.0, gain=0.0), 3)


def test_state_continues_to_the_bit():
    whole, first = EntropyNoiseController(1e-4, 1e-1), EntropyNoiseController(1e-4, 1e-1)
    plants = Plant(jitter=0.2), Plant(jitter=0.2)
    expected, _ = drive(whole, plants[0], 40)
    found, _ = drive(first, plants[1], 2)
    for steps in (18, 20):
        state = first.state_dict()
        first.observe(99.0)  # a step that fails leaves nothing behind
        first = EntropyNoiseController(1e-4, 1e-1)
        first.load_state_dict(state)
        found += drive(first, plants[1], steps)[0]
    assert found == expected


def test_a_target_given_at_resuming_counts():
    controller = EntropyNoiseController(1e-4, 1e-1, target=0.7)
    controller.load_state_dict(EntropyNoiseController(1e-4, 1e-1, target=0.5).state_dict())
    assert controller.target == 0.7


# ---- in training ----------------------------------------------------------------------------------------------------


LOOP = {"aqn_schedule": "entropy", "aqn_rate_limit": 0.3, "learning_rate": 1e-2}


def test_the_loop_is_driven_by_the_logged_entropy(build):
    # Two micro-batches a step, which are logged as one value.
    options = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 5}
    trainer = build(aqn_target_entropy=4.0, **LOOP, **options)
    trainer.train()
    replayed, expected = EntropyNoiseController(1e-3, 1e-2, 4.0, 0.3), {}
    for step, entropy in logged(trainer, "entropy").items():
        expected[step] = replayed.sigma
        replayed.observe(entropy)
        replayed.update()
    assert logged(trainer, "aqn/sigma") == pytest.approx(expected, rel=1e-6)
    assert logged(trainer, "aqn/sigma")[1] == 0 and logged(trainer, "aqn/sigma")[5] > 1e-3
    assert set(logged(trainer, "aqn/target_entropy").values()) == {4.0}
    assert logged(trainer, "aqn/n_modules") == {1: 0, 2: 5, 3: 5, 4: 5, 5: 5}


@pytest.mark.parametrize("schedule", ["entropy", "exponential"])
def test_a_run_whose_completions_are_all_masked_has_no_entropy_and_no_alarm(build, schedule):
    options = {**LOOP, "aqn_schedule": schedule, "max_completion_length": 2, "mask_truncated_completions": True}
    # None ends in time.
    trainer = build(generation_kwargs={"min_new_tokens": 2}, **options)
    trainer.train()
    assert trainer.state.global_step == 4
    assert logged(trainer, "entropy") == dict.fromkeys(range(1, 5))
    assert logged(trainer, "entropy/alarm") == {} and trainer.entropy_callback.alarms == []
    if schedule == "entropy":
        assert set(logged(trainer, "aqn/sigma").values()) == {0.0} and trainer.noise_controller.target is None


def test_a_micro_batch_without_tokens_leaves_the_entropy_of_its_step_alone(build):
    options = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 2}
    trainer = build(aqn_target_entropy=4.0, **LOOP, **options)
    observed, observe, prepare = [], trainer.noise_controller.observe, trainer._prepare_inputs
    trainer.noise_controller.observe = lambda entropy: observed.append(entropy) or observe(entropy)

    def every_other_masked(batch):
        inputs = prepare(batch)
        mask = inputs["completion_mask"]
        return {**inputs, "completion_mask": torch.zeros_like(mask) if len(observed) % 2 else mask}

    trainer._prepare_inputs = every_other_masked
    trainer.train()
    assert [math.isnan(entropy) for entropy in observed] == [False, True, False, True]
    assert logged(trainer, "entropy") == {1: observed[0], 2: observed[2]} and observed[0] > 0


def test_a_resumed_loop_repeats_the_one_that_was_not_stopped(build, tmp_path):
    options = {**LOOP, "max_steps": 6, "save_strategy": "steps", "save_steps": 4}
    whole = build(output_dir=str(tmp_path / "whole"), **options)
    whole.train()
    resumed = build(**options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-4"))
    for key in ("aqn/sigma", "aqn/target_entropy", "entropy"):
        assert logged(resumed, key) == logged(whole, key) and logged(whole, key)[6] > 0
    assert resumed.noise_controller.state_dict() == whole.noise_controller.state_dict()


def test_evaluation_neither_moves_the_loop_nor_gets_noise(build):
    trainer = build(aqn_target_entropy=4.0, eval_dataset=prompts(4), per_device_eval_batch_size=4, **LOOP)
    trainer.noise_controller.sigma = 1e-2
    state = trainer.noise_controller.state_dict()
    # Training's log is not empty when evaluation comes between two of its entries.
    trainer._metrics["train"]["entropy"].append(1.0)
    sigmas, generate = [], trainer._generate
    trainer._generate = lambda prompts: sigmas.append(trainer._sigma()) or generate(prompts)
    assert trainer.evaluate()["eval_entropy"] > 0
    assert sigmas and not any(sigmas)
    assert trainer.noise_controller.state_dict() == state and trainer.noise_controller._observed == []
    assert trainer._metrics["train"] == {"entropy": [1.0]}
