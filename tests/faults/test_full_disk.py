# SPDX-License-Identifier: Apache-2.0
"""A disk that is full, or a limit on file sizes, while a checkpoint is written: the run stops and says so, and the
checkpoint before it goes on to the bits of a run that was never stopped."""

import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from fault_jobs import PATHS, RUN
from grpo_runs import trainer_factory
from same_bits import assert_same, weights
from transformers import TrainerCallback

from hf_mxfp4.checkpoint import last_complete_checkpoint, why_incomplete


class LimitFrom(TrainerCallback):
    """From an optimizer step on no file may be larger than the limit, in bytes: writing fails in the middle of one."""

    def __init__(self, step, limit):
        self.step, self.limit = step, limit

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.limit, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


@pytest.fixture
def limits():
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What makes trainers, the folder of a run on a disk of any size, and its weights."""
    folder = tmp_path_factory.mktemp("whole")
    build = trainer_factory(folder)
    trainer = build(**RUN)
    trainer.train()
    return build, folder / "run", weights(trainer.model)


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.pt"])
def test_a_checkpoint_that_does_not_fit_leaves_the_one_before_usable(tmp_path, file, whole, limits, capsys):
    build, folder, expected = whole
    size = (folder / "checkpoint-1" / file).stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    trainer = build(output_dir=str(tmp_path / "run"), callbacks=[LimitFrom(2, size - 1000)], **RUN)
    with pytest.raises(Exception, match="File too large|iostream error"):
        trainer.train()
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    said = capsys.readouterr().err
    newest = tmp_path / "run" / "checkpoint-2"
    assert "training stopped at step 3 by" in said and "saving failed too" in said
    assert f"the newest whole checkpoint is {newest}, resume with resume_from_checkpoint" in said
    assert why_incomplete(tmp_path / "run" / "checkpoint-3") is not None
    assert last_complete_checkpoint(tmp_path / "run") == str(newest)
    resumed = build(output_dir=str(tmp_path / "run"), **RUN)
    resumed.train(resume_from_checkpoint=True)
    assert_same(weights(resumed.model), expected)


MOUNT = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]


def may_mount():
    try:
        return subprocess.run([*MOUNT, "mount -t tmpfs none /mnt"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


@pytest.mark.large
@pytest.mark.skipif(not may_mount(), reason="no file system can be mounted here")
def test_a_real_file_system_that_fills_up(tmp_path):
    """A checkpoint of the job takes about 300 kB; five do not fit."""
    disk = tmp_path / "disk"
    disk.mkdir()
    job = f"{sys.executable} {Path(__file__).parent / 'fault_jobs.py'} fill {tmp_path} {disk}"
    process = subprocess.run(
        [*MOUNT, f"mount -t tmpfs -o size=1m none {disk} && exec {job}"],
        capture_output=True,
        text=True,
        timeout=300,
        env=PATHS,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    assert "No space left on device" in process.stderr and "the newest whole checkpoint is" in process.stderr
    (free,) = re.findall(r"\((\S+) GB are free there\)", process.stderr)
    assert float(free) < 1e-3
    assert "the newest whole checkpoint goes on: True" in process.stdout
