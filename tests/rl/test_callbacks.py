# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from tiny_models import make_model
from transformers import TrainerControl, TrainerState

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.numerics import decompose
from hf_mxfp4.quantizer.swap import quantize_linears
from hf_mxfp4.rl import EntropyCallback, ErrorCallback
from hf_mxfp4.rl.callbacks.base import spread_layers


def feed(callback, entropies, start=1):
    state = TrainerState()
    for step, entropy in enumerate(entropies, start):
        logs = {"entropy": entropy}
        state.global_step = step
        state.log_history.append(dict(logs, step=step))
        callback.on_log(None, state, TrainerControl(), logs=logs)
    return state


def test_healthy_entropy_raises_no_alarm():
    callback = EntropyCallback()
    state = feed(callback, [0.5, 0.45, 0.4, 0.42, 0.38])
    assert callback.alarms == []
    assert callback.history == [(1, 0.5), (2, 0.45), (3, 0.4), (4, 0.42), (5, 0.38)]
    assert [entry["entropy/alarm"] for entry in state.log_history] == [0] * 5


def test_collapse_alarm_begins_once_and_again_after_recovery(capsys):
    callback = EntropyCallback(collapse=0.1)
    feed(callback, [0.5, 0.05, 0.04, 0.3, 0.02])
    assert callback.alarms == [(2, "collapse", 0.05), (5, "collapse", 0.02)]
    assert "entropy collapse" in capsys.readouterr().err


def test_explosion_alarm_is_relative_to_the_start():
    callback = EntropyCallback(explosion=2.0)
    feed(callback, [0.4, 0.5, 0.6, 0.99, 1.01])
    assert callback.alarms == [(5, "explosion", 1.01)]


def test_alarms_can_be_switched_off():
    callback = EntropyCallback(collapse=0, explosion=0)
    feed(callback, [1.0, 1.0, 1.0, 50.0, 0.0])
    assert callback.alarms == []


def test_slope_is_in_nats_per_step():
    callback = EntropyCallback()
    feed(callback, [1.0 - 0.01 * step for step in range(30)])
    assert callback.slope() == pytest.approx(-0.01)


def test_logs_without_entropy_are_ignored():
    callback = EntropyCallback()
    callback.on_log(None, TrainerState(), TrainerControl(), logs={"loss": 1.0})
    callback.on_log(None, TrainerState(), TrainerControl(), logs=None)
    assert callback.history == []


def test_error_components_are_those_of_the_weights():
    model = make_model(layers=3)
    quantize_linears(model, MXFP4RLConfig(preset="w4a16", macro_block=None, outlier_fallback=None))
    recorded = []
    callback = ErrorCallback(every=2, layers=1, record=lambda name, value: recorded.append((name, value)))
    state = TrainerState(max_steps=3)
    callback.on_train_begin(None, state, None, model=model)
    expected = decompose(model.model.layers[0].self_attn.q_proj.weight)
    values = dict(recorded)
    assert values["error/sqnr_db"] == pytest.approx(expected.sqnr_db)
    for part in ("scale_bias", "deadzone", "grid"):
        assert values[f"error/{part}"] == pytest.approx(expected.energy_ratio[part])
    for step in (1, 2, 3):
        state.global_step = step
        callback.on_step_end(None, state, None)
    assert [entry["step"] for entry in callback.history] == [0, 2, 3]


def test_chosen_layers_span_the_depth():
    model = make_model(layers=4)
    names, _ = quantize_linears(model, MXFP4RLConfig())
    assert list(spread_layers(model, 3)) == [names[0], names[14], names[27]]
    assert len(spread_layers(model, 100)) == 28


def test_error_callback_needs_a_quantized_layer():
    with pytest.raises(ValueError, match="no MXFP4 layer"):
        ErrorCallback().on_train_begin(None, TrainerState(), None, model=torch.nn.Linear(2, 2))
