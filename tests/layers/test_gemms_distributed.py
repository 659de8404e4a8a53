# SPDX-License-Identifier: Apache-2.0
"""Backward products under DDP and FSDP2 with two processes on the CPU, against one process."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from run_gemms_distributed import SCHEMES, gradients


HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


@pytest.fixture(scope="module")
def distributed(tmp_path_factory) -> dict:
    out = tmp_path_factory.mktemp("gemms") / "gradients.pt"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    path = os.pathsep.join(map(str, (ROOT, ROOT / "kernels", ROOT / "tests")))
    job = subprocess.Popen(
        [*command, str(HERE / "run_gemms_distributed.py"), str(out)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    try:
        output, _ = job.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)  # the workers too, which outlive their launcher
        raise
    assert job.returncode == 0, output[-3000:]
    return torch.load(out)


@pytest.mark.parametrize("scheme", [name for name in SCHEMES if name != "stochastic"])
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_gradients_are_those_of_one_process(distributed, engine, scheme):
    expected = gradients("none", scheme)
    found = distributed[engine, scheme]
    assert len(found) == len(expected)
    for name, grad in found.items():
        torch.testing.assert_close(grad, expected[name.removeprefix("module.")], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_random_numbers_differ_by_rank_and_do_not_harm(distributed, engine):
    expected, found = gradients("none", "stochastic"), distributed[engine, "stochastic"]
    exact = gradients("none", "w4a4g4")
    name = "model.layers.1.mlp.up_proj.weight"
    assert not torch.equal(found[name], expected[name])
    assert (found[name] - exact[name]).norm() < 0.5 * exact[name].norm()
