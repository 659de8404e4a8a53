# SPDX-License-Identifier: Apache-2.0
"""Error components of activations, measured during training."""

import pytest
import torch
from grpo_runs import MEASURED, logged
from peft import LoraConfig
from tiny_models import make_model
from transformers import TrainerState

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.integrations.transformers.swap import quantize_linears
from hf_mxfp4.numerics import decompose_scheme
from hf_mxfp4.rl import ActivationErrorCallback
from hf_mxfp4.rl.callbacks.errors import spread_modules


PARTS = ("scale_bias", "deadzone", "grid", "sqnr_db")


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


def test_layers_without_quantized_activations_are_refused():
    model = quantized_model(MXFP4RLConfig(preset="w4a16"))
    assert spread_modules(model, 4) == {}
    with pytest.raises(ValueError, match="no MXFP4 layer that quantizes its input"):
        ActivationErrorCallback(model, every=1, layers=1, record=lambda name, value: None)


def test_the_log_of_a_run_has_them(build):
    trainer = build(error_every=2)
    trainer.train()
    for part in PARTS:
        assert list(logged(trainer, f"error/activations/{part}")) == [1, 2, 4]
    assert 10 < logged(trainer, "error/activations/sqnr_db")[1] < 40


def test_packed_layers_that_quantize_activations_are_measured(build):
    scheme = MXFP4RLConfig(mode="packed", preset="w4a4")
    lora = LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", r=2)
    trainer = build(**MEASURED, scheme=scheme, peft_config=lora)
    trainer.train()
    assert list(logged(trainer, "error/activations/sqnr_db")) == [1, 2, 4]
    # There is no full precision to compare with.
    assert trainer.error_callback is None
