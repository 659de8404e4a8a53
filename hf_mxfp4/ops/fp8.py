# SPDX-License-Identifier: Apache-2.0
"""Operands for FP8 tensor cores: how activations, gradients, and weights made of codes become E4M3 elements with powers
of two, and the product of two of them."""

import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
import torch.nn.functional as F

from .._logging import get_logger
from ..numerics import decode_e8m0
from ..numerics.formats import e4m3_scale_byte
from . import quantization
from . import triton as triton_kernels
from .groups import Groups


_BY_ROW = F.ScalingType.RowWise
#: Per device, elements that [`to_fp8`] rounded: a scalar that is added to without waiting for the device.
inexact: dict[torch.device, torch.Tensor] = {}


class FP8Operand(NamedTuple):
    """E4M3 elements times powers of two.

    Attributes:
        elements: ``[..., R, C]``, float8_e4m3fn.
        scale: float32 of rows, ``[..., R, 1]``, or of whole matrices, ``[..., 1, 1]``.
        columns: the elements of the transposed matrices, ``[..., C, R]`` and contiguous, where they were written too.
        column_scale: of the rows of the transposed matrices, ``[..., C, 1]``, where each matrix has one scale.
    """

    elements: torch.Tensor
    scale: torch.Tensor
    columns: torch.Tensor | None = None
    column_scale: torch.Tensor | None = None

    @classmethod
    def of_bytes(cls, elements: torch.Tensor, byte: torch.Tensor) -> "FP8Operand":
        """Return what [`hf_mxfp4.ops.quantize_e4m3`] gives."""
        return cls(elements, byte.contiguous().view(torch.float8_e8m0fnu).float())

    @classmethod
    def of_columns(
        cls, columns: torch.Tensor, scale: torch.Tensor, column_scale: torch.Tensor | None = None
    ) -> "FP8Operand":
        """Return the operand ``[R, C]`` whose transposed elements ``[C, R]`` alone were kept."""
        return cls(columns.mT, scale, columns, column_scale)

    def row_scales(self) -> torch.Tensor:
        """Return a scale for each row: ``[..., R]``."""
        return self.scale.expand(*self.elements.shape[:-1], 1).squeeze(-1).contiguous()

    def transposed(self) -> "FP8Operand":
        """Return the transposed matrices, contiguous, where each has one scale; other scales have to be folded."""
        columns = self.columns
        if columns is None:
            columns = quantization.transpose_e4m3(self.elements)
        return FP8Operand(columns, self.scale if self.column_scale is None else self.column_scale)

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


def n_inexact() -> int:
    """Return how many elements were rounded since the counters were cleared. Waits for the devices."""
    for conversion in list(_conversions):
        conversion.check(waits=True)
    return sum(int(number) for number in inexact.values())


def _count(rounded: torch.Tensor) -> None:
    """Add to `inexact`. A CUDA graph that is captured before anything was counted counts nothing."""
    device = rounded.device
    if device not in inexact:
        if quantization.is_captured(rounded):
            return
        # Another thread allocates: this one's memory may be that of a graph (see `mxfp4_kernels.decode.counters`), and
        # its modes are the caller's. The copy from the host is complete when it returns.
        with ThreadPoolExecutor(1) as other:
            inexact[device] = other.submit(torch.tensor, 0, device=device).result()
    inexact[device].add_(rounded)


#: Those that exist, for [`n_inexact`].
_conversions: "weakref.WeakSet[WeightConversion]" = weakref.WeakSet()


class WeightConversion:
    """Converts the quantized weights of one layer on one device to E4M3, and remembers which scales hold them exactly:
    one for each matrix, one for each row, or none.

    On CPUs these are found in each conversion. A GPU is waited for in the first one alone. Later ones use the scales
    that it found and count rounded elements in memory of the GPU, of which the host has a copy. A conversion that finds
    the copy above zero adds it to `inexact`, warns, and uses finer scales from then on.

    Attributes:
        scales: ``"matrix"``, ``"rows"`` or ``"none"``; `None` before the first conversion on a GPU.
    """

    def __init__(self) -> None:
        self.scales: str | None = None
        self._rounded: torch.Tensor | None = None
        self._on_host: torch.Tensor | None = None
        _conversions.add(self)

    def __call__(
        self, values: torch.Tensor, has_dgrad: bool = False, out: FP8Operand | None = None
    ) -> FP8Operand | None:
        """Return weights ``[N, K]`` or ``[E, N, K]`` as elements and scales; `None` where no scales hold them, and in a
        CUDA graph that is captured before they are known.

        Args:
            values: the quantized weights.
            has_dgrad: whether Dgrad takes the operand too, transposed.
            out: an earlier result, whose elements kernels write to.
        """
        if not values.is_cuda:
            return self._find(values, has_dgrad)[0]
        is_capturing = quantization.is_captured(values)
        if not is_capturing:
            self.check()
        if self.scales is None:
            if is_capturing:
                return None
            operand, self.scales = self._find(values, has_dgrad)
            self._rounded = _zero(values.device)
            self._on_host = _zero(torch.device("cpu"))
            return operand
        if self.scales == "none":
            return None
        operand = _weight_to_fp8(values, self.scales == "matrix", has_dgrad, self._rounded, out)
        if not is_capturing:
            self._on_host.copy_(self._rounded, non_blocking=True)
        return operand

    def check(self, waits: bool = False) -> None:
        """Look at the count of rounded elements that has arrived, or wait for the latest one."""
        if self._on_host is None:
            return
        if waits:
            self._on_host.copy_(self._rounded)
        n_rounded = int(self._on_host)  # copies arrive in order, so what has arrived is never too large
        if n_rounded == 0:
            return
        _count(self._rounded)
        self._rounded.zero_()  # in its memory, to which CUDA graphs add
        self._on_host = _zero(torch.device("cpu"))  # copies may still be on their way to the other one
        if self.scales == "matrix":
            self.scales = "rows"
            remedy = "the layer uses a scale for each row"
        else:
            self.scales = "none"
            remedy = "the layer multiplies in 16 bits"
        get_logger().warning(
            "E4M3 rounded %d elements of the quantized weights of a layer, whose magnitudes have spread in training; "
            "from now on %s. matmul_counts()['inexact_elements'] has the sum",
            n_rounded,
            remedy,
        )

    @staticmethod
    def _find(values: torch.Tensor, has_dgrad: bool) -> tuple[FP8Operand | None, str]:
        """Return the operand and its scales. Waits for the device."""
        for scales in ("matrix", "rows"):
            rounded = _zero(values.device)
            operand = _weight_to_fp8(values, scales == "matrix", has_dgrad, rounded)
            if rounded.item() == 0:
                return operand, scales
        return None, "none"


def _weight_to_fp8(
    values: torch.Tensor, whole: bool, has_dgrad: bool, rounded: torch.Tensor, out: FP8Operand | None = None
) -> FP8Operand:
    """Convert with a scale for each whole matrix or for each row; add to the number of ``rounded`` elements."""
    columns = None
    with_columns = has_dgrad and values.dim() == 2  # of all experts they are half of another model
    if quantization.supports_e4m3(values):
        reused = None
        if out is not None and out.columns is not None:
            reused = out.elements, out.columns
        elements, columns, scale = triton_kernels.weight_to_fp8(values, whole, with_columns, rounded, reused)
    else:
        wide = values.float()
        scale = _scale(wide, (-2, -1) if whole else (-1,))
        elements = (wide / scale).to(torch.float8_e4m3fn)
        rounded.add_((elements.float().mul_(scale) != wide).sum())
        if with_columns:
            columns = elements.mT.contiguous()
    scale = scale.expand(*values.shape[:-1], 1).contiguous()
    column_scale = None
    if whole and has_dgrad:
        column_scale = scale[..., :1, :].expand(*values.shape[:-2], values.shape[-1], 1).contiguous()
    return FP8Operand(elements, scale, columns, column_scale)


def _zero(device: torch.device) -> torch.Tensor:
    """Return a counter: on the CPU in memory that a GPU copies to while the host goes on."""
    pinned = device.type == "cpu" and torch.cuda.is_available()
    with torch.inference_mode(False):  # it is written to outside of that mode too
        return torch.zeros((), dtype=torch.int32, device=device, pin_memory=pinned)


def gradient_operands(
    grad: torch.Tensor, weight: FP8Operand, x: FP8Operand, backend: str
) -> tuple[FP8Operand, FP8Operand, FP8Operand, FP8Operand]:
    """Return the left and the right operand of Dgrad, ``Q(g) Q(W)``, and those of Wgrad, ``Q(g)^T Q(x)``.

    Args:
        grad: output gradient ``[M, N]``, quantized along both axes after [`fold_scales`] of the other operands.
        weight: ``[N, K]``.
        x: ``[M, K]``.
        backend: what quantizes.
    """
    right = weight.transposed()
    right_t = x.transposed()
    weight_scales = weight.scale if weight.column_scale is None else None
    if quantization.supports_e4m3(grad, backend):
        made = triton_kernels.gradient_to_fp8(grad, x.scale, weight_scales, x.elements.shape[-1])
        if weight_scales is not None:
            right = FP8Operand(right.elements, made.weight_top[:, None])
        right_t = FP8Operand(right_t.elements, made.token_top[:, None])
        return FP8Operand(made.rows, made.row_scale), right, FP8Operand(made.columns, made.column_scale), right_t
    rows = grad
    if weight_scales is not None:
        rows, top = fold_scales(grad, weight_scales)
        right = FP8Operand(right.elements, top)
    columns, top = fold_scales(grad.t(), x.scale)
    right_t = FP8Operand(right_t.elements, top)
    left, left_t = (FP8Operand(*quantization.quantize_e4m3(side, backend, torch.float32)) for side in (rows, columns))
    return left, right, left_t, right_t


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
