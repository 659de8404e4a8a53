# SPDX-License-Identifier: Apache-2.0
"""A job of which one rank dies or fails ends with an error, in bounded time, under the launcher that users have."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from engine_jobs import make_base
from processes import PATHS


#: Of the job once the rank has failed; starting it takes longer. Gloo notices a closed connection at once.
LIMIT = 60


def launch(folder, failure):
    """Return code, output, and the seconds that the job lived on after rank 1 had failed."""
    base = make_base(folder / "base")
    # What `accelerate launch` is for several processes of one machine; `--cpu` would start a single one.
    command = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    command += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    command += [str(Path(__file__).with_name("kill_jobs.py")), str(base), str(folder / "run"), failure]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, PATHS)), "OMP_NUM_THREADS": "1", "CI": "1"}
    job = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        start_new_session=True,
    )
    lines, failed = [], None
    try:
        os.set_blocking(job.stdout.fileno(), True)
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


@pytest.mark.timeout(300)
@pytest.mark.parametrize("failure", ["killed", pytest.param("raises", marks=pytest.mark.large)])
def test_the_job_ends_with_an_error(tmp_path, failure):
    code, output, seconds = launch(tmp_path, failure)
    assert code != 0
    assert seconds < LIMIT
    if failure == "raises":
        assert "RewardError: reward function 'reward' raised KeyError: 'answer'" in output
        assert "other processes may still be training" in output
    else:
        assert "Signal 9 (SIGKILL)" in output
