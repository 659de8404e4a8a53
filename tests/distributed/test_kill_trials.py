# SPDX-License-Identifier: Apache-2.0
"""Training processes that are killed at random moments, or while they write a checkpoint, and resumed: the end is, bit
for bit, that of a run that was never stopped."""

import random
import time

import pytest
import torch
from kill_jobs import STEPS
from rank_jobs import run_job, start_job
from same_bits import assert_same

from hf_mxfp4.checkpoint import last_complete_checkpoint, why_incomplete


JOB = "kill_jobs:train_or_resume"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder, the final state of an uninterrupted run."""
    root = tmp_path_factory.mktemp("kills")
    run_job("kill_jobs:make_base", root / "base.log", folder=str(root / "base"))
    answer = run_job(JOB, root / "whole.log", base=str(root / "base"), run=str(root / "whole"))
    assert answer.codes == [0], answer.output[-3000:]
    return root, torch.load(root / "whole" / "final.pt")


def finish(runs, folder):
    root, expected = runs
    answer = run_job(JOB, folder / "last.log", base=str(root / "base"), run=str(folder))
    assert answer.codes == [0], answer.output[-3000:]
    assert_same(torch.load(folder / "final.pt"), expected)
    return answer.output


def trial(runs, seed):
    """One run with one or two kills; what each of them met."""
    root, _ = runs
    chance = random.Random(seed)
    folder = root / f"trial{seed}"
    folder.mkdir()
    met = []
    for step in sorted(chance.sample(range(1, STEPS + 1), chance.choice([1, 1, 2]))):
        # Some time after a step has begun to write its checkpoint: a save and a step take about 0.3 s together.
        job = start_job(JOB, folder / f"{step}.log", base=str(root / "base"), run=str(folder))
        while job.poll() is None and not (folder / f"checkpoint-{step}").exists():
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.3))
        job.send_signal()
        answer = job.wait()
        assert answer.codes in ([-9], [0]), answer.output[-3000:]
        newest = max(folder.glob("checkpoint-*"), key=lambda path: int(path.name[11:]), default=None)
        reason = newest and why_incomplete(newest)
        complete = last_complete_checkpoint(folder)
        met.append((answer.codes[0], newest and newest.name, reason, complete and complete.rpartition("/")[2]))
    finish(runs, folder)
    return met


@pytest.mark.large
def test_killed_at_twenty_random_moments(runs):
    met = [kill for seed in range(100, 120) for kill in trial(runs, seed)]
    killed = [kill for kill in met if kill[0] == -9]
    half_written = [kill for kill in killed if kill[2] is not None]
    print(f"{len(met)} processes, {len(killed)} killed in time, {len(half_written)} while writing a checkpoint")
    assert len(killed) >= 10 and half_written


@pytest.mark.parametrize(
    "file",
    [
        pytest.param("optimizer.pt", marks=pytest.mark.large),
        "mxfp4_state_0.pt",
        pytest.param("trainer_state.json", marks=pytest.mark.large),
        "rotation",
        pytest.param("training_args.bin", marks=pytest.mark.large),
        pytest.param("rng_state.pth", marks=pytest.mark.large),
    ],
)
def test_killed_while_writing_a_checkpoint(runs, file):
    root, _ = runs
    folder = root / f"writing-{file}"
    folder.mkdir()
    answer = run_job(JOB, folder / "0.log", base=str(root / "base"), run=str(folder), dies_writing=file)
    assert answer.codes == [-9], answer.output[-3000:]
    found = {path.name: why_incomplete(path) for path in folder.glob("checkpoint-*")}
    if file == "rotation":
        assert found["checkpoint-3"] is None and found["checkpoint-1"] is not None
    else:
        assert found["checkpoint-2"] is None and found["checkpoint-3"] is not None
    output = finish(runs, folder)
    assert (file == "rotation") == ("is not resumed from" not in output)
    assert why_incomplete(folder / f"checkpoint-{STEPS}") is None
