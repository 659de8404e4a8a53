# SPDX-License-Identifier: Apache-2.0
"""Processes that are killed while they write a checkpoint, and jobs that lose a rank: the end is, bit for bit, that of
a run that was never stopped."""

import pytest
import torch
from cpu_engines import run_job
from engine_jobs import STEPS
from same_bits import assert_same

from hf_mxfp4.checkpoint import last_complete_checkpoint, why_incomplete


JOB = "engine_jobs:train_or_resume"
FILES = ("optimizer.pt", "mxfp4_state_0.pt", "trainer_state.json", "training_args.bin", "rng_state.pth")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("kills")
    run_job("engine_jobs:make_base", root / "base.log", folder=str(root / "base"))
    answer = run_job(JOB, root / "whole.log", base=str(root / "base"), run=str(root / "whole"))
    assert answer.codes == [0], answer.output[-3000:]
    return root, torch.load(root / "whole" / "final.pt")


def finish(runs, folder):
    root, expected = runs
    answer = run_job(JOB, folder / "last.log", base=str(root / "base"), run=str(folder))
    assert answer.codes == [0], answer.output[-3000:]
    assert_same(torch.load(folder / "final.pt"), expected)
    return answer.output


@pytest.mark.parametrize("file", ["rotation", *(pytest.param(name, marks=pytest.mark.large) for name in FILES)])
def test_killed_while_writing_a_checkpoint(runs, file):
    root, _ = runs
    folder = root / f"writing-{file}"
    folder.mkdir()
    answer = run_job(JOB, folder / "0.log", base=str(root / "base"), run=str(folder), dies_writing=file)
    assert answer.codes == [-9], answer.output[-3000:]
    found = {path.name: why_incomplete(path) for path in folder.glob("checkpoint-*")}
    if file == "rotation":
        assert found["checkpoint-3"] is None
        assert found["checkpoint-1"] is not None
    else:
        assert found["checkpoint-2"] is None
        assert found["checkpoint-3"] is not None
    output = finish(runs, folder)
    assert (file == "rotation") == ("is not resumed from" not in output)
    assert why_incomplete(folder / f"checkpoint-{STEPS}") is None


@pytest.fixture
def base(tmp_path):
    run_job("engine_jobs:make_base", tmp_path / "base.log", folder=str(tmp_path / "base"))
    return str(tmp_path / "base")


def train(base, folder, failure):
    folder.mkdir(exist_ok=True)
    arguments = {"base": base, "run": str(folder), "failure": failure}
    done = run_job("engine_jobs:train_with_a_failing_rank", folder / f"{failure}.log", ranks=2, **arguments)
    assert not done.timed_out
    return done


def test_a_reward_that_raises_in_one_rank_ends_the_job(base, tmp_path):
    failed = train(base, tmp_path / "run", "raises")
    assert all(code > 0 for code in failed.codes), failed.codes
    assert "RewardError: reward function 'even_digits' raised KeyError: 'answer'" in failed.output
    assert "not saved, since other processes may still be training" in failed.output
    newest = str(tmp_path / "run" / "checkpoint-2")
    assert last_complete_checkpoint(tmp_path / "run") == newest
    assert f"the newest whole checkpoint is {newest}" in failed.output


@pytest.mark.large
def test_a_killed_rank_ends_the_job_and_its_checkpoint_goes_on_exactly(base, tmp_path):
    whole = train(base, tmp_path / "whole", None)
    assert whole.codes == [0, 0], whole.output[-3000:]
    killed = train(base, tmp_path / "run", "killed")
    assert killed.codes[1] == -9 and killed.codes[0] > 0, killed.output[-3000:]
    newest = str(tmp_path / "run" / "checkpoint-2")
    assert last_complete_checkpoint(tmp_path / "run") == newest
    assert f"the newest whole checkpoint is {newest}" in killed.output
    resumed = train(base, tmp_path / "run", None)
    assert resumed.codes == [0, 0], resumed.output[-3000:]
    ends = [torch.load(tmp_path / name / "final.pt") for name in ("whole", "run")]
    steps = [end.pop("steps") for end in ends]
    assert steps[0][0] == 0
    assert steps[1] == [step for step in steps[0] if step >= 2]
    assert_same(*ends)
