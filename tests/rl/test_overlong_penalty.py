# SPDX-License-Identifier: Apache-2.0
"""Soft overlong punishment, as one more reward function of the trainer."""

import pytest
from grpo_runs import even_digits, prompts

from hf_mxfp4 import MXFP4GRPOConfig, MXFP4GRPOTrainer


def constant(completions, **kwargs):
    return [1.0] * len(completions)


@pytest.mark.parametrize(("length", "expected"), [(1, 0.0), (6, 0.0), (7, -0.25), (8, -0.5), (10, -1.0)])
def test_the_penalty_rises_over_the_buffer(build, length, expected):
    trainer = build(max_completion_length=10, overlong_buffer=4)
    assert trainer.reward_funcs[-1](completions=["x"], completion_ids=[[5] * length]) == [expected]


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


def test_longer_completions_get_lower_advantages(build):
    trainer = build(constant, overlong_buffer=3)
    trainer.model.train()
    trainer.state.max_steps = 4
    rows = [dict(row) for row in trainer.train_dataset.select(range(2)) for _ in range(4)]
    batch = trainer._generate_and_score_completions(rows)
    lengths, advantages = batch["completion_mask"].sum(1).view(2, 4).float(), batch["advantages"].view(2, 4)
    assert (lengths.std(1) > 0).any()
    for length, advantage in zip(lengths, advantages, strict=True):
        assert length[advantage.argmin()] == length.max()


def scored(trainer):
    """Advantages of two prompts' completions, four each, all of the same length."""
    trainer.model.train()
    trainer.state.max_steps = 4
    rows = [dict(row) for row in trainer.train_dataset.select(range(2)) for _ in range(4)]
    return trainer._generate_and_score_completions(rows)["advantages"].tolist()


def test_none_by_default(build):
    assert build().reward_func_names == ["even_digits"]


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


def test_a_penalty_that_is_not_used_is_said(tmp_path, caplog):
    config(tmp_path, overlong_penalty=0.5)
    assert "overlong_penalty=0.5 has no effect without overlong_buffer" in caplog.text
    caplog.clear()
    config(tmp_path)
    config(tmp_path, overlong_buffer=2, overlong_penalty=0.5)
    assert "overlong_penalty" not in caplog.text
