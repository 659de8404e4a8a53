# SPDX-License-Identifier: Apache-2.0
"""The callback that moves the thresholds of selective outlier fallback."""

import pytest
import torch
from grpo_runs import trainer_factory
from tiny_models import make_model
from transformers import TrainerControl, TrainerState

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.layers import fallback_thresholds
from hf_mxfp4.quantizer.swap import quantize_linears
from hf_mxfp4.rl.callbacks.base import FallbackCallback


def callbacks_of(trainer):
    return [callback for callback in trainer.callback_handler.callbacks if isinstance(callback, FallbackCallback)]


def test_a_step_moves_and_reports():
    model, recorded = make_model(), []
    quantize_linears(model, MXFP4RLConfig(outlier_fallback_rate=0.2))
    callback = FallbackCallback(record=lambda name, value: recorded.append((name, value)))
    callback.on_step_end(None, TrainerState(), TrainerControl(), model=model)
    assert recorded == [], "nothing was computed yet"
    model(torch.arange(16).view(1, 16))
    before = [threshold.value for threshold in fallback_thresholds(model)]
    callback.on_step_end(None, TrainerState(), TrainerControl(), model=model)
    values = dict(recorded)
    assert list(values) == ["fallback/rate", "fallback/threshold_mean"]
    assert values["fallback/rate"] == pytest.approx(0.2, abs=0.05)
    after = [threshold.value for threshold in fallback_thresholds(model)]
    assert values["fallback/threshold_mean"] == pytest.approx(sum(after) / len(after))
    assert len(before) == len(after) == 14


def test_a_model_without_thresholds_is_refused():
    model = make_model()
    quantize_linears(model, MXFP4RLConfig())
    with pytest.raises(ValueError, match="no layer with selective outlier fallback"):
        FallbackCallback(record=print).on_step_end(None, TrainerState(), TrainerControl(), model=model)


def test_a_run_logs_rate_and_threshold(tmp_path):
    build = trainer_factory(tmp_path)
    trainer = build(scheme=MXFP4RLConfig(outlier_fallback_rate=0.2), max_steps=3, gradient_checkpointing=True)
    assert len(callbacks_of(trainer)) == 1
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "fallback/rate" in entry]
    assert [entry["step"] for entry in logs] == [1, 2, 3]
    assert all(0.05 < entry["fallback/rate"] < 0.6 for entry in logs)
    assert all(entry["fallback/threshold_mean"] > 0 for entry in logs)


def test_a_run_without_a_rate_has_no_callback(tmp_path):
    assert callbacks_of(trainer_factory(tmp_path)()) == []
