# SPDX-License-Identifier: Apache-2.0
"""One product of two operands, of one weight or of all experts, by what multiplies such operands on their device."""

import torch
import torch.nn.functional as F

from ..backends import select as backends
from ..backends import triton as triton_kernels
from ..backends.cpu import packed_product as on_cpu
from ..numerics import MXFP4Tensor, QuantScheme
from .fp8 import FP8Operand, scaled_product
from .groups import Groups
from .packed_weight import of_expert


#: Values in the dtype of the product, codes and scale bytes, or E4M3 elements and scales of rows.
Operand = torch.Tensor | MXFP4Tensor | FP8Operand


def matmul(
    a: torch.Tensor | FP8Operand,
    b: Operand,
    bias: torch.Tensor | None = None,
    groups: Groups | None = None,
    *,
    dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """``a [..., C] b[D, C]^T + bias[D]``, without gradients. With groups ``a [S, C] b[e, D, C]^T + bias[e, D]`` for the
    rows of each expert.

    All ways give the same up to the order of sums; on codes, exact products are summed in float32, while values are
    rounded to the dtype of ``a`` first, so that with macro factors or residuals the two differ by about one rounding.

    Args:
        a: values, or E4M3 elements where ``b`` is such.
        b: values, codes, or E4M3 elements.
        bias: in the dtype of the product, or `None`.
        groups: the rows of each expert; `None` for one weight.
        dtype: of a product of E4M3 elements; otherwise that of ``a``.
        backend: what reads codes; see [`hf_mxfp4.fake_quantize`].
    """
    if isinstance(b, FP8Operand):
        return scaled_product(a, b, bias, dtype)
    if isinstance(b, MXFP4Tensor):
        return _on_codes(a, b, bias, backend) if groups is None else _experts_on_codes(a, b, bias, groups, backend)
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
    """``a[rows]^T b[rows]`` for the rows of each expert: ``[E, N, K]`` from ``a [S, N]`` and ``b [S, K]``."""
    if _runs_grouped(a, b):
        return F.grouped_mm(a.t().contiguous(), b.contiguous(), offs=groups.offsets(a.device))
    out = a.new_zeros(groups.n_experts, a.shape[1], b.shape[1])
    for expert, rows in groups:
        torch.mm(a[rows].t(), b[rows], out=out[expert])
    return out


def _runs_grouped(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether PyTorch's grouped product takes these operands in one launch for all experts: bfloat16 on CUDA devices of
    compute capability 9.0 and 10.0 (elsewhere it reads the counts back), rows of a multiple of 16 bytes."""
    return (
        a.device.type == "cuda"
        and a.dtype == b.dtype == torch.bfloat16
        and all(size % 8 == 0 for size in (*a.shape[1:], *b.shape[1:]))
        and torch.version.hip is None
        and torch.cuda.get_device_capability(a.device) in ((9, 0), (10, 0))
    )


def _on_codes(a: torch.Tensor, b: MXFP4Tensor, bias: torch.Tensor | None, backend: str) -> torch.Tensor:
    name = backends.reader(a, b.scheme, backend)
    if name == "cpu":
        return on_cpu.product(a, b, bias)
    if name == "triton" and (backend != "auto" or backends.is_verified("decode", a.device)):
        if triton_kernels.unsupported_product(a.shape[:-1].numel(), b.length, a.dtype) is None:
            return triton_kernels.linear(a, b, bias)
    return F.linear(a, backends.dequantize(b, a.dtype, backend), bias)


def _experts_on_codes(
    a: torch.Tensor, b: MXFP4Tensor, bias: torch.Tensor | None, groups: Groups, backend: str
) -> torch.Tensor:
    """All experts at once where a kernel takes their rows; otherwise the values of one expert at a time."""
    name = backends.reader(a, b.scheme, backend)
    if name == "triton" and (backend != "auto" or backends.is_verified("decode", a.device)):
        if triton_kernels.unsupported_product(len(a), b.length, a.dtype, len(b.codes)) is None:
            return triton_kernels.linear(a, b, bias, groups.offsets(a.device))
    if name == "cpu" and max(groups.counts, default=0) <= on_cpu.most_rows():
        return on_cpu.grouped_product(a, b, groups.offsets(a.device), bias)
    out = a.new_empty(a.shape[0], b.codes.shape[1])
    for expert, rows in groups:
        own = None if bias is None else bias[expert]
        out[rows] = _on_codes(a[rows], of_expert(b, expert), own, backend)
    return out


def reads_packed_on_gpus(scheme: QuantScheme, backend: str) -> bool:
    """Whether the kernels are certain to multiply with weights of this scheme on a CUDA device, so that a CUDA graph
    can hold the product."""
    reason = triton_kernels.unsupported_reason("cuda", torch.bfloat16, backends.as_read(scheme))
    return backend in ("auto", "triton") and reason is None
