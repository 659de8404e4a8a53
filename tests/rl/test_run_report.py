# SPDX-License-Identifier: Apache-2.0
"""The report that a training run writes, whatever becomes of the run."""

import json
import re
import shutil
import signal
from pathlib import Path

import processes
import pytest
import torch
from grpo_runs import MEASURED, logged, trainer_factory
from transformers import TrainerCallback
from typer.testing import CliRunner

from hf_mxfp4.cli import app
from hf_mxfp4.lab import read_run
from hf_mxfp4.lab.run_report.charts import CHARTS
from hf_mxfp4.lab.run_report.page import RUN_REPORT
from hf_mxfp4.run_log import RUN_LOG


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
        self.report, self.found, self.logs = report, {}, []

    def on_step_begin(self, args, state, control, **kwargs):
        self.found[state.global_step] = self.report.is_file()

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append(dict(logs))


def numbers(entry):
    left_out = ("step", "total_flos")
    return {name: value for name, value in entry.items() if isinstance(value, (int, float)) and name not in left_out}


def shorten(log):
    """Leave a single chart's values in the log of a run: most of the time of a report goes into charts."""
    kept = []
    for entry in map(json.loads, log.read_text().splitlines()):
        if entry["kind"] == "log":
            entry = {key: entry[key] for key in ("kind", "time", "step", "reward") if key in entry}
        kept.append(json.dumps(entry) + "\n")
    log.write_text("".join(kept))


SCORES = {"exact": {"accuracy": 0.25, "standard_error": 0.02, "n": 400}}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of four steps whose entropy raises the alarm, its folder, and what was seen along the way."""
    root = tmp_path_factory.mktemp("whole")
    folder = root / "run"
    watch = Watch(folder / RUN_REPORT)
    trainer = trainer_factory(root)(
        report_every=2, **MEASURED, entropy_collapse=100.0, hub_token="hf_secret", callbacks=[watch]
    )
    trainer.report_callback.add_evaluation("before RL", 0, SCORES)
    trainer.train()
    return trainer, folder, watch


def test_a_whole_run(whole):
    trainer, folder, _ = whole
    assert trainer.report_callback.path == folder / RUN_REPORT
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
        "sampling/importance_sampling_ratio/clipped", "dynamic_sampling/zero_variance_share",
    } <= shown  # fmt: skip
    assert record.facts["n_quantized"] == 14 and record.facts["skipped"] == ["lm_head"]
    assert "aqn_num_stages" in record.facts["changed_options"]
    text = report_of(folder)
    assert "Finished at step 4 of 4" in text and "14 layers in MXFP4, 1 left in full precision" in text


def test_an_evaluation_after_training_is_added(whole, tmp_path):
    trainer, folder, _ = whole
    kept = shutil.copytree(folder, tmp_path / "kept")
    shorten(folder / RUN_LOG)
    trainer.report_callback.add_evaluation("after RL", 4, {"exact": {**SCORES["exact"], "accuracy": 0.5}})
    words = (
        "exact: 0.250 [0.210, 0.295] (before RL) to 0.500 [0.451, 0.549] (after RL), n = 400: +0.250 [+0.184, +0.313]"
    )
    assert words in report_of(folder) and words not in report_of(kept)
    for name in (RUN_LOG, RUN_REPORT):  # as the other tests expect them
        shutil.copy(kept / name, folder / name)


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


def test_alarms_reach_log_trackers_and_report(whole):
    trainer, folder, watch = whole
    alarms = [entry["entropy/alarm"] for entry in trainer.state.log_history if "entropy/alarm" in entry]
    assert alarms == [-1] * 4
    assert [entry["entropy/alarm"] for entry in watch.logs if "entropy/alarm" in entry] == alarms
    assert "collapse in 4 of 4 values" in report_of(folder)
    # Trackers get the numbers, by the name that they have in the log history.
    history, tracked = ([numbers(entry) for entry in entries] for entries in (trainer.state.log_history, watch.logs))
    assert history == tracked
    assert {"entropy", "entropy/slope", "aqn/sigma", "aqn/n_modules", "aqn/measured_std", "reward"} <= set(tracked[0])
    assert {"error/grid", "movement/total"} <= set().union(*tracked)


def test_the_logged_lines_are_json(whole):
    kinds = [json.loads(line)["kind"] for line in (whole[1] / RUN_LOG).read_text().splitlines()]
    assert kinds[:2] == ["start", "evaluation"] and kinds[-1] == "end"
    assert set(kinds) == {"start", "evaluation", "log", "end"}


def test_switched_off_nothing_is_written(build, tmp_path):
    trainer = build(report_every=0, max_steps=1)
    trainer.train()
    assert trainer.report_callback is None
    assert not list((tmp_path / "run").glob("run_*"))


def test_an_exception_is_in_the_report_and_a_resumed_run_goes_on_with_its_log(build, tmp_path, blank_pictures):
    """A tracker that raises ends training: with a checkpoint, the last values, and a report that says so."""
    with pytest.raises(Stop):
        build(report_every=100, callbacks=[FailAt(3)]).train()
    assert (tmp_path / "run" / "checkpoint-3" / "trainer_state.json").is_file()
    assert [entry["step"] for entry in read_run(tmp_path / "run").logs] == [1, 2, 3]
    assert "Stopped at step 3 of 4 by Stop: tracker is gone" in report_of(tmp_path / "run")
    build(report_every=100).train(resume_from_checkpoint=True)
    record = read_run(tmp_path / "run")
    assert [entry["step"] for entry in record.logs if "reward" in entry] == [1, 2, 3, 4]
    assert [start["step"] for start in record.starts] == [0, 3]
    assert "resumed once" in report_of(tmp_path / "run")


def test_a_failure_before_the_first_value_leaves_no_report(build, tmp_path):
    def broken(completions, **kwargs):
        raise Stop("no reward")

    with pytest.raises(Exception, match="no reward"):
        build(reward=broken, report_every=1).train()
    assert not (tmp_path / "run" / RUN_REPORT).exists()
    done = CliRunner().invoke(app, ["report", str(tmp_path / "run")])
    assert done.exit_code == 2 and "has no logged value yet" in done.stderr


def test_a_report_that_cannot_be_written_does_not_end_training(build, tmp_path, monkeypatch, capsys):
    import hf_mxfp4.rl.callbacks.report as module

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "write_run_report", full)
    trainer = build(report_every=1, max_steps=3)
    trainer.train()
    assert trainer.state.global_step == 3
    # Once, after the second step and at the end.
    printed = capsys.readouterr().err
    assert printed.count("the run report in") == 1 and "No space left on device" in printed


KILLED = """
import os, signal, sys
from pathlib import Path
from grpo_runs import trainer_factory
from transformers import TrainerCallback

class Kill(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 3:
            os.kill(os.getpid(), signal.SIGKILL)

trainer_factory(Path(sys.argv[1]))(report_every=100, callbacks=[Kill()]).train()
"""


def test_a_killed_run_is_reported_on_from_its_files_alone(tmp_path):
    done = processes.run(processes.code(KILLED, str(tmp_path)), timeout=300)
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    assert not (tmp_path / "run" / RUN_REPORT).exists()
    done = CliRunner().invoke(app, ["report", str(tmp_path / "run")])
    assert done.exit_code == 0, done.stderr
    assert done.stdout.strip() == str(tmp_path / "run" / RUN_REPORT)
    assert "the run was killed or is still running. Last step: 3 of 4" in report_of(tmp_path / "run")


def test_the_command_writes_where_it_is_told(whole, tmp_path):
    (tmp_path / "run").mkdir()
    shorten(Path(shutil.copy(whole[1] / RUN_LOG, tmp_path / "run")))
    command = ["report", str(tmp_path / "run")]
    done = CliRunner().invoke(app, [*command, "--out", str(tmp_path / "new" / "page.html")])
    assert done.exit_code == 0 and (tmp_path / "new" / "page.html").is_file()
    assert not (tmp_path / "run" / RUN_REPORT).exists()
    for name, written in (("page.png", "page.png"), ("picture", "picture.png")):
        done = CliRunner().invoke(app, [*command, "--png", str(tmp_path / name)])
        assert done.exit_code == 0 and done.stdout.strip() == str(tmp_path / written)
        assert (tmp_path / written).read_bytes().startswith(b"\x89PNG")
    done = CliRunner().invoke(app, ["report", str(tmp_path / "nowhere")])
    assert done.exit_code == 2 and "there is no folder" in done.stderr
    done = CliRunner().invoke(app, [*command, "--png", str(tmp_path / "page.xyz")])
    assert done.exit_code == 2 and "xyz" in done.stderr
