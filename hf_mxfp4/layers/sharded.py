# SPDX-License-Identifier: Apache-2.0
"""Parameters that a distributed strategy has spread over processes, gathered for as long as they are read."""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn


@contextlib.contextmanager
def gathered(parameter: nn.Parameter, writes: bool = False) -> Iterator[torch.Tensor]:
    """All of a parameter's values, detached, to be read within the context: gathered from all processes under FSDP2 and
    ZeRO-3, whose processes must all enter it; elsewhere the parameter's own memory. With ``writes`` they can be changed
    there, by all processes alike, but under FSDP2."""
    with contextlib.ExitStack() as stack:
        if hasattr(parameter, "ds_id"):
            import deepspeed

            rank = 0 if writes else None
            stack.enter_context(deepspeed.zero.GatheredParameters([parameter], modifier_rank=rank))
        tensor = parameter.detach()
        yield tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
