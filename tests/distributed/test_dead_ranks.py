# SPDX-License-Identifier: Apache-2.0
"""One of two ranks is killed or fails: the job ends with an error, in bounded time, and goes on from the newest whole
checkpoint to the bits of a run that lost nobody. (Other faults: `tests/faults`.)"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from processes import PATHS
from rank_jobs import run_job
from same_bits import assert_same

from hf_mxfp4.checkpoint import last_complete_checkpoint


#: Seconds; of a job under the launcher once the rank has failed. Gloo notices a closed connection at once.
LIMIT = 100


@pytest.fixture
def base(tmp_path):
    run_job("kill_jobs:make_base", tmp_path / "base.log", folder=str(tmp_path / "base"))
    return str(tmp_path / "base")


def train(base, folder, failure):
    folder.mkdir(exist_ok=True)
    arguments = {"base": base, "run": str(folder), "failure": failure}
    done = run_job("kill_jobs:train_with_a_failing_rank", folder / f"{failure}.log", ranks=2, **arguments)
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


def launch(base, folder, failure):
    """Return code, output, and the seconds that the job lived on after rank 1 had failed, under the launcher that users
    have."""
    # What `accelerate launch` is for several processes of one machine; `--cpu` would start a single one.
    command = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    command += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    command += [str(Path(__file__).with_name("kill_jobs.py")), base, str(folder), failure]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, PATHS)), "OMP_NUM_THREADS": "1", "CI": "1"}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    job = subprocess.Popen(command, env=environment, start_new_session=True, **streams)
    lines, failed = [], None
    try:
        watchdog_end = time.monotonic() + 240
        for line in job.stdout:
            lines.append(line)
            if "rank 1 fails now" in line:
                failed = time.monotonic()
            if time.monotonic() > watchdog_end:
                break
        code = job.wait(timeout=LIMIT)
    finally:
        try:
            os.killpg(job.pid, signal.SIGKILL)  # nothing may outlive the test
        except ProcessLookupError:
            pass
    assert failed is not None, "".join(lines)[-4000:]
    return code, "".join(lines), time.monotonic() - failed


@pytest.mark.large
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("failure", "words"), [("killed", "Signal 9 (SIGKILL)"), ("raises", "other processes may still be training")]
)
def test_the_launched_job_ends_with_an_error(base, tmp_path, failure, words):
    code, output, seconds = launch(base, tmp_path / "run", failure)
    assert code != 0
    assert seconds < LIMIT
    assert words in output
