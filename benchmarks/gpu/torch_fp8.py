# SPDX-License-Identifier: Apache-2.0
"""FP8 products of torch itself, a scale for each row of both operands."""

import torch

from .bench import Absent
from .machine import Machine


#: Elements ``[rows, K]`` and scales ``[rows, 1]``.
Operand = tuple[torch.Tensor, torch.Tensor]

_E4M3_MAX = 448.0


def fp8_rows(machine: Machine, x: torch.Tensor) -> Operand:
    """E4M3 elements and float32 scales, as torch's scaled product takes them.

    Raises [`Absent`] on a GPU without FP8 units.
    """
    if not machine.interpreted and machine.capability < (8, 9):
        raise Absent("FP8 products need compute capability 8.9")
    scale = x.abs().amax(dim=-1, keepdim=True).float().clamp_min(1e-12) / _E4M3_MAX
    return (x.float() / scale).to(torch.float8_e4m3fn), scale


def scaled_mm(a: Operand, b: Operand) -> torch.Tensor:
    """``a b^T`` in bfloat16, accumulated in full."""
    return torch._scaled_mm(
        a[0], b[0].t(), scale_a=a[1], scale_b=b[1].t(), out_dtype=torch.bfloat16, use_fast_accum=False
    )


def values(operand: Operand) -> torch.Tensor:
    return operand[0].float() * operand[1]
