# SPDX-License-Identifier: Apache-2.0
"""How the processes of a recipe end together."""

import torch
from accelerate import PartialState


def leave_together() -> None:
    """Wait for the other processes, then end the process group; without one, do nothing.

    To be called as the last thing of a run that succeeded. A process that just leaves can be aborted while the
    interpreter shuts down ("terminate called without an active exception"): a thread of the process group may still
    hold a tensor. The launcher takes that for a failure of the job, and kills the process that writes the results. A
    process that failed must not call this: the others are not on their way here.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    state = PartialState()
    state.wait_for_everyone()
    state.destroy_process_group()
