# SPDX-License-Identifier: Apache-2.0
"""The soak notices what it is there for: growing memory, traces of noise, numbers that are not finite."""

import json

import pytest
import torch
from undrawn import leave_figures_undrawn

from benchmarks import soak
from hf_mxfp4 import MXFP4GRPOTrainer


QUICK = """--sft_steps=2 --sft_batch_size=8 --tiny_hidden_size=32 --tiny_num_layers=2 --per_device_train_batch_size=8
--num_generations=4 --n_test=8 --greedy_batch_size=8 --reload_check=0 --logging_steps=1 --save_strategy=no
--report_every=0 --n_train=200""".split()


@pytest.fixture(autouse=True)
def no_figures(monkeypatch):
    leave_figures_undrawn(monkeypatch.setattr)


def test_slope_of_a_line_in_noise_is_within_its_interval():
    noise = torch.randn(200, generator=torch.Generator().manual_seed(0)).tolist()
    samples = [(20 * i, 700_000 + 20 * i * 3.0 + 50 * noise[i]) for i in range(200)]
    estimate, (low, high) = soak.slope(samples)
    assert low < 3.0 < high and estimate == pytest.approx(3.0, rel=0.05) and high - low < 0.5


def test_slope_of_no_growth_is_zero_and_few_samples_are_refused():
    assert soak.slope([(i, 5.0) for i in range(50)]) == (0.0, (0.0, 0.0))
    with pytest.raises(ValueError, match="9 samples are too few"):
        soak.slope([(i, 5.0) for i in range(9)])


@pytest.mark.parametrize("mode", ["qat", pytest.param("lora", marks=pytest.mark.large)])
def test_a_short_soak_finds_nothing(mode, tmp_path):
    entry = soak.soak(mode, 14, tmp_path / "run", every=1, options=QUICK)
    assert entry["rollouts_compared"] == 14 and entry["log_entries_with_noise"] > 5
    assert entry["traces_of_noise"] == entry["not_finite"] == []
    assert entry["logged_numbers"] > 100 and len(entry["resident_mib"]) == 14
    soak.replace_record(entry, tmp_path / "records.json")
    soak.replace_record({**entry, "value": 0.0}, tmp_path / "records.json")
    (written,) = json.loads((tmp_path / "records.json").read_text())
    assert written["name"] == f"soak_{mode}" and written["value"] == 0.0
    # Memory over so few steps says nothing.
    assert soak.complaints({**entry, "interval_95": [0.0, 0.0]}) == []


def test_weights_that_a_rollout_changes_are_noticed(tmp_path, monkeypatch):
    class Careless(MXFP4GRPOTrainer):
        def _generate(self, prompts):
            output = super()._generate(prompts)
            if self.model.training and self.state.global_step == 3:
                self.model.model.norm.weight.data.add_(1e-6)
                self.model.model.norm.register_forward_hook(lambda *args: None)
            return output

    monkeypatch.setattr(soak, "WatchedTrainer", type("Watched", (soak.WatchedTrainer, Careless), {}))
    entry = soak.soak("qat", 14, tmp_path / "run", every=1, options=QUICK)
    assert entry["traces_of_noise"] == ["weights changed at step 3", "hooks changed at step 3"]
    assert soak.complaints(entry)[:2] == entry["traces_of_noise"]


def test_what_is_wrong_is_said():
    entry = {
        "traces_of_noise": [],
        "not_finite": soak.not_finite([{"step": 5, "loss": float("nan"), "reward": 1.0, "note": "nan"}]),
        "interval_95": [20.0, 30.0],
        "value": 25.0,
        "tensors_alive": [(100, 300), (200, 400)],
    }
    assert soak.complaints(entry) == [
        "not finite: loss at step 5",
        "resident memory grows by 25.0 KiB per step",
        "300 tensors were alive early in the run, 400 at its end",
    ]
