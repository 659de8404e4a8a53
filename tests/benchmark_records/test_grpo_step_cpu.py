# SPDX-License-Identifier: Apache-2.0
"""The benchmark of GRPO steps on CPUs: that every phase is counted once, and steps are compared within a round."""

import json

import pytest
import torch

from benchmarks import grpo_step_cpu, phases
from benchmarks.grpo_step_cpu import ARMS, BASELINE, STEPS, Arm
from benchmarks.phases import PHASES, REST, PhaseClock


class Work:
    """Something with methods that take time of a clock that is set by hand."""

    def __init__(self, now):
        self.now = now

    def outer(self):
        self.now[0] += 1.0
        self.inner()
        self.now[0] += 2.0

    def inner(self):
        self.now[0] += 4.0

    def fails(self):
        self.now[0] += 8.0
        raise ValueError


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(phases, "_now", lambda: (now[0], 10 * now[0]))
    clock, clock.work = PhaseClock(), Work(now)
    clock.wrap(clock.work, "outer", "scoring")
    clock.wrap(clock.work, "inner", "generation")
    clock.wrap(clock.work, "fails", "backward")
    return clock


def test_a_phase_within_another_counts_for_itself_alone(clock):
    clock.work.outer()  # before the first step
    for _ in range(2):
        clock.on_step_begin()
        clock.work.outer()
        clock.work.now[0] += 0.5
    clock.on_train_end()
    clock.work.outer()
    assert clock.steps == [{REST: (0.5, 5.0), "scoring": (3.0, 30.0), "generation": (4.0, 40.0)}] * 2


def test_a_phase_ends_with_an_exception(clock):
    clock.on_step_begin()
    with pytest.raises(ValueError):
        clock.work.fails()
    clock.work.inner()
    clock.on_train_end()
    assert clock.steps == [{REST: (0.0, 0.0), "backward": (8.0, 80.0), "generation": (4.0, 40.0)}]


def test_ratios_are_of_the_measured_steps_of_one_round():
    def rounds(*seconds):
        return [[{"forward": (100.0, 1.0)}, *({"forward": (s, 1.0)} for s in each), {}] for each in seconds]

    arms = {"base": Arm(None, False, "base"), "own": Arm(None, False, "base")}
    base, own = grpo_step_cpu.records_of(
        {"base": rounds((2.0, 8.0), (4.0, 4.0)), "own": rounds((4.0, 4.0), (4.0, 8.0))}, arms
    )
    assert base["ratio"] == 1 and base["value"] == 4.0 and own["value"] == 4.0
    assert own["ratio"] == 0.75  # of .5, 2, 1 and .5
    assert own["phases"] == {"forward": [4.0, 1.0]} and own["due"] == {"forward": [100.0, 1.0]}


def test_rewards_differ_within_a_group():
    assert len(set(grpo_step_cpu.reward(completions=["1"] * 8))) > 1


def test_arms_come_with_what_they_are_compared_with():
    arms = grpo_step_cpu.named(ARMS, torch.float32)
    assert list(grpo_step_cpu.chosen(arms, ["packed"])) == ["TRL, LoRA on float32", "LoRA on packed w4a16"]
    assert list(grpo_step_cpu.chosen(arms, None)) == list(arms)


def test_it_runs_on_the_model_of_the_demo(tmp_path):
    out, threads = tmp_path / "records.json", torch.get_num_threads()
    out.write_text(json.dumps([{"model": "another", "value": 1}]))
    sizes = ["--completions", "8", "--tokens", "2", "--rounds", "1", "--threads", "1"]
    grpo_step_cpu.main([*sizes, "--only", "QAT w4a16", "--add", "--out", str(out)])
    kept, base, own = json.loads(out.read_text())
    assert kept == {"model": "another", "value": 1}
    assert (base["name"], own["name"]) == (BASELINE.format(dtype="float32"), "QAT w4a16")
    assert own["baseline"] == base["name"] and own["shape"] == [8, 2] and torch.get_num_threads() == threads
    counted = {"generation", "scoring", "forward", "backward", "optimizer", "callbacks", REST}
    assert counted <= base["phases"].keys() and counted <= own["phases"].keys() <= {*PHASES, REST}
    assert all(seconds > 0 for phase in counted for seconds in own["phases"][phase])
    # The monitors of ours measure in a first step alone.
    assert own["due"]["callbacks"][1] > own["phases"]["callbacks"][1] and STEPS == 4
