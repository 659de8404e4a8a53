# SPDX-License-Identifier: Apache-2.0
"""Callbacks of a run: entropy, error components, layers' steps; what trackers get; measuring changes nothing."""

import pytest
import torch
from factors import factors_config
from grpo_runs import MEASURED, TOKENIZER, logged
from moe_models import make_moe
from peft import LoraConfig
from tiny_models import make_model
from transformers import AutoModelForCausalLM, TrainerControl, TrainerState

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.integrations.transformers.swap import quantize_linears
from hf_mxfp4.layers import random_layers
from hf_mxfp4.numerics import decompose, decompose_scheme
from hf_mxfp4.rl import ActivationErrorCallback, EntropyCallback, ErrorCallback, QuantizationStepCallback
from hf_mxfp4.rl.callbacks import count_parameters


# ---- entropy --------------------------------------------------------------------------------------------------------


def feed(callback, entropies, start=1):
    state = TrainerState()
    for step, entropy in enumerate(entropies, start):
        logs = {"entropy": entropy}
        state.global_step = step
        state.log_history.append(dict(logs, step=step))
        callback.on_log(None, state, TrainerControl(), logs=logs)
    return state


def test_collapse_alarm_begins_once_and_again_after_recovery(capsys):
    callback = EntropyCallback()
    feed(callback, [0.5, 0.04, 0.03, 0.3, 0.02])
    assert callback.alarms == [(2, "collapse", 0.04), (5, "collapse", 0.02)]
    assert "entropy collapse" in capsys.readouterr().err


def test_explosion_alarm_is_relative_to_the_start():
    callback = EntropyCallback()
    feed(callback, [0.4, 0.5, 0.6, 0.99, 1.01])
    assert callback.alarms == [(5, "explosion", 1.01)]


def test_slope_is_in_nats_per_step():
    callback = EntropyCallback()
    state = feed(callback, [1.0 - 0.01 * step for step in range(30)])
    assert callback.slope() == pytest.approx(-0.01)
    assert callback.alarms == [] and [entry["entropy/alarm"] for entry in state.log_history] == [0] * 30
    callback = EntropyCallback()
    state = feed(callback, [1.0, None, 1.5])  # TRL had no value in the second step
    assert [entry.get("entropy/slope") for entry in state.log_history] == [0, None, 0.25]
    resumed = EntropyCallback()
    resumed.on_train_begin(None, state, None)
    assert resumed.slope() == 0.25


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
    for layers, chosen in ((3, [names[0], names[14], names[27]]), (100, names)):
        callback = ErrorCallback(layers=layers)
        callback.on_train_begin(None, TrainerState(), None, model=model)
        assert [entry["layer"] for entry in callback.history] == chosen


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


def quantized_model(config=None, **options):
    model = make_model(**options)
    quantize_linears(model, config or MXFP4RLConfig(outlier_fallback=None))
    return model


def begin(callback, step, max_steps=10):
    callback.on_step_begin(None, TrainerState(global_step=step - 1, max_steps=max_steps), None)


def test_components_are_those_of_what_enters_the_layer_without_padding():
    model = quantized_model(layers=1)
    recorded = {}
    callback = ActivationErrorCallback(model, every=2, layers=1, record=recorded.__setitem__)
    (name,) = callback.chosen
    ids = torch.arange(24).reshape(3, 8) % 30 + 2
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    seen = []
    model.get_submodule(name).register_forward_pre_hook(lambda module, args: seen.append(args[0].detach()))
    begin(callback, 2)
    with callback.observing(mask):
        model(input_ids=ids, attention_mask=mask)
    expected = decompose_scheme(seen[0][mask.bool()], model.get_submodule(name).config.activation_scheme)
    assert recorded["error/activations/sqnr_db"] == pytest.approx(expected.sqnr_db)
    for part, ratio in expected.energy_ratio.items():
        assert recorded[f"error/activations/{part}"] == pytest.approx(ratio)
    padded = decompose_scheme(seen[0].flatten(0, 1), model.get_submodule(name).config.activation_scheme)
    assert padded.sqnr_db != pytest.approx(expected.sqnr_db, abs=1e-6)


def test_only_steps_that_are_due_and_once_in_each():
    model = quantized_model(layers=1)
    callback = ActivationErrorCallback(model, every=4, layers=2, record=lambda name, value: None)
    ids = torch.arange(8).reshape(1, 8) + 2
    for step in range(1, 11):
        begin(callback, step)
        for _ in range(2):  # micro-batches
            with callback.observing(torch.ones_like(ids)):
                model(input_ids=ids)
    assert [entry["step"] for entry in callback.history] == [1, 1, 4, 4, 8, 8, 10, 10]
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_measuring_nothing_is_an_error():
    callback = ActivationErrorCallback(quantized_model(layers=1), every=1, layers=1, record=lambda name, value: None)
    begin(callback, 1)
    with pytest.raises(RuntimeError, match=r"none of model.layers.0.self_attn.q_proj ran"):
        with callback.observing(torch.ones(1, 8)):
            pass


@pytest.mark.parametrize("preset", ["w4a16", "w4a8"])
def test_layers_without_activations_in_mxfp4_are_refused(preset):
    model = quantized_model(MXFP4RLConfig(preset=preset))
    with pytest.raises(ValueError, match="no layer that quantizes its input in MXFP4"):
        ActivationErrorCallback(model, every=1, layers=1, record=lambda name, value: None)


def test_packed_layers_that_quantize_activations_are_measured(build):
    scheme = MXFP4RLConfig(mode="packed", preset="w4a4")
    lora = LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", r=2)
    trainer = build(**MEASURED, scheme=scheme, peft_config=lora)
    trainer.train()
    assert list(logged(trainer, "error/activations/sqnr_db")) == [1, 2, 4]
    # There is no full precision to compare with.
    assert trainer.error_callback is None


SCHEMES = {
    "default": {},
    "stochastic": {
        "preset": "w4a4g4",
        "macro_block": None,
        "outlier_fallback": None,
        "dgrad": {"grad": "rceil+stochastic"},
        "wgrad": {"grad": "rceil+stochastic", "x": "rceil"},
    },
}
#: A metric of each option that measures.
METRICS = {"error_every": "error/activations/grid", "movement_every": "movement/total"}


@pytest.mark.parametrize("name", SCHEMES)
def test_measuring_changes_no_bit_of_training(build, tmp_path, name):
    make_moe().save_pretrained(tmp_path / "moe")
    TOKENIZER.save_pretrained(tmp_path / "moe")
    weights, losses = [], []
    for every in (0, 1):
        scheme = MXFP4RLConfig(**SCHEMES[name])
        policy = AutoModelForCausalLM.from_pretrained(tmp_path / "moe", quantization_config=scheme)
        trainer = build(policy=policy, **dict.fromkeys(METRICS, every), max_steps=2)
        trainer.train()
        assert [bool(logged(trainer, metric)) for metric in METRICS.values()] == [bool(every)] * len(METRICS)
        weights.append(trainer.model.state_dict())
        losses.append(logged(trainer, "loss"))
    assert losses[0] == losses[1]
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
