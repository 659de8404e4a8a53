# SPDX-License-Identifier: Apache-2.0
"""Soft overlong punishment, as one more reward function of the trainer."""

import pytest
from grpo_runs import even_digits, prompts

from hf_mxfp4 import MXFP4GRPOConfig, MXFP4GRPOTrainer


def constant(completions, **kwargs):
    return [1.0] * len(completions)


def test_it_is_weighted_beside_the_others(build):
    trainer = build([even_digits, constant], reward_weights=[2.0, 0.5], overlong_buffer=2, overlong_penalty=0.3)
    assert trainer.reward_weights.tolist() == pytest.approx([2.0, 0.5, 0.3])
    assert trainer.reward_func_names == ["even_digits", "constant", "soft_overlong_punishment_reward"]
    assert trainer.args.reward_weights == [2.0, 0.5]  # the caller's config stays as it is


def test_weights_for_the_penalty_among_those_given_are_refused(build):
    with pytest.raises(ValueError, match="reward weights"):
        build(reward_weights=[1.0, 0.5], overlong_buffer=2)


def test_training_logs_it_and_the_reward_contains_it(build):
    trainer = build(constant, overlong_buffer=3, overlong_penalty=0.5, max_steps=3)
    trainer.train()
    entries = trainer.state.log_history[:-1]
    # Lengths differ where answers do not.
    assert len(entries) == 3 and min(entry["frac_reward_zero_std"] for entry in entries) < 1
    for entry in entries:
        punished = entry["rewards/soft_overlong_punishment_reward/mean"]
        assert -1 <= punished < 0
        assert entry["reward"] == pytest.approx(1 + 0.5 * punished, abs=1e-5)


def config(tmp_path, **options):
    return MXFP4GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, **options)


def test_a_buffer_longer_than_a_completion_is_refused(tmp_path):
    message = "overlong_buffer=5 is more than max_completion_length=4"
    with pytest.raises(ValueError, match=message):
        config(tmp_path, overlong_buffer=5, max_completion_length=4)
    # A length that is only known later.
    late = config(tmp_path, overlong_buffer=5, max_completion_length=None)
    late.check_overlong_buffer()
    late.max_completion_length = 4
    with pytest.raises(ValueError, match=message):
        late.check_overlong_buffer()
    # Before anything is loaded.
    with pytest.raises(ValueError, match=message):
        MXFP4GRPOTrainer("no/such-model", even_digits, late, prompts())


def test_a_buffer_of_completions_without_an_end_is_refused(build):
    with pytest.raises(ValueError, match="overlong_buffer=5 needs max_completion_length"):
        build(overlong_buffer=5, max_completion_length=None)
