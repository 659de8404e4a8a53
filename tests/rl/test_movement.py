# SPDX-License-Identifier: Apache-2.0
"""How far a step moves quantized weights over how far it moves their masters."""

import math
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DeepSpeedOptimizerWrapper
from grpo_runs import logged, quantized
from peft import LoraConfig, get_peft_model
from torch import nn

from hf_mxfp4 import MXFP4Experts, MXFP4Linear, MXFP4RLConfig
from hf_mxfp4.rl import StepMovementCallback


# Plain MXFP4: with a 6 in its block the grid is 0, .5, 1, 1.5, 2, 3, 4, 6. Of two values as near, the one of the even
# code is taken: 1 for .75 and for 1.25.
PLAIN = MXFP4RLConfig(scale_rule="rceil", macro_block=None)
SCHEMES = {
    "default": MXFP4RLConfig(),
    "plain": PLAIN,
    "outlier fallback": MXFP4RLConfig(preset="w4a4", macro_search="hybrid", outlier_fallback=0.5),
    "tiles": MXFP4RLConfig(macro_block=None, fprop={"weight": "rceil+32x32"}),
}
STEP = 2.0**-20


def layer(config=PLAIN, rows=1):
    linear = MXFP4Linear(32, rows, bias=False, config=config)
    with torch.no_grad():
        linear.weight.fill_(1.0)
        linear.weight[:, 0] = 6.0
    return linear


def run(callback, model, moves, optimizer=None):
    """Apply one function to the weights per optimizer step, as a trainer does; the logs of each step."""
    state = SimpleNamespace(global_step=0, max_steps=len(moves), log_history=[])
    callback.on_train_begin(None, state, None, model=model)
    logs = []
    for move in moves:
        callback.on_step_begin(None, state, None, optimizer=optimizer)
        if optimizer is None:
            callback.on_pre_optimizer_step(None, state, None)
        with torch.no_grad():
            move(model)
        if optimizer is not None:
            callback.on_pre_optimizer_step(None, state, None)
        state.global_step += 1
        callback.on_step_end(None, state, None)
        state.log_history.append({"step": state.global_step})
        logs.append({})
        callback.on_log(None, state, None, logs=logs[-1])
    return logs


def add(index, value):
    def move(model):
        model.weight.view(-1)[index] += value

    return move


def measured(weights, step, config):
    """The total of one step of a layer with these weights."""
    model = MXFP4Linear(weights.shape[1], len(weights), bias=False, config=config)
    model.weight.data.copy_(weights)
    callback = StepMovementCallback()
    run(callback, model, [lambda m: m.weight.add_(step)])
    return SimpleNamespace(**callback.history[0]["total"])


def test_weights_on_boundaries_move_as_far_as_they_must():
    model = layer()
    with torch.no_grad():
        model.weight[0, 5] = 0.75
        model.weight[0, 6] = 1.25

    def move(m):
        m.weight[0, 5] -= STEP  # to .5
        m.weight[0, 6] += STEP  # to 1.5
        m.weight[0, 7] += STEP  # stays 1

    callback = StepMovementCallback()
    (logs,) = run(callback, model, [move])
    # Two of three elements move by half a unit along their steps: (2 * .5 * STEP) / (3 * STEP**2).
    assert logs["movement/total"] == pytest.approx(1 / (3 * STEP), rel=1e-12)
    assert logs["movement/flipped_share"] == 2 / 32
    # The mean squared error is 2 * .25**2 / 32, so that values lie about .2165 apart.
    chance = math.sqrt(math.sqrt(12 * 0.125 / 32) * 3 * STEP**3) / (3 * STEP**2)
    assert logs["movement_se/total"] == pytest.approx(chance, rel=1e-12)
    (entry,) = callback.history
    assert entry["step"] == 1
    assert entry["total"]["n_changed"] == 2
    assert entry["total"]["n_weights"] == 32


def test_values_that_move_with_their_scale_count_with_the_direction_they_take():
    before = torch.ones(1, 32)
    before[0, :2] = torch.tensor([6.0, 0.6])
    step = torch.zeros(1, 32)
    step[0, :2] = torch.tensor([2.0, -STEP])  # the scale doubles: 6 becomes 8, and .5 becomes 1 against the step
    found = measured(before, step, PLAIN)
    assert found.ratio == pytest.approx((2.0 * 2.0 - 0.5 * STEP) / (4.0 + STEP**2), rel=1e-6)
    assert found.n_changed == 2


@pytest.mark.parametrize("name", SCHEMES)
def test_in_general_position_it_is_one(name):
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(256, 256, generator=generator) * 0.02
    step = torch.randn(256, 256, generator=generator) * 4e-5
    found = measured(weights, step, SCHEMES[name])
    assert abs(found.ratio - 1) < 3 * found.standard_error < 0.6
    assert found.n_weights == 2**16


def test_the_standard_error_is_that_of_repeated_measurements():
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(100):
        weights = torch.randn(64, 128, generator=generator) * 0.02
        found.append(measured(weights, torch.randn(64, 128, generator=generator).sign() * 1e-5, PLAIN))
    ratios = torch.tensor([one.ratio for one in found])
    errors = torch.tensor([one.standard_error for one in found])
    assert abs(ratios.mean() - 1) < 3 * ratios.std() / 100**0.5
    assert 0.8 < errors.square().mean().sqrt() / ratios.std() < 1.25


def test_the_first_step_that_moves_then_every_few_and_the_last():
    callback = StepMovementCallback(every=4)
    moving = add(5, STEP)
    stay = add(5, 0.0)
    logs = run(callback, layer(), [stay, stay, moving, stay, moving, moving, moving, stay, stay, stay, moving])
    # Due at 4, 8 and 11: no master moves in 4 nor in 8, 9 and 10.
    assert [entry["step"] for entry in callback.history] == [3, 5, 11]
    assert [step for step, entry in enumerate(logs, 1) if "movement/total" in entry] == [3, 5, 11]


def test_deepspeed_steps_in_the_backward_pass():
    callback = StepMovementCallback()
    optimizer = DeepSpeedOptimizerWrapper.__new__(DeepSpeedOptimizerWrapper)
    run(callback, layer(), [add(5, 0.5)], optimizer=optimizer)
    assert callback.history[0]["total"]["ratio"] == 1.0


def test_weights_that_are_not_finite_are_passed_over():
    callback = StepMovementCallback()
    run(callback, layer(), [add(5, float("nan")), lambda m: m.weight[0, 5].fill_(1.0), add(5, 0.5)])
    assert [entry["step"] for entry in callback.history] == [3]


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_layer_types_and_experts(family):
    model = quantized(PLAIN, family)
    experts = next(m for m in model.modules() if isinstance(m, MXFP4Experts))
    with torch.no_grad():
        experts.rows_first(experts.down_proj)[2, 3].fill_(1.0)
        experts.rows_first(experts.down_proj)[2, 3, 0] = 6.0

    def move(m):
        experts.rows_first(experts.down_proj)[2, 3, 5] += 0.5
        m.model.layers[1].self_attn.q_proj.weight[0, 0] += 1e-3

    callback = StepMovementCallback()
    (logs,) = run(callback, model, [move])
    n_weights = sum(p.numel() for n, p in model.named_parameters() if "proj" in n and not n.endswith("bias"))
    assert logs["movement/experts.down_proj"] == 1.0
    # What did not move has no ratio.
    assert set(callback.history[0]) == {"step", "total", "q_proj", "experts.down_proj"}
    assert callback.history[0]["total"]["n_weights"] == n_weights


@pytest.mark.parametrize(
    "model",
    [
        lambda: nn.Linear(2, 2),
        lambda: quantized(MXFP4RLConfig(mode="packed")),
        lambda: get_peft_model(quantized(PLAIN), LoraConfig(target_modules="all-linear", r=2)),
        lambda: layer(MXFP4RLConfig(preset="w4a4", fprop={"rotation": "deterministic-16"})),
        lambda: layer(MXFP4RLConfig(macro_block=None, fprop={"weight": "rceil+stochastic"})),
        lambda: layer(MXFP4RLConfig(fprop={"weight": "full"})),
    ],
    ids=["no-layer", "packed", "frozen", "rotated", "random", "full"],
)
def test_models_without_anything_to_measure_are_refused(model):
    state = SimpleNamespace(global_step=0, max_steps=1, log_history=[])
    with pytest.raises(ValueError, match="no step of .* can be measured"):
        StepMovementCallback().on_train_begin(None, state, None, model=model())


def test_a_run_logs_it_and_warns(build, capsys):
    policy = build().model
    with torch.no_grad():  # masters are numbers of 16 bits, as nothing but loading could undo
        for parameter in policy.parameters():
            parameter.copy_(parameter.bfloat16())
    trainer = build(policy=policy, error_every=2, learning_rate=1e-7)
    trainer.train()
    totals = logged(trainer, "movement/total")
    assert list(totals) == [1, 2, 4]
    assert totals[1] > 10
    assert logged(trainer, "movement_se/total")[1] < totals[1] / 3
    assert "load the model with dtype=torch.float32" in capsys.readouterr().err
    assert build(error_every=0).movement_callback is None
