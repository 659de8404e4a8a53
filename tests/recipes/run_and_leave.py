# SPDX-License-Identifier: Apache-2.0
"""Run a recipe as its script, and fail if it leaves its process group open: such a process can be aborted at its exit.

torchrun ... run_and_leave.py recipes/NAME.py [options]
"""

import os
import runpy
import sys
from pathlib import Path

import torch


if __name__ == "__main__":
    script = Path(sys.argv[1]).resolve()
    sys.argv = sys.argv[1:]
    sys.path[0] = str(script.parent)
    runpy.run_path(str(script), run_name="__main__")
    print(f"rank {os.environ['RANK']} left {'its group open' if torch.distributed.is_initialized() else 'properly'}")
