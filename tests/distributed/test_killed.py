# SPDX-License-Identifier: Apache-2.0
"""Jobs that lose a rank: the end is, bit for bit, that of a run that was never stopped."""

import pytest
import torch
from cpu_engines import run_job
from same_bits import assert_same

from hf_mxfp4.checkpoint import last_complete_checkpoint


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
    assert f"resuming from {newest}" in resumed.output
    assert_same(torch.load(tmp_path / "run" / "final.pt"), torch.load(tmp_path / "whole" / "final.pt"))
