# SPDX-License-Identifier: Apache-2.0
"""The gradient of a linear layer's output as the left operands of both FP8 products of the backward pass.

What it computes: E4M3 elements with a power-of-two scale for each row, as in `fp8.py`, of the gradient ``g [M, N]``,
for ``g W``, and of its transpose, for ``g^T x``. A product sums over the rows of its right operand, whose scales no
tensor core applies. So they go into the gradient, but for the largest one, which is left for the result.

Tile: a program owns ``ROWS x COLS`` elements. Launch: three. The first finds the largest scales and clears the maxima,
the second collects the largest magnitudes of rows and of columns, the third converts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .common.blocks import NAN_BITS, scale_value, to_float
from .common.e4m3 import e4m3_bits, has_e4m3, inverse_scale, magnitude_bits, row_scale_byte
from .common.tensors import INTERPRETED, bits, check_input, on, output_tensor


#: Scales that a program reads at a time, and maxima that it clears.
_BLOCK = 4096
_TILE = {"ROWS": 64, "COLS": 128}
# Contracting a multiply and an add would change bits; see `common/blocks.py`.
_OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}


class FP8Gradient(NamedTuple):
    """Left operands of the backward products, and what is left of the scales of the right ones.

    Attributes:
        rows: E4M3 elements ``[M, N]``.
        row_scale: float32 ``[M, 1]``.
        columns: E4M3 elements ``[N, M]``.
        column_scale: float32 ``[N, 1]``.
        token_top: the largest scale of the tokens, for each column of the product ``columns @ x``; or `None`.
        weight_top: the largest scale of the weight, for each column of the product ``rows @ W``; or `None`.
    """

    rows: torch.Tensor
    row_scale: torch.Tensor
    columns: torch.Tensor
    column_scale: torch.Tensor
    token_top: torch.Tensor | None
    weight_top: torch.Tensor | None


class _Scales(NamedTuple):
    """Scales of tokens and of the rows of the weight, and the largest of each; of what there is none, `None`."""

    tokens: torch.Tensor | None
    weight: torch.Tensor | None
    token_top: torch.Tensor | None
    weight_top: torch.Tensor | None


@triton.jit
def _store_top(scale_ptr, n_scales, top_ptr, n_tops, BLOCK: tl.constexpr):
    """Write the largest of ``n_scales`` powers of two, NaN aside, ``n_tops`` times."""
    at = tl.arange(0, BLOCK)
    largest = tl.zeros([BLOCK], tl.float32)
    start = tl.full([], 0, tl.int64)
    while start < n_scales:
        scale = tl.load(scale_ptr + start + at, mask=at < n_scales - start, other=0.0)
        largest = tl.maximum(largest, tl.where(scale == scale, scale, 0.0))
        start += BLOCK
    top = tl.broadcast_to(tl.max(largest, axis=0), [BLOCK])
    start = tl.full([], 0, tl.int64)
    while start < n_tops:
        tl.store(top_ptr + start + at, top, mask=at < n_tops - start)
        start += BLOCK


@triton.jit(do_not_specialize=["n_rows", "n_cols", "n_tops"])
def prepare_kernel(scales, maxima_ptr, n_rows, n_cols, n_tops, BLOCK: tl.constexpr):
    """Find the largest scales of ``n_rows`` tokens and of ``n_cols`` rows of the weight, where there are any, and write
    each ``n_tops`` times; write zeros for ``n_rows + n_cols`` maxima."""
    pid = tl.program_id(0)
    if scales.tokens is not None:
        if pid == 0:
            _store_top(scales.tokens, n_rows, scales.token_top, n_tops, BLOCK)
    if scales.weight is not None:
        if pid == 1:
            _store_top(scales.weight, n_cols, scales.weight_top, n_tops, BLOCK)
    at = pid.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(maxima_ptr + at, tl.zeros([BLOCK], tl.int32), mask=at < n_rows + n_cols)


@triton.jit
def _rounded(values, x_ptr, BF16: tl.constexpr, INTERPRETED: tl.constexpr):
    """Float32 values as the dtype of the gradient has them."""
    if not BF16:
        return values.to(x_ptr.dtype.element_ty).to(tl.float32)
    elif INTERPRETED:
        value_bits = values.to(tl.int32, bitcast=True)
        value_bits = (value_bits + 0x7FFF + ((value_bits >> 16) & 1)) & -0x10000
        return tl.where(values == values, value_bits, NAN_BITS).to(tl.float32, bitcast=True)
    else:
        return values.to(tl.bfloat16).to(tl.float32)


@triton.jit
def _folded(x, scale_ptr, top_ptr, inside, x_ptr, BF16: tl.constexpr, INTERPRETED: tl.constexpr):
    """Products of float32 elements and scales over the largest one, rounded to the dtype of the gradient."""
    scale = tl.load(scale_ptr, mask=inside, other=1.0)
    factor = scale * tl.div_rn(1.0, tl.load(top_ptr))  # of powers of two, exact
    if BF16:
        factor = _rounded(factor, x_ptr, BF16, INTERPRETED)
    return _rounded(x * factor, x_ptr, BF16, INTERPRETED)


@triton.jit
def _read_folded(
    x_ptr, scales, row_start, col_start, n_rows, n_cols, row_stride, col_stride,
    ROWS: tl.constexpr, COLS: tl.constexpr, BF16: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Float32 elements of a tile as its rows and as its columns are converted; rows, columns, and whether both are
    inside of the matrix, counted from the first one of the tile."""
    row = tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, COLS)[None, :]
    is_row = row < tl.minimum(n_rows - row_start, ROWS).to(tl.int32)
    is_col = col < tl.minimum(n_cols - col_start, COLS).to(tl.int32)
    x_ptr += row_start * row_stride + col_start * col_stride
    at = row.to(tl.int64) * row_stride + col.to(tl.int64) * col_stride
    x = to_float(tl.load(x_ptr + at, mask=is_row & is_col, other=0), BF16)
    by_rows = x
    by_columns = x
    if scales.weight is not None:
        by_rows = _folded(x, scales.weight + col_start + col, scales.weight_top, is_col, x_ptr, BF16, INTERPRETED)
    if scales.tokens is not None:
        by_columns = _folded(x, scales.tokens + row_start + row, scales.token_top, is_row, x_ptr, BF16, INTERPRETED)
    return by_rows, by_columns, row, col, is_row, is_col


@triton.jit(do_not_specialize=["col_tiles"])
def maxima_kernel(
    x_ptr,
    scales,
    maxima_ptr,
    n_rows,
    n_cols,
    row_stride,
    col_stride,
    col_tiles,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    BF16: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Raise ``maxima [n_rows + n_cols]`` to the bits of the largest finite magnitudes of rows, then of columns."""
    row_start = (tl.program_id(0) // col_tiles).to(tl.int64) * ROWS
    col_start = (tl.program_id(0) % col_tiles).to(tl.int64) * COLS
    by_rows, by_columns, row, col, is_row, is_col = _read_folded(
        x_ptr, scales, row_start, col_start, n_rows, n_cols, row_stride, col_stride, ROWS, COLS, BF16, INTERPRETED
    )
    of_rows = tl.max(magnitude_bits(by_rows, False), axis=1, keep_dims=True)
    of_columns = tl.max(magnitude_bits(by_columns, False), axis=0, keep_dims=True)
    tl.atomic_max(maxima_ptr + row_start + row, of_rows, mask=is_row, sem="relaxed")
    tl.atomic_max(maxima_ptr + n_rows + col_start + col, of_columns, mask=is_col, sem="relaxed")


@triton.jit(do_not_specialize=["col_tiles"])
def gradient_kernel(
    x_ptr,
    scales,
    maxima_ptr,
    rows_ptr,
    row_scale_ptr,
    columns_ptr,
    column_scale_ptr,
    n_rows,
    n_cols,
    row_stride,
    col_stride,
    col_tiles,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    BF16: tl.constexpr,
    INTERPRETED: tl.constexpr,
    HAS_E4M3: tl.constexpr,
):
    """Elements ``[n_rows, n_cols]`` and ``[n_cols, n_rows]`` (bytes) and their scales, all contiguous."""
    row_start = (tl.program_id(0) // col_tiles).to(tl.int64) * ROWS
    col_start = (tl.program_id(0) % col_tiles).to(tl.int64) * COLS
    by_rows, by_columns, row, col, is_row, is_col = _read_folded(
        x_ptr, scales, row_start, col_start, n_rows, n_cols, row_stride, col_stride, ROWS, COLS, BF16, INTERPRETED
    )
    row_byte = row_scale_byte(tl.load(maxima_ptr + row_start + row, mask=is_row, other=0))
    column_byte = row_scale_byte(tl.load(maxima_ptr + n_rows + col_start + col, mask=is_col, other=0))
    inside = is_row & is_col
    rows_ptr += row_start * n_cols + col_start
    rows = e4m3_bits(by_rows * inverse_scale(row_byte), HAS_E4M3)
    tl.store(rows_ptr + row.to(tl.int64) * n_cols + col, rows, mask=inside)
    columns_ptr += col_start * n_rows + row_start
    columns = e4m3_bits(by_columns * inverse_scale(column_byte), HAS_E4M3)
    tl.store(
        columns_ptr + tl.trans(col).to(tl.int64) * n_rows + tl.trans(row), tl.trans(columns), mask=tl.trans(inside)
    )
    tl.store(row_scale_ptr + row_start + row, scale_value(row_byte), mask=is_row & (col_start == 0))
    tl.store(column_scale_ptr + col_start + col, scale_value(column_byte), mask=is_col & (row_start == 0))


def gradient_to_fp8(
    grad: torch.Tensor,
    token_scales: torch.Tensor | None = None,
    weight_scales: torch.Tensor | None = None,
    *,
    n_columns: int = 1,
    out: FP8Gradient | None = None,
) -> FP8Gradient:
    """Return a gradient ``[M, N]`` and its transpose as E4M3 elements with a power-of-two scale for each row, where the
    scales of what they are multiplied with are folded into them: ``rows @ W [N, K]`` and ``columns @ x [M, K]``.

    Elements of ``g`` that are NaN or infinite are NaN alone; a token or a row of the weight whose scale is NaN makes a
    column of ``columns`` or ``rows`` NaN. Products are rounded to the dtype of ``grad`` before they are converted.

    Args:
        grad: float32, bfloat16 or float16 matrix on a GPU, with any strides.
        token_scales: of the M tokens ``x``, contiguous float32 powers of two from ``2**-126`` on, or NaN; `None` where
            ``x`` has one scale.
        weight_scales: of the N rows of the weight, likewise.
        n_columns: how often the largest of these scales is returned: K for an operand of a product.
        out: contiguous tensors that the result is written to, instead of new ones.

    Raises:
        TypeError: other dtypes, or not a tensor.
        ValueError: not a matrix, not on a GPU, another number of scales, or an ``out`` of another shape, device or
            layout.
    """
    check_input("gradient_to_fp8", grad, 2)
    if grad.dim() != 2:
        raise ValueError(f"a gradient [M, N] is needed, got {list(grad.shape)}")
    n_rows, n_cols = grad.shape
    _check_scales("token_scales", token_scales, n_rows, grad.device)
    _check_scales("weight_scales", weight_scales, n_cols, grad.device)
    result = _outputs(grad, token_scales, weight_scales, n_columns, out)
    if not grad.numel():
        for scale in (result.row_scale, result.column_scale, result.token_top, result.weight_top):
            if scale is not None:
                scale.zero_()
        return result
    maxima = torch.empty(n_rows + n_cols, dtype=torch.int32, device=grad.device)
    scales = _Scales(token_scales, weight_scales, result.token_top, result.weight_top)
    col_tiles = triton.cdiv(n_cols, _TILE["COLS"])
    tiles = (triton.cdiv(n_rows, _TILE["ROWS"]) * col_tiles,)
    constants = {**_TILE, "BF16": grad.dtype == torch.bfloat16, "INTERPRETED": INTERPRETED, **_OPTIONS}
    read = bits(grad.detach())
    with on(grad.device):
        # Two programs at least, for two kinds of scales.
        blocks = max(2, triton.cdiv(n_rows + n_cols, _BLOCK))
        prepare_kernel[(blocks,)](scales, maxima, n_rows, n_cols, n_columns, BLOCK=_BLOCK)
        maxima_kernel[tiles](read, scales, maxima, n_rows, n_cols, *grad.stride(), col_tiles, **constants)
        gradient_kernel[tiles](
            read,
            scales,
            maxima,
            result.rows.view(torch.uint8),
            result.row_scale,
            result.columns.view(torch.uint8),
            result.column_scale,
            n_rows,
            n_cols,
            *grad.stride(),
            col_tiles,
            HAS_E4M3=has_e4m3(grad.device),
            **constants,
        )
    return result


def _check_scales(name: str, scales: torch.Tensor | None, count: int, device: torch.device) -> None:
    """Raise `TypeError` or `ValueError` unless ``scales`` are as many as they should be, if there are any."""
    if scales is None:
        return
    if scales.dtype != torch.float32:
        raise TypeError(f"{name} must be float32, got {scales.dtype}")
    if scales.numel() != count or not scales.is_contiguous() or scales.device != device:
        raise ValueError(
            f"{name} must be {count} contiguous numbers on {device}, got {list(scales.shape)} on {scales.device}"
        )


def _outputs(
    grad: torch.Tensor,
    token_scales: torch.Tensor | None,
    weight_scales: torch.Tensor | None,
    n_columns: int,
    out: FP8Gradient | None,
) -> FP8Gradient:
    """Return the tensors that are written: those of ``out``, or new ones."""
    n_rows, n_cols = grad.shape
    tops = (n_columns,)
    wanted: list[tuple[tuple[int, ...], torch.dtype] | None] = [
        ((n_rows, n_cols), torch.float8_e4m3fn),
        ((n_rows, 1), torch.float32),
        ((n_cols, n_rows), torch.float8_e4m3fn),
        ((n_cols, 1), torch.float32),
        None if token_scales is None else (tops, torch.float32),
        None if weight_scales is None else (tops, torch.float32),
    ]
    given = [None] * len(wanted) if out is None else out
    result = []
    for name, part, form in zip(FP8Gradient._fields, given, wanted, strict=True):
        if form is not None:
            result.append(output_tensor(part, *form, grad.device, f"{name} of out"))
        elif part is None:
            result.append(None)
        else:
            raise ValueError(f"{name} of out is given without scales")
    return FP8Gradient(*result)
