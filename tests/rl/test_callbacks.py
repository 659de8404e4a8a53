# SPDX-License-Identifier: Apache-2.0
"""Callbacks of a training run: entropy, error components, layers' steps; what reaches trackers and
what a report says of the model."""

import pytest
import torch
from factors import factors_config
from grpo_runs import MEASURED, logged
from tiny_models import make_model
from transformers import AutoModelForCausalLM, TrainerControl, TrainerState

from hf_mxfp4.integrations.transformers.swap import quantize_linears
from hf_mxfp4.layers import random_layers
from hf_mxfp4.numerics import decompose
from hf_mxfp4.rl import EntropyCallback, ErrorCallback, QuantizationStepCallback
from hf_mxfp4.rl.callbacks.errors import spread_layers
from hf_mxfp4.rl.callbacks.run_log import count_parameters


# ---- entropy --------------------------------------------------------------------------------------------------------


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


# ---- error components -----------------------------------------------------------------------------------------------


def test_error_components_are_those_of_the_weights():
    model = make_model(layers=3)
    quantize_linears(model, factors_config(preset="w4a16", macro_block=None, outlier_fallback=None))
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
    names, _ = quantize_linears(model, factors_config())
    assert list(spread_layers(model, 3)) == [names[0], names[14], names[27]]
    assert len(spread_layers(model, 100)) == 28


def test_error_callback_needs_a_quantized_layer():
    with pytest.raises(ValueError, match="no MXFP4 layer"):
        ErrorCallback().on_train_begin(None, TrainerState(), None, model=torch.nn.Linear(2, 2))


# ---- the step of layers with random numbers -------------------------------------------------------------------------


RANDOM = factors_config(
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
def test_a_run_repeats_itself(build, tmp_path, checkpointing):
    weights = []
    for run in range(2):
        out = str(tmp_path / str(run))
        trainer = build(scheme=RANDOM, max_steps=2, gradient_checkpointing=checkpointing, output_dir=out)
        trainer.train()
        assert {layer.rng.step for layer in random_layers(trainer.model)} == {1}
        weights.append([p.detach().clone() for p in trainer.model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def test_error_components_are_not_claimed_for_a_rotated_forward_product(build):
    assert build(scheme=RANDOM, error_every=1).error_callback is not None
    rotated = factors_config(fprop={"rotation": "deterministic-16"})
    trainer = build(scheme=rotated, error_every=1, max_steps=1)
    assert trainer.error_callback is None
    trainer.train()


# ---- trackers: what is measured reaches those of TRL through the normal log -----------------------------------------

#: One metric of each callback.
EXPECTED = {
    "entropy/slope",
    "entropy/alarm",
    "error/grid",
    "error/activations/grid",
    "aqn/sigma",
    "aqn/measured_std",
    "completions/mean_length",
    "reward",
}


def test_tensorboard_has_the_series(build, tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    trainer = build(**MEASURED, report_to="tensorboard")
    trainer.train()
    events = EventAccumulator(str(tmp_path / "events")).Reload()
    names = set(events.Tags()["scalars"])
    assert {f"train/{name}" for name in EXPECTED} <= names
    found = {event.step: event.value for event in events.Scalars("train/aqn/sigma")}
    assert found == pytest.approx(logged(trainer, "aqn/sigma"))


# ---- parameters -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
@pytest.mark.parametrize("options", [{}, {"mode": "packed"}, {"mode": "packed", "outlier_fallback": 0.5}])
def test_parameters_are_those_of_the_plain_model(checkpoint, family, options):
    expected = make_model(family).num_parameters()
    config = factors_config(**options)
    model = AutoModelForCausalLM.from_pretrained(checkpoint(family), quantization_config=config)
    assert count_parameters(model) == expected
    if options:
        assert model.num_parameters() != expected  # bytes
