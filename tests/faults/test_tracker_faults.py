# SPDX-License-Identifier: Apache-2.0
"""Trackers and other callbacks that fail: training goes on, or stops with what was trained saved, and says which."""

import pytest
from grpo_runs import trainer_factory
from same_bits import assert_same, weights
from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.integrations import WandbCallback
from trl.extras import profiling
from trl.trainer import grpo_trainer

from hf_mxfp4 import MXFP4RLConfig
from hf_mxfp4.rl.resume.trackers import TolerantHandler, is_tracker


class Unreachable(WandbCallback):
    """A tracker of transformers whose server is gone for some events."""

    def __init__(self, *events):
        self.seen = []
        for event in ("on_train_begin", "on_log", "on_save", "on_train_end", "on_predict"):
            setattr(type(self), event, self._make(event, event in events))

    def _make(self, event, fails):
        def handle(self, args, state, control, *positional, **kwargs):
            self.seen.append(event)
            if fails:
                raise ConnectionError("tracker.example.org is unreachable")

        return handle


class Broken(TrainerCallback):
    """No tracker: a user's own callback, with a mistake at one step."""

    def __init__(self, event, step):
        def handle(args, state, control, **kwargs):
            if state.global_step == step:
                raise KeyError("mistake")

        setattr(self, event, handle)


@pytest.fixture
def run(tmp_path):
    return trainer_factory(tmp_path)


def test_training_goes_on_without_a_tracker_that_fails_later(run, tmp_path, capsys):
    tracker = Unreachable("on_log", "on_save")
    trainer = run(callbacks=[tracker], max_steps=4, save_strategy="steps", save_steps=2)
    trainer.train()
    plain = run(max_steps=4, output_dir=str(tmp_path / "plain"))
    plain.train()
    assert_same(weights(trainer.model), weights(plain.model))
    assert [entry["step"] for entry in trainer.state.log_history if "reward" in entry] == [1, 2, 3, 4]
    assert tracker.seen.count("on_log") >= 4 and "on_train_end" in tracker.seen  # all events are tried
    lines = [line for line in capsys.readouterr().err.splitlines() if "tracker Unreachable" in line]
    assert len(lines) == 2
    assert "failed in on_log (ConnectionError: tracker.example.org is unreachable): training goes on" in lines[0]
    failed = tracker.seen.count("on_log") + 2
    assert f"failed {failed} times: on_log {failed - 2}, on_save 2" in lines[1]


def test_a_tracker_that_cannot_start_ends_the_run_before_its_first_step(run, tmp_path, capsys):
    trainer = run(callbacks=[Unreachable("on_train_begin")])
    with pytest.raises(ConnectionError):
        trainer.train()
    said = capsys.readouterr().err
    assert "the tracker Unreachable could not start; report_to='none' trains without it" in said
    assert "nothing was trained yet, so nothing was saved" in said
    assert trainer.state.global_step == 0 and not list((tmp_path / "run").glob("checkpoint-*"))


def test_trackers_are_told_from_other_callbacks(run):
    tracker, other = Unreachable("on_log"), Broken("on_log", 1)
    assert is_tracker(tracker) and not is_tracker(other)
    handler = run(callbacks=[tracker]).callback_handler
    handler.callbacks = [tracker, other]
    handler = TolerantHandler(handler)
    state, control = TrainerState(global_step=0), TrainerControl()
    assert handler.call_event("on_log", None, state, control, logs={}) is control and tracker.seen == ["on_log"]
    state.global_step = 1
    with pytest.raises(KeyError, match="mistake"):
        handler.call_event("on_log", None, state, control, logs={})


class Server:
    """What TRL calls of a tracker's module, without a callback in between; gone after the first few calls."""

    def __init__(self, calls):
        self.calls, self.run, self.Table = calls, object(), dict
        self.active_run = object

    def log(self, values, step=None):
        self.calls -= 1
        if self.calls < 0:
            raise ConnectionError("tracker.example.org is unreachable")

    log_metrics = log


def test_training_goes_on_where_trl_writes_to_a_tracker_itself(run, tmp_path, monkeypatch, capsys):
    plain = run(max_steps=2, output_dir=str(tmp_path / "plain"))
    plain.train()
    mlflow, trackio = Server(4), Server(0)
    monkeypatch.setattr(profiling, "is_mlflow_available", lambda: True)
    monkeypatch.setattr(profiling, "mlflow", mlflow, raising=False)
    monkeypatch.setattr(grpo_trainer, "trackio", trackio, raising=False)  # the table of completions
    trainer = run(max_steps=2, log_completions=True)
    trainer.args.report_to = ["mlflow", "trackio"]
    trainer.train()
    assert_same(weights(trainer.model), weights(plain.model))
    assert mlflow.calls < -1 and trackio.calls == -3  # a table for each log: two steps, and the end
    assert profiling.mlflow is mlflow and grpo_trainer.trackio is trackio
    said = capsys.readouterr().err
    assert said.count("mlflow failed (ConnectionError: tracker.example.org is unreachable): training goes on") == 1
    assert said.count("trackio failed (ConnectionError") == 1
    assert f"mlflow failed {-mlflow.calls} times" in said and "trackio failed 3 times" in said
    assert len(list((tmp_path / "run" / "completions").glob("*.parquet"))) == 2


def test_a_tracker_that_works_is_left_to_itself(run, capsys):
    tracker = Unreachable()
    run(callbacks=[tracker], max_steps=1).train()
    assert {"on_train_begin", "on_log", "on_train_end"} <= set(tracker.seen)
    assert "tracker" not in capsys.readouterr().err


#: A step moves the strength of the noise in addition to the weights.
STATEFUL = {
    "scheme": MXFP4RLConfig(outlier_fallback_rate=0.2),
    "max_steps": 4,
    "aqn_schedule": "entropy",
    "aqn_target_entropy": 4.0,
    "aqn_rate_limit": 0.9,
    "aqn_sigma_start": 0.9,
    "aqn_sigma_end": 0.3,
    "error_every": 0,
}
TIMES = {
    "step_time", "train_runtime", "train_samples_per_second", "train_steps_per_second", "train_loss", "total_flos",
}  # fmt: skip


def lines(trainer):
    return [{key: value for key, value in e.items() if key not in TIMES} for e in trainer.state.log_history]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The end of a run of these options that nothing stops: weights, noise, logs."""
    trainer = trainer_factory(tmp_path_factory.mktemp("whole"))(**STATEFUL)
    trainer.train()
    return weights(trainer.model), trainer.noise_controller.sigma, lines(trainer)


@pytest.mark.parametrize(
    ("event", "lacks"), [("on_log", set()), ("on_step_end", {"loss", "grad_norm", "learning_rate"})]
)
def test_a_callback_of_the_user_that_fails_stops_training_with_everything_saved(
    run, undisturbed, tmp_path, event, lacks, capsys
):
    with pytest.raises(KeyError, match="mistake"):
        run(callbacks=[Broken(event, 2)], **STATEFUL).train()
    saved = tmp_path / "run" / "checkpoint-2"
    assert f"training stopped at step 2 by KeyError: 'mistake'; saved as {saved}" in capsys.readouterr().err
    resumed = run(**STATEFUL)
    resumed.train(resume_from_checkpoint=True)
    values, sigma, (first, second, *rest) = undisturbed
    assert resumed.state.global_step == 4
    assert_same(weights(resumed.model), values)
    assert resumed.noise_controller.sigma == sigma > 0
    assert lacks < set(second)
    second = {key: value for key, value in second.items() if key not in lacks}
    assert_same(sorted(lines(resumed)[1].items()), sorted(second.items()))
    assert_same(lines(resumed)[2:], rest)
