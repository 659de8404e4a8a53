# SPDX-License-Identifier: Apache-2.0
"""Effective temperature and gradient gain of a policy that trains."""

import math

import pytest
import torch
from grpo_runs import logged
from tiny_models import make_model
from transformers import TrainerState

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.analysis.policy.gradient_gain import gradient_gain, training_gradient_gain
from hf_mxfp4.analysis.policy.predictions import policy_logits
from hf_mxfp4.analysis.policy.temperature import effective_temperature
from hf_mxfp4.layers import full_precision
from hf_mxfp4.quantizer.swap import quantize_linears
from hf_mxfp4.rl import GradientGainCallback, TemperatureCallback
from hf_mxfp4.rl.callbacks.policy import TrainingBatch


class Arguments:
    temperature = 0.5


def quantized_model(config=None, **options):
    model = make_model(**options)
    quantize_linears(model, config or MXFP4RLConfig(outlier_fallback=None))
    return model


def batch(rows=3, length=10, prompt=4):
    ids = torch.arange(rows * length).reshape(rows, length) * 7 % 30 + 2
    mask = torch.ones_like(ids)
    completion = torch.zeros_like(ids)
    completion[:, prompt:] = 1
    return TrainingBatch(ids, mask, completion)


def measure(cls, model, given, step=2, every=2, max_steps=10):
    recorded = {}
    callback = cls(model, every, batch=lambda: given, record=recorded.__setitem__)
    callback.on_step_end(Arguments(), TrainerState(global_step=step, max_steps=max_steps), None, model=model)
    return recorded, callback


# ---- what is measured on --------------------------------------------------------------------------------------------


def test_the_sample_is_of_completions_that_count(monkeypatch):
    monkeypatch.setattr("hf_mxfp4.rl.callbacks.policy._TOKENS", 10)
    given = batch(rows=12)
    given.completion_mask[0] = 0
    ids, labels, mask = given.sample()
    assert torch.equal(ids, given.input_ids[1:9]) and mask.shape == (8, 10)
    assert torch.equal(labels != -100, given.completion_mask[1:9].bool())
    given.completion_mask[:] = 0
    ids, labels, mask = given.sample()
    assert len(ids) == 8 and torch.equal(labels, ids) and mask.all()


def test_of_short_sequences_more_are_taken():
    assert len(batch(rows=200).sample()[0]) == 102
    assert len(batch(rows=200, length=512).sample()[0]) == 8


def test_for_gradients_tokens_are_limited():
    given = batch(rows=8, length=20, prompt=6)
    for limit, rows in ((200, 8), (160, 8), (159, 7), (20, 1)):
        for ours, whole in zip(given.sample(limit), given.sample(), strict=True):
            assert torch.equal(ours, whole[:rows])
    assert len(batch(rows=200).sample(2048)[0]) == 102  # as without a limit


@pytest.mark.parametrize(
    ("prompt", "limit", "columns"), [(4, 10, (0, 10)), (8, 10, (3, 13)), (18, 10, (10, 20)), (6, 19, (0, 19))]
)
def test_a_sequence_over_the_limit_is_cut_around_the_start_of_its_completion(prompt, limit, columns):
    given = batch(rows=3, length=20, prompt=prompt)
    given.completion_mask[0] = 0
    ids, labels, mask = given.sample(limit)
    assert torch.equal(ids, given.input_ids[1:2, slice(*columns)]) and mask.shape == ids.shape
    assert torch.equal(labels != -100, given.completion_mask[1:2, slice(*columns)].bool()) and (labels != -100).any()
    given.completion_mask[:] = 0
    assert torch.equal(given.sample(limit)[0], given.input_ids[:1, :limit])


@pytest.mark.parametrize(
    ("cls", "sizes"),
    [
        (TemperatureCallback, [7, 7]),  # every eighth of 56
        (GradientGainCallback, [42, 42]),  # of six sequences, whole completions
    ],
)
def test_logits_of_the_compared_positions_alone_are_computed(monkeypatch, cls, sizes):
    monkeypatch.setattr("hf_mxfp4.rl.callbacks.policy._MAX_POSITIONS", 7)
    monkeypatch.setattr(GradientGainCallback, "max_tokens", 69)
    model, found = quantized_model(layers=1), []
    model.lm_head.register_forward_hook(lambda module, args, out: found.append(out.shape[:-1].numel()))
    recorded, _ = measure(cls, model, batch(rows=8, length=11))
    assert found == sizes and all(math.isfinite(value) for value in recorded.values())


# ---- effective temperature ------------------------------------------------------------------------------------------


def test_the_temperature_is_that_of_the_analysis_at_the_sampling_temperature():
    model, given = quantized_model(), batch()
    recorded, callback = measure(TemperatureCallback, model, given)
    quantized = policy_logits(model, *given.sample())
    with full_precision(model):
        reference = policy_logits(model, *given.sample())
    expected = effective_temperature(reference / 0.5, quantized / 0.5)
    assert len(quantized) == 18
    assert recorded["entropy/effective_temperature"] == pytest.approx(expected.measured, rel=1e-4)
    assert recorded["entropy/quantization_kl"] == pytest.approx(expected.kl, rel=1e-6)
    assert callback.history[0]["step"] == 2 and callback.history[0]["kl"] == pytest.approx(expected.kl)
    assert expected.kl > 0


def test_a_policy_without_quantization_error_has_temperature_one():
    model = quantized_model(layers=1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "proj" in name:
                parameter.zero_()  # which MXFP4 holds exactly
    recorded, _ = measure(TemperatureCallback, model, batch())
    assert recorded["entropy/effective_temperature"] == pytest.approx(1.0, abs=1e-5)
    assert recorded["entropy/quantization_kl"] == pytest.approx(0.0, abs=1e-12)


def test_few_positions_of_many_are_compared(monkeypatch):
    import hf_mxfp4.rl.callbacks.policy as module

    sizes = []

    def spy(reference, quantized, **options):
        sizes.append(len(reference))
        return effective_temperature(reference, quantized, **options)

    monkeypatch.setattr(module, "effective_temperature", spy)
    monkeypatch.setattr(module, "_MAX_POSITIONS", 7)
    measure(TemperatureCallback, quantized_model(layers=1), batch())
    assert sizes == [6]  # every third of 18


def test_a_broken_model_is_measured_as_nan():
    model = quantized_model(layers=1)
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    recorded, callback = measure(TemperatureCallback, model, batch())
    assert all(math.isnan(value) for value in recorded.values()) and callback.history == []


@pytest.mark.parametrize("cls", [TemperatureCallback, GradientGainCallback])
def test_not_due_or_no_tokens_nothing_is_measured(cls):
    model = quantized_model(layers=1)
    assert measure(cls, model, batch(), step=3)[0] == {}
    assert measure(cls, model, None)[0] == {}
    assert measure(cls, model, batch(), step=3, max_steps=3)[0] != {}  # the last step


@pytest.mark.parametrize("cls", [TemperatureCallback, GradientGainCallback])
def test_a_model_without_master_weights_is_refused(cls):
    with pytest.raises(ValueError, match="no quantized layer"):
        cls(make_model(), 1, batch=lambda: None, record=lambda name, value: None)
    model = quantized_model(MXFP4RLConfig(mode="packed"))
    with pytest.raises(ValueError, match="packed layers"):
        cls(model, 1, batch=lambda: None, record=lambda name, value: None)


# ---- gradient gain --------------------------------------------------------------------------------------------------


def test_the_gain_in_training_is_that_of_the_analysis():
    """Two ways to the same gradients: the layers themselves, and their error injected into plain products."""
    model, (ids, labels, mask) = quantized_model(layers=3), batch().sample()
    ours = training_gradient_gain(model, ids, labels, mask)
    config = model.get_submodule("model.layers.0.mlp.up_proj").config
    theirs = gradient_gain(model, ids, config, labels, attention_mask=mask)
    assert [depth.name for depth in ours.depths] == [depth.name for depth in theirs.depths]
    for a, b in zip(ours.depths, theirs.depths, strict=True):
        assert a.log2_gain == pytest.approx(b.log2_gain, abs=1e-5) and a.cosine == pytest.approx(b.cosine, abs=1e-6)
    assert ours.loss_quantized != ours.loss == pytest.approx(theirs.loss)


def test_metrics_name_the_layers_by_place():
    model, given = quantized_model(layers=4), batch()
    recorded, callback = measure(GradientGainCallback, model, given)
    gains = training_gradient_gain(model, *given.sample()).depths
    by_layer = {depth.name: depth.log2_gain for depth in gains}
    assert recorded["gradient_gain/first"] == by_layer["model.layers.0"]
    assert recorded["gradient_gain/middle"] == by_layer["model.layers.1"]
    assert recorded["gradient_gain/last"] == by_layer["model.layers.3"]
    slope = (by_layer["model.layers.0"] - by_layer["output"]) / 4
    assert recorded["gradient_gain/log2_per_layer"] == pytest.approx(slope)
    assert callback.history == [
        {"step": 2, "log2_gain": [d.log2_gain for d in gains], "cosine": [d.cosine for d in gains]}
    ]


def test_no_gradient_and_no_mode_is_left_behind():
    model = quantized_model().train()
    measure(GradientGainCallback, model, batch())
    assert all(parameter.grad is None for parameter in model.parameters()) and model.training
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize(
    "config",
    [
        MXFP4RLConfig(preset="w4a4g4", macro_block=None, outlier_fallback=None, wgrad={"rotation": "deterministic-16"}),
        MXFP4RLConfig(preset="w4a16"),
    ],
    ids=["w4a4g4", "w4a16"],
)
def test_every_scheme_has_a_gain(config):
    recorded, _ = measure(GradientGainCallback, quantized_model(config), batch())
    assert all(math.isfinite(value) for value in recorded.values())
    assert 0 < abs(recorded["gradient_gain/first"]) < 1 and recorded["gradient_gain/cosine"] < 1


def test_experts_have_a_gain():
    model = quantized_model(family="qwen3_moe")
    recorded, _ = measure(GradientGainCallback, model, batch())
    assert all(math.isfinite(value) for value in recorded.values())


# ---- runs -----------------------------------------------------------------------------------------------------------


def test_cadences(build):
    trainer = build(error_every=3, gradient_gain_every=2)
    trainer.train()
    assert list(logged(trainer, "entropy/effective_temperature")) == [3, 4]
    assert list(logged(trainer, "entropy/quantization_kl")) == [3, 4]
    for name in ("first", "middle", "last", "log2_per_layer", "cosine"):
        assert list(logged(trainer, f"gradient_gain/{name}")) == [2, 4]


def test_zero_switches_off(build):
    trainer = build(error_every=0, gradient_gain_every=0, max_steps=1)
    trainer.train()
    keys = {key for entry in trainer.state.log_history for key in entry}
    assert not any(key.startswith(("gradient_gain", "error/")) or "temperature" in key for key in keys)
    assert "entropy" in keys
