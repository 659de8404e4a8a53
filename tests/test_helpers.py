# SPDX-License-Identifier: Apache-2.0
"""What tests share: the fork server, whose jobs look like new processes, and nothing outlives who asked for it, and the
tables that tests choose from, and how products of options are thinned."""

import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from processes import PATHS, code, run, start
from tables import MACROS, RULES, pairwise

from hf_mxfp4.numerics import QuantScheme, ScaleRule


def test_the_environment_is_the_one_given_and_a_job_leaves_nothing():
    change = "import os, sys; os.environ['LEFT'] = '1'; sys.modules['json'].LEFT = 1; import torch; torch.rand(9)"
    assert run(code(change)).returncode == 0
    show = "import json, os, torch; print(os.environ.get('LEFT'), hasattr(json, 'LEFT'), torch.initial_seed())"
    assert run(code(show), environment={"LEFT": "other"}).stdout == "other False 67280421310721\n"
    assert run(code(show + "; print(torch.get_num_threads())")).stdout == "None False 67280421310721\n1\n"


def alive(pid):
    """Whether a process runs; one that has ended and that its parent has not heard of yet does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def ends(pid):
    deadline = time.monotonic() + 60
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not alive(pid)


def test_nothing_outlives_a_killed_test_run():
    """Server and job of a process that gets SIGKILL."""
    text = (
        "import multiprocessing.forkserver, sys, processes\n"
        "processes.MODULES = ['torch', 'hf_mxfp4._logging', 'processes']\n"
        "job = processes.start(processes.code('import time; time.sleep(600)'))\n"
        "print(job.pids[0], multiprocessing.forkserver._forkserver._forkserver_pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    # A new process starts a server of its own.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, PATHS))}
    command = [sys.executable, "-c", text]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as client:
        job, server = map(int, client.stdout.readline().split())
        assert alive(job)
        assert alive(server)
        client.kill()
    assert ends(job)
    assert ends(server)


def test_a_job_that_takes_too_long_is_killed_and_a_running_one_gets_signals():
    done = run(code("import time; time.sleep(600)"), timeout=0.1)
    assert done.timed_out
    assert done.returncode == -signal.SIGKILL
    process = start(code("import time; time.sleep(600)"))
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait().returncode == -signal.SIGTERM == process.poll()


def pairs(cases):
    return {pair for case in cases for pair in itertools.combinations(enumerate(case), 2)}


def test_every_pair_is_met_by_few_cases():
    options = RULES, MACROS, (None, 0.5, 1.0), (1, 32), ("nearest", "stochastic"), ("float32", "bfloat16", "float16")
    cases = pairwise(*options)
    assert pairs(cases) == pairs(itertools.product(*options))
    assert 4 * 10 <= len(cases) <= 55
    assert len(set(cases)) == len(cases)
    assert cases == pairwise(*options)


def test_the_tables_have_every_rule_and_legal_scheme():
    assert set(RULES) == {rule.value for rule in ScaleRule}
    for macro, search in MACROS:
        QuantScheme("rceil", macro, search)
