# SPDX-License-Identifier: Apache-2.0
"""The report that a training run writes, whatever becomes of the run."""

import re
from pathlib import Path

import pytest
import torch
from grpo_runs import MEASURED, logged, trainer_factory
from transformers import TrainerCallback
from undrawn import leave_figures_undrawn

from hf_mxfp4.lab import RunReportCallback, read_run, write_run_report
from hf_mxfp4.lab.run_report.charts import CHARTS
from hf_mxfp4.lab.run_report.page import RUN_REPORT
from hf_mxfp4.run_log import RUN_LOG, RunLog


class Stop(Exception):
    pass


class FailAt(TrainerCallback):
    """A tracker that cannot be reached from a step on."""

    def __init__(self, step):
        self.step = step

    def on_log(self, args, state, control, **kwargs):
        if state.global_step >= self.step:
            raise Stop("tracker is gone")


def report_of(folder):
    """The report's text without the images."""
    text = (Path(folder) / RUN_REPORT).read_text()
    assert text.rstrip().endswith("</html>")
    return re.sub(r"data:image/png;base64,[^\"]*", "", text)


class Watch(TrainerCallback):
    """A tracker, and whether there was a report when a step began."""

    def __init__(self, report):
        self.report, self.found = report, {}

    def on_step_begin(self, args, state, control, **kwargs):
        self.found[state.global_step] = self.report.is_file()


SCORES = {"exact": {"accuracy": 0.25, "standard_error": 0.02, "n": 400}}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of four steps, its folder, and what was seen along the way."""
    root = tmp_path_factory.mktemp("whole")
    folder = root / "run"
    watch = Watch(folder / RUN_REPORT)
    trainer = trainer_factory(root)(
        report_every=2, **MEASURED, hub_token="hf_secret", callbacks=[watch, RunReportCallback(every=2)]
    )
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
    assert {
        "reward", "entropy", "completions/mean_length",
        "aqn/sigma", "aqn/measured_std", "error/scale_bias", "error/activations/deadzone", "error/activations/sqnr_db",
        "grad_norm", "learning_rate",
        "sampling/importance_sampling_ratio/clipped",
    } <= shown  # fmt: skip
    assert record.facts["n_quantized"] == 14 and record.facts["skipped"] == ["lm_head"]
    assert "aqn_num_stages" in record.facts["changed_options"]
    text = report_of(folder)
    assert "Finished at step 4 of 4" in text and "14 layers in MXFP4, 1 left in full precision" in text


def test_a_report_is_written_along_the_way_and_changes_no_bit_of_training(whole, build):
    trainer, _, watch = whole
    assert watch.found == {0: False, 1: False, 2: True, 3: True}
    plain = build(**MEASURED)
    plain.train()
    assert logged(plain, "loss") == logged(trainer, "loss")
    assert all(torch.equal(a, b) for a, b in zip(plain.model.parameters(), trainer.model.parameters(), strict=True))


def test_tokens_are_not_in_the_report(whole):
    _, folder, _ = whole
    assert "hf_secret" not in (folder / RUN_LOG).read_text() and "hf_secret" not in report_of(folder)
    assert "hub_token" in (folder / RUN_LOG).read_text()


def test_switched_off_nothing_is_written(build, tmp_path):
    trainer = build(report_every=0, max_steps=1)
    trainer.train()
    assert trainer.run_log is None
    assert not list((tmp_path / "run").glob("run_*"))


def test_an_exception_is_in_the_report_and_a_resumed_run_goes_on_with_its_log(build, tmp_path, blank_pictures):
    """A tracker that raises ends training: with a checkpoint, the last values, and a report that says so."""
    with pytest.raises(Stop):
        build(report_every=100, callbacks=[FailAt(3)]).train()
    assert (tmp_path / "run" / "checkpoint-3" / "trainer_state.json").is_file()
    assert [entry["step"] for entry in read_run(tmp_path / "run").logs] == [1, 2, 3]
    write_run_report(tmp_path / "run")
    assert "Stopped at step 3 of 4 by Stop: tracker is gone" in report_of(tmp_path / "run")
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
    assert printed.count("run_log.jsonl is not complete") == 1 and "No space left on device" in printed
