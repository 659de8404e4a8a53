# SPDX-License-Identifier: Apache-2.0
"""What the callbacks measure reaches TRL's trackers through the normal log."""

import pytest
from grpo_runs import trainer_factory
from transformers import TrainerCallback


#: One metric of each callback.
EXPECTED = {
    "entropy/slope",
    "entropy/alarm",
    "entropy/effective_temperature",
    "error/grid",
    "error/activations/grid",
    "gradient_gain/first",
    "aqn/sigma",
    "aqn/measured_std",
    "completions/mean_length",
    "reward",
}


@pytest.fixture
def run(tmp_path):
    return trainer_factory(tmp_path)


class Tracker(TrainerCallback):
    """Takes what a tracker of transformers takes: numbers, by the name that they were logged under."""

    def __init__(self):
        self.series = {}

    def on_log(self, args, state, control, logs=None, **kwargs):
        for name, value in logs.items():
            if isinstance(value, (int, float)):
                self.series.setdefault(name, {})[state.global_step] = value


def test_a_tracker_gets_what_the_log_history_has(run):
    tracker = Tracker()
    trainer = run(gradient_gain_every=2, callbacks=[tracker])
    trainer.train()
    assert EXPECTED <= set(tracker.series)
    history = {}
    for entry in trainer.state.log_history:
        for name, value in entry.items():
            if isinstance(value, (int, float)) and name not in ("step", "total_flos"):
                history.setdefault(name, {})[entry["step"]] = value
    tracker.series.pop("total_flos", None)
    assert tracker.series == history


def test_tensorboard_has_the_series(run, tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    trainer = run(gradient_gain_every=2, report_to="tensorboard")
    trainer.train()
    events = EventAccumulator(str(tmp_path / "events")).Reload()
    names = set(events.Tags()["scalars"])
    assert {f"train/{name}" for name in EXPECTED} <= names
    logged = {e["step"]: e["aqn/sigma"] for e in trainer.state.log_history if "aqn/sigma" in e}
    assert {e.step: e.value for e in events.Scalars("train/aqn/sigma")} == pytest.approx(logged)


def test_wandb_offline_has_the_series(run, tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    run(gradient_gain_every=2, report_to="wandb").train()
    try:
        assert {f"train/{name}" for name in EXPECTED} <= set(dict(wandb.run.summary))
    finally:
        wandb.finish()
