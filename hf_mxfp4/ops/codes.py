# SPDX-License-Identifier: Apache-2.0
"""Products with the codes of weights, without their values in memory where a kernel multiplies with codes."""

import torch

from ..numerics import MXFP4Tensor, QuantScheme
from . import cpu as on_cpu
from . import quantization
from . import triton as triton_kernels
from .groups import Groups
from .packed_weight import of_expert


def multiply_codes(
    a: torch.Tensor, b: MXFP4Tensor, bias: torch.Tensor | None, groups: Groups | None, codes_backend: str
) -> torch.Tensor:
    """Return ``a [..., K] Q(W)^T + bias``; with groups for the rows of each expert.

    Exact products are summed in float32, while a product of values rounds these to the dtype of ``a`` first, so that
    with macro factors or residuals the two differ by about one rounding.

    Args:
        a: values.
        b: the codes ``[N, ...]``, or of all experts ``[E, N, ...]``.
        bias: in the dtype of ``a``, or `None`.
        groups: the rows of each expert; `None` for one weight.
        codes_backend: what multiplies: ``"cpu"``, or ``"triton"`` for rows that it [`decodes`].
    """
    if codes_backend == "triton":
        return triton_kernels.linear(a, b, bias, None if groups is None else groups.offsets(a.device))
    if groups is None:
        return on_cpu.product(a, b, bias)
    if max(groups.counts, default=0) <= on_cpu.most_rows():
        return on_cpu.product(a, b, bias, groups.offsets(a.device))
    out = a.new_empty(a.shape[0], b.codes.shape[1])
    for expert, rows in groups:  # values of one expert are in memory at a time
        out[rows] = on_cpu.product(a[rows], of_expert(b, expert), None if bias is None else bias[expert])
    return out


def decodes(a: torch.Tensor, dtype: torch.dtype, codes_backend: str, groups: Groups | None) -> bool:
    """Whether a Triton kernel multiplies these rows with the codes of weights, in ``dtype``."""
    if codes_backend != "triton":
        return False
    n_experts = None if groups is None else groups.n_experts
    return triton_kernels.unsupported_product(a.shape[:-1].numel(), a.shape[-1], dtype, n_experts) is None


def reads_packed_on_gpus(scheme: QuantScheme, backend: str) -> bool:
    """Return whether the kernels are certain to multiply with weights of this scheme on a CUDA device, so that a CUDA
    graph can hold the product."""
    reason = triton_kernels.unsupported_reason("cuda", torch.bfloat16, quantization.as_read(scheme))
    return backend in ("auto", "triton") and reason is None
