# SPDX-License-Identifier: Apache-2.0
"""Operands for FP8 tensor cores: how activations, gradients, and weights made of codes become E4M3 elements with powers
of two, and the product of two of them."""

from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ..numerics import decode_e8m0
from ..numerics.formats import e4m3_scale_byte
from . import quantization
from . import triton as triton_kernels
from .groups import Groups


_BY_ROW = F.ScalingType.RowWise
#: Per device, elements that [`to_fp8`] rounded: a scalar that is added to without waiting for the device.
inexact: dict[torch.device, torch.Tensor] = {}


class FP8Operand(NamedTuple):
    """``elements [..., R, C]``, float8_e4m3fn, times ``scale``, float32 powers of two: ``[..., R, 1]``, of rows, or
    ``[..., 1, 1]``, of a whole matrix."""

    elements: torch.Tensor
    scale: torch.Tensor

    @classmethod
    def of_bytes(cls, elements: torch.Tensor, byte: torch.Tensor) -> "FP8Operand":
        """Return what [`hf_mxfp4.ops.quantize_e4m3`] gives."""
        return cls(elements, byte.contiguous().view(torch.float8_e8m0fnu).float())

    def row_scales(self) -> torch.Tensor:
        """Return a scale for each row: ``[..., R]``."""
        return self.scale.expand(*self.elements.shape[:-1], 1).squeeze(-1).contiguous()

    def transposed(self) -> "FP8Operand":
        """Return the transposed matrices, contiguous, where each has one scale; other scales have to be folded."""
        return FP8Operand(self.elements.mT.contiguous(), self.scale)

    def values(self, dtype: torch.dtype, backend: str) -> torch.Tensor:
        """Return the values ``[..., R, C]`` in ``dtype``."""
        byte = self.scale.to(torch.float8_e8m0fnu).view(torch.uint8).expand(*self.elements.shape[:-1], 1)
        return quantization.dequantize_e4m3(self.elements, byte.contiguous(), dtype, backend)


def fold_scales(
    grad: torch.Tensor, scale: torch.Tensor, groups: Groups | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Move scales of rows ``[..., R, 1]``, powers of two, into a gradient ``[M, R]`` whose product with these rows sums
    over them, but for the largest of each matrix ``[..., 1, 1]``, which is returned: neither operand leaves its dtype.
    A row with NaN makes all of its column of the gradient NaN."""
    if scale.shape[-2] == 1:
        return grad, scale
    top = scale.nan_to_num(nan=0.0).amax(dim=-2, keepdim=True)
    factors = (scale / top).squeeze(-1)
    factors = factors if groups is None else groups.per_row(factors)
    # bfloat16 has all powers of two that float32 has as normal numbers.
    factors = factors.to(grad.dtype) if grad.dtype == torch.bfloat16 else factors
    return (grad * factors).to(grad.dtype), top


def to_fp8(values: torch.Tensor) -> FP8Operand:
    """Return quantized values ``[..., C]`` as elements and scales of rows; count rounded ones. Infinity becomes NaN."""
    if quantization.supports_e4m3(values):
        elements, scale, rounded = triton_kernels.to_fp8(values)
    else:
        wide = values.float()
        finite = wide.isfinite()
        scale = _scale(torch.where(finite, wide, 0), (-1,))
        elements = torch.where(finite, wide / scale, torch.nan).to(torch.float8_e4m3fn).contiguous()
        rounded = (elements.float() * scale != wide).logical_and(finite).sum()
    _count(rounded)
    return FP8Operand(elements, scale)


def _count(rounded: torch.Tensor) -> None:
    """Add to `inexact`. A CUDA graph that is captured before anything was counted counts nothing."""
    device = rounded.device
    if device not in inexact:
        if rounded.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        # Another thread allocates: this one's memory may be that of a graph (see `mxfp4_kernels.decode.counters`), and
        # its modes are the caller's. The copy from the host is complete when it returns.
        with ThreadPoolExecutor(1) as other:
            inexact[device] = other.submit(torch.tensor, 0, device=device).result()
    inexact[device].add_(rounded)


def weight_to_fp8(values: torch.Tensor) -> FP8Operand | None:
    """Return quantized weights ``[N, K]`` or ``[E, N, K]`` as elements with one scale for each matrix, or where these
    round an element, with scales of rows; `None` where those do too. Waits for the device, but for a CUDA graph that is
    captured, in which nothing can be looked at and the answer is `None`."""
    if values.is_cuda and torch.cuda.is_current_stream_capturing():
        return None
    for whole in (True, False):
        if quantization.supports_e4m3(values):
            elements, scale, rounded = triton_kernels.to_fp8(values, whole)
            scale = scale[..., :1, :] if whole else scale
        else:
            wide = values.float()
            scale = _scale(wide, (-2, -1) if whole else (-1,))
            elements = (wide / scale).to(torch.float8_e4m3fn)
            rounded = (elements.float().mul_(scale) != wide).sum()
        if rounded.item() == 0:
            return FP8Operand(elements, scale)
    return None


def _scale(values: torch.Tensor, axes: tuple[int, ...]) -> torch.Tensor:
    return decode_e8m0(e4m3_scale_byte(values.abs().amax(dim=axes, keepdim=True)))


def multiply_fp8(
    a: FP8Operand, b: FP8Operand, bias: torch.Tensor | None, groups: Groups | None, dtype: torch.dtype | None
) -> torch.Tensor:
    """Return ``a [..., C] b[D, C]^T + bias[D]`` in ``dtype``; with groups ``b [E, D, C]`` for the rows of each
    expert."""
    *leading, length = a.elements.shape
    rows = a.elements.reshape(-1, length).contiguous()
    scale = a.row_scales().flatten()
    options = {"output_dtype": dtype, "use_fast_accum": False}  # which would keep 14 bits of the sums
    if groups is None:
        scales = scale[:, None], _BY_ROW, b.row_scales()[None], _BY_ROW
        out = F.scaled_mm(rows, b.elements.t(), *scales, **options)
        out = out.view(*leading, out.shape[-1])
        return out if bias is None else out + bias
    scales = scale, _BY_ROW, b.row_scales(), _BY_ROW
    out = F.scaled_grouped_mm(rows, b.elements.mT, *scales, offs=groups.offsets(rows.device), **options)
    return out if bias is None else out + groups.per_row(bias)
