# SPDX-License-Identifier: Apache-2.0
"""Callbacks of a run: entropy, error components, layers' steps; measuring changes nothing. And the report that a run
writes, whatever becomes of it."""

import ast
import re
from pathlib import Path

import pytest
import torch
from grpo_runs import MEASURED, RANDOM, logged, mixture, quantized, trainer_factory
from peft import LoraConfig
from tiny_models import make_model
from transformers import AutoModelForCausalLM, ProgressCallback, TrainerCallback, TrainerControl, TrainerState
from undrawn import leave_figures_undrawn

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.integrations.transformers.swap import quantize_linears
from hf_mxfp4.lab import RunReportCallback, read_run, write_run_report
from hf_mxfp4.lab.run_report.charts import CHARTS
from hf_mxfp4.lab.run_report.page import RUN_REPORT
from hf_mxfp4.layers import random_layers
from hf_mxfp4.numerics import decompose_scheme
from hf_mxfp4.rl import ActivationErrorCallback, EntropyCallback, ErrorCallback, QuantizationStepCallback
from hf_mxfp4.rl.callbacks import MEASUREMENTS
from hf_mxfp4.rl.callbacks.logs import ShortProgressCallback
from hf_mxfp4.rl.callbacks.run_log import count_parameters
from hf_mxfp4.rl.run_log import RUN_LOG, RunLog


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
    assert [entry["entropy/alarm"] for entry in state.log_history] == [0] * 30


def test_a_step_without_entropy_is_passed_over_and_a_resumed_run_knows_those_before():
    state = feed(EntropyCallback(), [1.0, None, 1.5])
    assert [entry.get("entropy/slope") for entry in state.log_history] == [0, None, 0.25]
    resumed = EntropyCallback()
    resumed.on_train_begin(None, state, None)
    assert resumed.slope() == 0.25


def test_error_components_are_those_of_the_weights():
    model = quantized(layers=3)
    recorded = {}
    callback = ErrorCallback(every=2, layers=1, record=recorded.__setitem__)
    state = TrainerState(max_steps=3)
    callback.on_train_begin(None, state, None, model=model)
    layer = model.model.layers[0].self_attn.q_proj
    expected = decompose_scheme(layer.weight, layer.config.weight_scheme)
    assert recorded["error/sqnr_db"] == pytest.approx(expected.sqnr_db)
    for part in ("scale_bias", "deadzone", "grid"):
        assert recorded[f"error/{part}"] == pytest.approx(expected.energy_ratio[part])
    for step in (1, 2, 3):
        state.global_step = step
        callback.on_step_end(None, state, None)
    assert [entry["step"] for entry in callback.history] == [0, 2, 3]


def test_chosen_layers_span_the_depth():
    model = make_model(layers=4)
    names, _ = quantize_linears(model, MXFP4RLConfig())
    callback = ErrorCallback(layers=3)
    callback.on_train_begin(None, TrainerState(), None, model=model)
    assert [entry["layer"] for entry in callback.history] == [names[0], names[14], names[27]]


def test_the_step_is_the_trainers():
    model = quantized(MXFP4RLConfig(**RANDOM))
    state = TrainerState()
    state.global_step = 12
    QuantizationStepCallback().on_step_begin(None, state, TrainerControl(), model=model)
    assert [layer.rng.step for layer in random_layers(model)] == [12] * 14


def test_a_model_without_random_numbers_is_refused():
    with pytest.raises(ValueError, match="no layer that draws random numbers"):
        QuantizationStepCallback().on_step_begin(None, TrainerState(), TrainerControl(), model=make_model())


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
@pytest.mark.parametrize("options", [{}, {"mode": "packed"}])
def test_parameters_are_those_of_the_plain_model(checkpoint, family, options):
    expected = make_model(family).num_parameters()
    config = MXFP4RLConfig(**options)
    model = AutoModelForCausalLM.from_pretrained(checkpoint(family), quantization_config=config)
    assert count_parameters(model) == model.num_parameters() == expected


SCALED = MXFP4RLConfig(preset="w4a4")


def begin(callback, step, max_steps=10):
    callback.on_step_begin(None, TrainerState(global_step=step - 1, max_steps=max_steps), None)


def test_components_are_those_of_what_enters_the_layer_without_padding():
    model = quantized(SCALED, layers=1)
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


def test_only_steps_that_are_due_and_once_in_each():
    model = quantized(SCALED, layers=1)
    callback = ActivationErrorCallback(model, every=4, layers=1, record=lambda name, value: None)
    ids = torch.arange(8).reshape(1, 8) + 2
    for step in range(1, 11):
        begin(callback, step)
        for _ in range(2):  # micro-batches
            with callback.observing(torch.ones_like(ids)):
                model(input_ids=ids)
    assert [entry["step"] for entry in callback.history] == [1, 4, 8, 10]
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_measuring_nothing_is_an_error():
    callback = ActivationErrorCallback(quantized(SCALED, layers=1), every=1, layers=1, record=lambda name, value: None)
    begin(callback, 1)
    with pytest.raises(RuntimeError, match="none of model.layers.0.self_attn.q_proj ran"):
        with callback.observing(torch.ones(1, 8)):
            pass


@pytest.mark.parametrize("preset", ["w4a16", "w4a8"])
def test_layers_without_activations_in_mxfp4_are_refused(preset):
    model = quantized(MXFP4RLConfig(preset=preset))
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
    "w4a4": {"preset": "w4a4"},
    "stochastic": {
        "preset": "w4a4g4",
        "macro_block": None,
        "dgrad": {"grad": "rceil+stochastic"},
        "wgrad": {"grad": "rceil+stochastic", "x": "rceil"},
    },
}


@pytest.mark.parametrize("name", SCHEMES)
def test_measuring_changes_no_bit_of_training(build, tmp_path, name):
    metrics = [metric for measurement in MEASUREMENTS.values() for metric in measurement.metrics]
    options = {measurement.option for measurement in MEASUREMENTS.values()}
    weights = []
    losses = []
    for every in (0, 1):
        policy = mixture(tmp_path / "moe", MXFP4RLConfig(**SCHEMES[name]))
        trainer = build(policy=policy, max_steps=2, **dict.fromkeys(options, every))
        trainer.train()
        assert [metric for metric in metrics if logged(trainer, metric)] == (metrics if every else [])
        weights.append(trainer.model.state_dict())
        losses.append(logged(trainer, "loss"))
    assert losses[0] == losses[1]
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
    assert trainer.run_log is None and not list((tmp_path / "run").glob("run_*"))  # which is switched off


def test_the_console_shows_a_few_values_of_each_log(build, capsys):
    trainer = build(max_steps=1, num_generations=2, per_device_train_batch_size=2)
    trainer.train()
    step, end = map(ast.literal_eval, capsys.readouterr().out.splitlines())
    assert list(step) == ["step", "loss", "reward", "completions/mean_length", "sampling/kl", "entropy"]
    assert list(end) == ["step", "train_runtime", "train_loss"]
    assert len(trainer.state.log_history[0]) > 30  # which trackers and run_log.jsonl get


def test_a_progress_bar_shows_them_too_and_callbacks_of_a_user_stay(build):
    class Own(ProgressCallback):
        """A callback of a user, which only its class tells from that of transformers."""

    callbacks = build(disable_tqdm=False, callbacks=[Own()]).callback_handler.callbacks
    kinds = {type(callback) for callback in callbacks if isinstance(callback, ProgressCallback)}
    assert kinds == {ShortProgressCallback, Own}


class FailAt(TrainerCallback):
    """A tracker that cannot be reached from a step on."""

    def __init__(self, step):
        self.step = step

    def on_log(self, args, state, control, **kwargs):
        if state.global_step >= self.step:
            raise ConnectionError("tracker is gone")


def report_of(folder):
    """The report's text without the images."""
    text = (Path(folder) / RUN_REPORT).read_text()
    assert text.rstrip().endswith("</html>")
    return re.sub(r"data:image/png;base64,[^\"]*", "", text)


class Watch(TrainerCallback):
    """A tracker, and whether there was a report when a step began."""

    def __init__(self, report):
        self.report = report
        self.found = {}

    def on_step_begin(self, args, state, control, **kwargs):
        self.found[state.global_step] = self.report.is_file()


SCORES = {"exact": [True] * 100 + [False] * 300}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of four steps, its folder, and what was seen along the way."""
    root = tmp_path_factory.mktemp("whole")
    folder = root / "run"
    watch = Watch(folder / RUN_REPORT)
    callbacks = [watch, RunReportCallback(every=2)]
    trainer = trainer_factory(root)(report_every=2, **MEASURED, hub_token="hf_secret", callbacks=callbacks)
    trainer.run_log.add_evaluation("before RL", 0, SCORES)
    with pytest.MonkeyPatch.context() as patch:
        leave_figures_undrawn(patch.setattr)
        trainer.train()
    return trainer, folder, watch


def test_a_whole_run(whole):
    trainer, folder, _ = whole
    record = read_run(folder)
    shown = {key for chart in CHARTS for key, _ in chart.lines} & set().union(*record.logs)
    for key in shown:
        steps, values = record.series(key)
        expected = {step: value for step, value in logged(trainer, key).items() if value is not None}
        assert dict(zip(steps, values, strict=True)) == expected
    assert {"reward", "aqn/sigma", "error/scale_bias", "sampling/importance_sampling_ratio/clipped"} <= shown
    assert record.facts["n_quantized"] == 14
    assert record.facts["skipped"] == ["lm_head"]
    assert "aqn_num_stages" in record.facts["changed_options"]
    text = report_of(folder)
    assert "Finished at step 4 of 4" in text
    assert "14 layers in MXFP4, 1 left in full precision" in text


def test_a_report_is_written_along_the_way_and_changes_no_bit_of_training(whole, build):
    trainer, _, watch = whole
    assert watch.found == {0: False, 1: False, 2: True, 3: True}
    plain = build(**MEASURED)
    plain.train()
    assert logged(plain, "loss") == logged(trainer, "loss")
    assert all(torch.equal(a, b) for a, b in zip(plain.model.parameters(), trainer.model.parameters(), strict=True))


def test_tokens_are_not_in_the_report(whole):
    _, folder, _ = whole
    assert "hf_secret" not in (folder / RUN_LOG).read_text()
    assert "hf_secret" not in report_of(folder)
    assert "hub_token" in (folder / RUN_LOG).read_text()


def test_an_exception_is_in_the_report_and_a_resumed_run_goes_on_with_its_log(build, tmp_path, blank_pictures):
    """A tracker that raises ends training: with a checkpoint, the last values, and a report that says so."""
    with pytest.raises(ConnectionError):
        build(report_every=100, callbacks=[FailAt(3)]).train()
    assert (tmp_path / "run" / "checkpoint-3" / "trainer_state.json").is_file()
    assert [entry["step"] for entry in read_run(tmp_path / "run").logs] == [1, 2, 3]
    write_run_report(tmp_path / "run")
    assert "Stopped at step 3 of 4 by ConnectionError: tracker is gone" in report_of(tmp_path / "run")
    build(report_every=100).train(resume_from_checkpoint=True)
    record = read_run(tmp_path / "run")
    assert [entry["step"] for entry in record.logs if "reward" in entry] == [1, 2, 3, 4]
    assert [start["step"] for start in record.starts] == [0, 3]
    write_run_report(tmp_path / "run")
    assert "resumed once" in report_of(tmp_path / "run")


def test_a_log_that_cannot_be_written_does_not_end_training(build, monkeypatch, capsys):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RunLog, "write", full)
    trainer = build(report_every=1, max_steps=3)
    trainer.train()
    assert trainer.state.global_step == 3
    printed = capsys.readouterr().err
    assert printed.count("run_log.jsonl is not complete") == 1
    assert "No space left on device" in printed
