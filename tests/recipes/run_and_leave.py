# SPDX-License-Identifier: Apache-2.0
"""Run a recipe as its script, and print at its exit whether it left its process group open, as no recipe should.

Figures are not drawn. With an open group a process can be aborted at its exit. Arguments: the script, and its own.
"""

import atexit
import os
import runpy
import sys
from pathlib import Path

import torch
from undrawn import leave_figures_undrawn


def say_how_it_left() -> None:
    print(f"rank {os.environ['RANK']} left {'its group open' if torch.distributed.is_initialized() else 'properly'}")


if __name__ == "__main__":
    script = Path(sys.argv[1]).resolve()
    sys.argv = sys.argv[1:]
    sys.path[0] = str(script.parent)
    atexit.register(say_how_it_left)
    leave_figures_undrawn()
    runpy.run_path(str(script), run_name="__main__")
