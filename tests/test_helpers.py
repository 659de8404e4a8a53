# SPDX-License-Identifier: Apache-2.0
"""What tests share: the fork server, whose jobs look like new processes, and nothing outlives who asked for it; the
tables that tests choose from, and how products of options are thinned; records of behaviour, what a comparison finds,
and what it accepts."""

import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from behaviour.__main__ import differences, main
from behaviour.record import Record
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
    assert done.timed_out and done.returncode == -signal.SIGKILL
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
    assert 4 * 10 <= len(cases) <= 55 and len(set(cases)) == len(cases)
    assert cases == pairwise(*options)


def test_the_tables_have_every_rule_and_legal_scheme():
    assert set(RULES) == {rule.value for rule in ScaleRule}
    for macro, search in MACROS:
        QuantScheme("rceil", macro, search)


@pytest.fixture
def make(tmp_path):
    """`make(name, change)` writes a small record and gives its folder; ``change`` may alter the tensor and entries."""

    def write(name, tensor=None, text="loss 0.5\nreward 1", leave_out=()):
        record = Record(tmp_path / name, "numbers", tmp_path)
        x = torch.tensor([1.0, -2.0, float("nan")]) if tensor is None else tensor
        record.tensor("x", x)
        record.tensor("nothing", None)
        record.text("log", text)
        record.value("steps", 4)
        for entry in leave_out:
            del record.entries[entry]
        record.save()
        return tmp_path / name

    return write


def found(before, after):
    return [(one.name, one.kind) for one in differences(before, after)]


def test_one_changed_bit(make):
    assert found(make("equal"), make("alike")) == []
    x = torch.tensor([1.0, -2.0, float("nan")])
    x.view(torch.int32)[1] ^= 1
    (difference,) = differences(make("a"), make("b", tensor=x))
    assert (difference.name, difference.kind) == ("numbers/x", "changed")
    assert difference.detail == "1 of 3 elements, max abs difference 2.38e-07 (largest value 2)"


def test_the_command_ends_with_1_where_something_is_unexplained(make, tmp_path, monkeypatch, capsys):
    before = make("a")
    after = make("b", text="other")
    intended = tmp_path / "intended"
    intended.write_text("numbers/*: meant\n")

    def compare(*options):
        monkeypatch.setattr(sys, "argv", ["behaviour", "compare", str(before), *map(str, options)])
        return main()

    assert compare(before) == 0
    assert compare(after, "--intended", intended) == 0
    intended.write_text("numbers/log\n")
    assert compare(after, "--intended", intended) == 2
    assert "line 1: expected 'GLOB: reason'" in capsys.readouterr().err
    assert compare(tmp_path / "nowhere") == 2
    assert capsys.readouterr().err.startswith(f"error: {tmp_path}/nowhere holds no record; make one with")
    assert compare(after) == 1
    assert capsys.readouterr().out.splitlines() == [
        "changed: numbers/log: 3 lines of text",
        "    -loss 0.5",
        "    -reward 1",
        "    +other",
        "1 unexplained differences, 0 intended ones",
    ]


def test_texts_are_recorded_without_what_changes_from_run_to_run(tmp_path):
    record = Record(tmp_path, "texts", tmp_path / "work")
    record.text("a", f'{tmp_path}/work/x "transformers_version": "5.1" on 2026-01-02 12:30:00 in 1.5 s, 3 seconds')
    assert record.entries["a"]["text"] == 'FOLDER/x "transformers_version": "VERSION" on DATE in TIME, TIME'
    record.text("progress", "a\n2 MB of 5 MB (40%), 1.2 MB/s, 629 s left, at x.weight\n5 MB (100%) in 71 s\nb 3 MB\n")
    assert record.entries["progress"]["text"] == "a\nb 3 MB\n"
    with pytest.raises(ValueError, match="texts/a is recorded twice"):
        record.text("a", "")
