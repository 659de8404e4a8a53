# SPDX-License-Identifier: Apache-2.0
"""Jobs that the fault tests run in processes of their own."""

import os
import shutil
import sys
from pathlib import Path

from grpo_runs import trainer_factory

from hf_mxfp4.checkpoint import last_complete_checkpoint


ROOT = Path(__file__).resolve().parents[2]
#: The environment of such a process.
PATHS = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in (".", "kernels", "tests")),
    "OMP_NUM_THREADS": "1",
    "CI": "1",
    "HF_MXFP4_VERBOSITY": "info",
}
#: A checkpoint at each step, in the middle of rollouts too.
RUN = {"max_steps": 5, "save_strategy": "steps", "save_steps": 1, "num_iterations": 2}


def fill(scratch: str, disk: str) -> None:
    """Train on a small file system until it is full, then go on elsewhere from what is whole."""
    build = trainer_factory(Path(scratch))
    try:
        build(output_dir=disk, **RUN).train()
    except Exception as error:
        print("stopped by", type(error).__name__, error)
    newest = Path(last_complete_checkpoint(disk))
    shutil.copytree(newest, Path(scratch) / "elsewhere" / newest.name)
    resumed = build(output_dir=str(Path(scratch) / "elsewhere"), **RUN)
    resumed.train(resume_from_checkpoint=True)
    print("the newest whole checkpoint goes on:", resumed.state.global_step == RUN["max_steps"], flush=True)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
