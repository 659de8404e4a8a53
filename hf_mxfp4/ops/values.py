# SPDX-License-Identifier: Apache-2.0
"""Ordinary products of values, of one weight or of all experts."""

import torch
import torch.nn.functional as F

from .groups import Groups


def matmul(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None, groups: Groups | None = None
) -> torch.Tensor:
    """Return ``a [..., C] b[D, C]^T + bias[D]``, without gradients. With groups ``a [S, C] b[e, D, C]^T + bias[e, D]``
    for the rows of each expert."""
    if groups is None:
        return F.linear(a, b, bias)
    if _runs_grouped(a, b):
        out = F.grouped_mm(a.contiguous(), b.transpose(1, 2), offs=groups.offsets(a.device))
        return out if bias is None else out + groups.per_row(bias)
    out = a.new_empty(a.shape[0], b.shape[1])
    for expert, rows in groups:
        out[rows] = F.linear(a[rows], b[expert], None if bias is None else bias[expert])
    return out


def matmul_tokens(a: torch.Tensor, b: torch.Tensor, groups: Groups) -> torch.Tensor:
    """Return ``a[rows]^T b[rows]`` for the rows of each expert: ``[E, N, K]`` from ``a [S, N]`` and ``b [S, K]``."""
    if _runs_grouped(a, b):
        # Transposed last: where tokens are neighbours in memory, CUDA asserts that each expert has a multiple of 8.
        return F.grouped_mm(a.contiguous().t(), b.contiguous(), offs=groups.offsets(a.device))
    out = a.new_zeros(groups.n_experts, a.shape[1], b.shape[1])
    for expert, rows in groups:
        torch.mm(a[rows].t(), b[rows], out=out[expert])
    return out


def _runs_grouped(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether PyTorch's grouped product takes these operands in one launch for all experts: bfloat16 on CUDA devices of
    compute capability 9.0 and 10.0 (elsewhere it reads the counts back), rows of a multiple of 16 bytes."""
    return (
        a.device.type == "cuda"
        and len(a) > 0
        and a.dtype == b.dtype == torch.bfloat16
        and all(size % 8 == 0 for size in (*a.shape[1:], *b.shape[1:]))
        and torch.version.hip is None
        and torch.cuda.get_device_capability(a.device) in ((9, 0), (10, 0))
    )
