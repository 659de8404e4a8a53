# SPDX-License-Identifier: Apache-2.0
"""The callback that tells layers with random numbers their step, in training runs."""

import pytest
import torch
from grpo_runs import trainer_factory
from tiny_models import make_model
from transformers import TrainerControl, TrainerState

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.layers import random_layers
from hf_mxfp4.quantizer.swap import quantize_linears
from hf_mxfp4.rl import QuantizationStepCallback


RANDOM = MXFP4RLConfig(
    preset="w4a4g4",
    macro_block=None,
    outlier_fallback=None,
    dgrad={"grad": "rceil+stochastic"},
    wgrad={"grad": "rceil+stochastic", "rotation": "random-16"},
)


def test_the_step_is_the_trainers():
    model = make_model()
    quantize_linears(model, RANDOM)
    state = TrainerState()
    state.global_step = 12
    QuantizationStepCallback().on_step_begin(None, state, TrainerControl(), model=model)
    assert [layer.rng.step for layer in random_layers(model)] == [12] * 14


def test_a_model_without_random_numbers_is_refused():
    with pytest.raises(ValueError, match="no layer that draws random numbers"):
        QuantizationStepCallback().on_step_begin(None, TrainerState(), TrainerControl(), model=make_model())


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_run_repeats_itself(tmp_path, checkpointing):
    weights = []
    for run in range(2):
        build = trainer_factory(tmp_path / str(run))
        trainer = build(scheme=RANDOM, max_steps=2, gradient_checkpointing=checkpointing)
        trainer.train()
        assert {layer.rng.step for layer in random_layers(trainer.model)} == {1}
        weights.append([p.detach().clone() for p in trainer.model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def test_a_run_without_random_numbers_has_no_callback(tmp_path):
    trainer = trainer_factory(tmp_path)(scheme=MXFP4RLConfig(preset="w4a4g4"))
    assert not any(isinstance(c, QuantizationStepCallback) for c in trainer.callback_handler.callbacks)


def test_error_components_are_not_claimed_for_a_rotated_forward_product(tmp_path):
    build = trainer_factory(tmp_path)
    assert build(scheme=RANDOM, error_every=1).error_callback is not None
    rotated = MXFP4RLConfig(fprop={"rotation": "deterministic-16"})
    trainer = build(scheme=rotated, error_every=1, max_steps=1)
    assert trainer.error_callback is None
    trainer.train()
