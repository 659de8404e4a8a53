# SPDX-License-Identifier: Apache-2.0
"""Weights that oscillate between two grid points are reset, others are not."""

from types import SimpleNamespace

import pytest
import torch
from tiny_models import make_model
from torch import nn

from hf_mxfp4 import MXFP4Experts, MXFP4Linear, MXFP4RLConfig
from hf_mxfp4.rl import OscillationResetCallback


# Plain MXFP4: with a 6 in its block the grid is 0, .5, 1, 1.5, 2, 3, 4, 6, and .75 lies between two points.
PLAIN = MXFP4RLConfig(macro_block=None, outlier_fallback=None)


def layer(config=PLAIN, rows=1):
    linear = MXFP4Linear(32, rows, bias=False, config=config)
    with torch.no_grad():
        linear.weight.fill_(1.0)
        linear.weight[:, 0] = 6.0
    return linear


def run(callback, model, moves, state=None):
    """Apply one function of the step to the weights per optimizer step, as a trainer does."""
    state = state or SimpleNamespace(global_step=0, max_steps=len(moves), log_history=[])
    if state.global_step == 0:
        callback.on_train_begin(None, state, None, model=model)
    for move in moves:
        callback.on_step_begin(None, state, None)
        with torch.no_grad():
            move(model)
        callback.on_optimizer_step(None, state, None)
        state.global_step += 1
    return state


def swing(index, low, high):
    """Moves that set one element to two values in turn."""
    return [lambda m, v=v: m.weight.view(-1)[index].fill_(v) for v in (low, high) * 4]


def test_an_oscillating_weight_is_set_to_its_grid_point_and_a_drifting_one_is_not():
    model = layer()
    with torch.no_grad():
        model.weight[0, 5], model.weight[0, 6] = 0.76, 0.7
    swings = swing(5, 0.74, 0.76)  # travels .02 a step, its value .5: ratio 25

    def move(step):
        def apply(m):
            swings[step](m)
            m.weight[0, 6] += 0.08  # crosses .75, 1.25: travels .64 and its value about .5

        return apply

    callback = OscillationResetCallback(start=0, period=9, window=8, ratio=8)
    before = model.weight.detach().clone()
    run(callback, model, [move(i) for i in range(8)])
    assert callback.history == [{"step": 8, "n_reset": 1, "n_weights": 32}] and callback.n_reset == 1
    assert model.weight[0, 5] == 1.0  # from .76
    assert model.weight[0, 6].item() == pytest.approx(0.7 + 8 * 0.08)
    rest = [i for i in range(32) if i not in (5, 6)]
    assert torch.equal(model.weight[0, rest], before[0, rest])


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_experts_are_watched_too(family):
    plain = make_model(family, layers=1).model.layers[0].mlp.experts
    experts = MXFP4Experts.from_experts(plain, PLAIN, "model.layers.0.mlp.experts")
    matrix = experts.rows_first(experts.down_proj)[2]  # [N, K] of expert 2
    with torch.no_grad():
        matrix[3].fill_(1.0)
        matrix[3, 0], matrix[3, 5] = 6.0, 0.76

    def to(value):
        def move(_):
            matrix[3, 5] = value

        return move

    callback = OscillationResetCallback(period=9, window=8, ratio=24)
    run(callback, experts, [to(value) for value in (0.74, 0.76) * 4])
    weights = experts.gate_up_proj.numel() + experts.down_proj.numel()
    assert callback.history == [{"step": 8, "n_reset": 1, "n_weights": weights}]
    assert matrix[3, 5] == 1.0


@pytest.mark.parametrize("ratio, expected", [(24.0, 1), (26.0, 0)])
def test_the_ratio_is_that_of_travels(ratio, expected):
    model = layer()
    with torch.no_grad():
        model.weight[0, 5] = 0.76
    callback = OscillationResetCallback(period=9, window=8, ratio=ratio)
    run(callback, model, swing(5, 0.74, 0.76))
    assert callback.n_reset == expected


def test_windows_begin_where_they_should():
    model = layer()
    callback = OscillationResetCallback(start=3, period=10, window=2, ratio=8)
    still = [lambda m: None] * 20
    run(callback, model, still)
    assert [entry["step"] for entry in callback.history] == [5, 15]
    assert callback.n_reset == 0 and not callback._travels  # nothing is kept between windows


def test_a_run_resumed_within_a_window_skips_it():
    model = layer()
    callback = OscillationResetCallback(start=0, period=10, window=4)
    callback.on_train_begin(None, SimpleNamespace(global_step=2, max_steps=20), None, model=model)
    state = SimpleNamespace(global_step=2, max_steps=20, log_history=[])
    run(callback, model, [lambda m: None] * 15, state)
    assert [entry["step"] for entry in callback.history] == [14]


def test_the_counts_are_logged_once():
    model = layer()
    with torch.no_grad():
        model.weight[0, 5] = 0.76
    callback = OscillationResetCallback(period=9, window=8)
    state = run(callback, model, swing(5, 0.74, 0.76))
    state.log_history.append({"loss": 1.0})
    logs = {"loss": 1.0}
    callback.on_log(None, state, None, logs=logs)
    assert logs["oscillation/n_reset"] == 1 and logs["oscillation/share"] == pytest.approx(1 / 32)
    assert state.log_history[-1]["oscillation/n_reset"] == 1
    logs = {}
    callback.on_log(None, state, None, logs=logs)
    assert not logs


@pytest.mark.parametrize(
    "options", [{"start": -1}, {"window": 0}, {"period": 50, "window": 50}, {"ratio": 0.0}, {"ratio": float("nan")}]
)
def test_bad_arguments(options):
    with pytest.raises(ValueError, match="start must not be negative"):
        OscillationResetCallback(**options)


def begin(model, **options):
    state = SimpleNamespace(global_step=0, max_steps=100, log_history=[])
    OscillationResetCallback(**options).on_train_begin(None, state, None, model=model)


def test_models_without_anything_to_reset_are_refused():
    with pytest.raises(ValueError, match="Linear has no layer whose weight is quantized by rounding to nearest"):
        begin(nn.Linear(32, 1))
    random = MXFP4RLConfig(macro_block=None, outlier_fallback=None, fprop={"weight": "rceil+stochastic"})
    for config in (random, MXFP4RLConfig(fprop={"weight": "full"})):
        with pytest.raises(ValueError, match="rounding to nearest"):
            begin(layer(config))
    frozen = layer()
    frozen.weight.requires_grad_(False)
    with pytest.raises(ValueError, match="rounding to nearest"):
        begin(frozen)
