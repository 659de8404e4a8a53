# SPDX-License-Identifier: Apache-2.0
"""How the processes of a recipe end together."""

import atexit
import os
import sys
import threading

import torch
from accelerate import PartialState


def leave_together() -> None:
    """Wait for the other processes, end the process group, and end this process; without a group, do nothing.

    To be called as the last thing of a run that succeeded. Exit handlers are run and output is written, but the
    interpreter is not taken apart: while it is, a process can be aborted ("terminate called without an active
    exception": a thread of the process group may still hold a tensor). The launcher takes that for a failure of the
    job, and kills the process that writes the results.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    state = PartialState()
    state.wait_for_everyone()
    state.destroy_process_group()
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
