# SPDX-License-Identifier: Apache-2.0
"""One of two ranks is killed: the other ends in bounded time, and both go on from the newest whole checkpoint to the
bits of a run that lost nobody. (Other faults: `tests/faults`.)"""

import pytest
import torch
from rank_jobs import run_job
from same_bits import assert_same

from hf_mxfp4.checkpoint import last_complete_checkpoint


JOB = "kill_jobs:train_beside_a_rank_that_dies"
#: Seconds for a whole job; Gloo notices a closed connection at once.
LIMIT = 100


@pytest.mark.large
def test_a_killed_rank_ends_the_job_and_its_checkpoint_goes_on_exactly(tmp_path):
    base = str(tmp_path / "base")
    run_job("kill_jobs:make_base", tmp_path / "base.log", folder=base)

    def train(name, dies):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        log = folder / f"{dies}.log"
        return run_job(JOB, log, ranks=2, timeout=LIMIT, base=base, run=str(folder), dies=dies)

    whole = train("whole", False)
    assert whole.codes == [0, 0], whole.output[-3000:]
    killed = train("run", True)
    assert killed.codes[1] == -9 and killed.codes[0] > 0, killed.output[-3000:]
    assert not killed.timed_out
    newest = str(tmp_path / "run" / "checkpoint-2")
    assert last_complete_checkpoint(tmp_path / "run") == newest
    assert f"the newest whole checkpoint is {newest}" in killed.output
    resumed = train("run", False)
    assert resumed.codes == [0, 0], resumed.output[-3000:]
    assert f"resuming from {newest}" in resumed.output
    assert_same(torch.load(tmp_path / "run" / "final.pt"), torch.load(tmp_path / "whole" / "final.pt"))
