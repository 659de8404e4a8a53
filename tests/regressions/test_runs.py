# SPDX-License-Identifier: Apache-2.0
"""Mistakes that other projects made in runs, evaluations and records: B13, B14, B25, B28, and B35 as far as it applies,
one test named after each or two; B26 is in `tests/rl/test_vllm_sync.py`, B27, B30 and B31 in
`tests/recipes/test_grpo.py`, B32 in `tests/rl/test_trl_trainers.py`."""

import multiprocessing
import threading

import pytest
import torch
from grpo_runs import even_digits, logged, prompts, trainer_factory
from same_bits import assert_same, weights
from tiny_models import make_model

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.integrations.transformers.swap import quantize_linears
from hf_mxfp4.rl import NormNoise


@pytest.fixture
def run(tmp_path):
    return trainer_factory(tmp_path)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_b13_a_constant_reward_trains_to_the_end_logs_its_share_and_changes_nothing(run, value):
    trainer = run(lambda completions, **kwargs: [value] * len(completions), max_steps=2)
    before = weights(trainer.model)
    trainer.train()
    assert trainer.state.global_step == 2
    assert logged(trainer, "frac_reward_zero_std") == {1: 1.0, 2: 1.0}
    assert_same(weights(trainer.model), before)


def test_b14_b25_evaluations_come_at_their_cadence_and_after_the_last_step_beside_sigma(run):
    rows = prompts(4)
    trainer = run(eval_dataset=rows, max_steps=5, eval_strategy="steps", eval_steps=2, per_device_eval_batch_size=4)
    trainer.train()
    evaluated, sigma = logged(trainer, "eval_reward"), logged(trainer, "aqn/sigma")
    assert list(evaluated) == [2, 4, 5]
    assert evaluated.keys() <= sigma.keys() and any(sigma[step] > 0 for step in evaluated)


def test_b28_what_touched_nothing_is_an_error_and_not_a_result(run):
    """Here the counts come from where the work is done: layers that ran, norms that ran."""
    with pytest.raises(ValueError, match="matches no layer"):
        quantize_linears(torch.nn.Sequential(torch.nn.ReLU()), MXFP4RLConfig())
    with pytest.raises(ValueError, match="would train in full precision"):
        run(policy=make_model(layers=1, hidden=32, intermediate=48))
    noise = NormNoise(make_model(), seed=0)
    with pytest.raises(RuntimeError, match="reached none of 5 norms"), noise.active(0, 0.1):
        make_model()(torch.tensor([[2, 3]]))  # another copy of the model, as in another process


def test_b35_a_run_without_a_tracker_ends_and_leaves_nothing_running(run):
    before = set(threading.enumerate())
    trainer = run(even_digits, max_steps=1, report_to="none", logging_strategy="no")
    trainer.train()
    assert trainer.state.global_step == 1
    assert not multiprocessing.active_children()
    assert not [thread for thread in threading.enumerate() if thread not in before and not thread.daemon]
