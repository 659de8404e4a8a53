# SPDX-License-Identifier: Apache-2.0
"""Conversion to FP8 (E4M3) with one power-of-two scale per row or per matrix, and back; and transposes of elements.

What it computes: the scale of a row is the smallest power of two by which no finite element clips. With scale bytes, a
row with NaN or infinity is NaN as a whole (``hf_mxfp4.numerics.quantize_e4m3``); with float32 scales these elements
alone are NaN (``hf_mxfp4.ops.to_fp8``), unless ``nan_rows`` is asked for. Rows may have any strides, so that the
columns of a matrix are the rows of its transpose. FP8 products sum over the rows of both operands, which is why the
backward pass of a layer takes elements that are written transposed.

Tile: a program owns some rows and goes over their columns twice: for the largest magnitude, and to convert. Where that
is given for whole matrices, it converts one tile. What is transposed goes through shared memory as bytes, and both
sides are written along their rows.

Launch: one program for every few rows, or for every tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .common.blocks import as_stored, clamp, scale_value, to_float
from .common.e4m3 import e4m3_bits, e4m3_values, has_e4m3, inverse_scale, magnitude_bits, row_scale_byte
from .common.tensors import INTERPRETED, bits, check_device, check_input, check_output, on, output_bits, output_tensor


# Contracting a multiply and an add would change bits; see `common/blocks.py`.
_OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
#: Rows and columns of a tile of bytes that is transposed.
_TRANSPOSED = 128


@triton.jit(do_not_specialize=["row_tiles", "col_tiles"])
def to_fp8_kernel(
    x_ptr,
    elements_ptr,
    columns_ptr,
    scale_ptr,
    inexact_ptr,
    top_ptr,
    n_rows,
    n_cols,
    matrix_stride,
    row_stride,
    col_stride,
    row_tiles,
    col_tiles,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    BF16: tl.constexpr,
    NAN_ROWS: tl.constexpr,
    HAS_E4M3: tl.constexpr,
):
    """Elements ``[n_rows, n_cols]`` (bytes) and scales ``[n_rows]`` of each matrix of a stack with any strides, and the
    elements once more, transposed, unless ``columns_ptr`` is `None`; all contiguous.

    Scales are float32, or their bytes where ``scale_ptr`` points to bytes. With ``NAN_ROWS`` NaN and infinity make
    their row NaN. ``inexact_ptr``, if it is not `None`, points to a counter of elements that were rounded. ``top_ptr``
    points to the largest magnitude of each matrix, float32; rows are then cut into ``col_tiles`` programs.
    """
    pid = tl.program_id(0)
    col_tile = pid % col_tiles
    row_tile = pid // col_tiles % row_tiles
    matrix = (pid // col_tiles // row_tiles).to(tl.int64)
    rows = row_tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, COLS)[None, :].to(tl.int64)
    inside = rows < n_rows
    rows_before = matrix * n_rows
    x_ptr += matrix * matrix_stride + rows * row_stride
    elements_ptr += (rows_before + rows) * n_cols
    if top_ptr is not None:
        top = tl.broadcast_to(tl.load(top_ptr + matrix).to(tl.int32, bitcast=True), [ROWS, 1])
        start = col_tile.to(tl.int64) * COLS
        end = tl.minimum(start + COLS, n_cols)
    else:
        top = tl.zeros([ROWS, 1], tl.int32)
        start = tl.full([], 0, tl.int64)
        end = start + n_cols
        col = start
        while col < end:
            mask = inside & (cols < end - col)
            x = to_float(tl.load(x_ptr + (col + cols) * col_stride, mask=mask, other=0), BF16)
            top = tl.maximum(top, tl.max(magnitude_bits(x, NAN_ROWS), axis=1, keep_dims=True))
            col += COLS
    byte = row_scale_byte(top)
    inverse = inverse_scale(byte)
    n_inexact = tl.zeros([ROWS, 1], tl.int32)
    col = start
    while col < end:
        mask = inside & (cols < end - col)
        x = to_float(tl.load(x_ptr + (col + cols) * col_stride, mask=mask, other=0), BF16)
        element = e4m3_bits(x * inverse, HAS_E4M3)
        tl.store(elements_ptr + col + cols, element, mask=mask)
        if columns_ptr is not None:
            at = columns_ptr + rows_before * n_cols + (col + tl.trans(cols)) * n_rows + tl.trans(rows)
            tl.store(at, tl.trans(element), mask=tl.trans(mask))
        if inexact_ptr is not None:
            error = tl.abs(e4m3_values(element, HAS_E4M3) * scale_value(byte) - x)  # of NaN it is NaN
            n_inexact += tl.sum((error > 0.0).to(tl.int32), axis=1, keep_dims=True)
        col += COLS
    if inexact_ptr is not None:
        tl.atomic_add(inexact_ptr, tl.sum(tl.sum(n_inexact, axis=1), axis=0), sem="relaxed")
    scale = byte.to(tl.uint8) if scale_ptr.dtype.element_ty == tl.uint8 else scale_value(byte)
    tl.store(scale_ptr + rows_before + rows, scale, mask=inside & (col_tile == 0))


@triton.jit(do_not_specialize=["row_tiles", "col_tiles"])
def transpose_kernel(bytes_ptr, out_ptr, n_rows, n_cols, row_tiles, col_tiles, SIZE: tl.constexpr):
    """Transposes ``[n_cols, n_rows]`` of a stack of matrices of bytes ``[n_rows, n_cols]``, all contiguous."""
    pid = tl.program_id(0)
    row_start = (pid // col_tiles % row_tiles).to(tl.int64) * SIZE
    col_start = (pid % col_tiles).to(tl.int64) * SIZE
    matrix = (pid // col_tiles // row_tiles).to(tl.int64) * n_rows * n_cols
    one = tl.arange(0, SIZE)[:, None]
    other = tl.arange(0, SIZE)[None, :]
    inside = (one < n_rows - row_start) & (other < n_cols - col_start)
    tile = tl.load(bytes_ptr + matrix + (row_start + one) * n_cols + col_start + other, mask=inside, other=0)
    inside = (one < n_cols - col_start) & (other < n_rows - row_start)
    tl.store(out_ptr + matrix + (col_start + one) * n_rows + row_start + other, tl.trans(tile), mask=inside)


@triton.jit(do_not_specialize=["n_rows", "col_tiles"])
def from_fp8_kernel(
    elements_ptr,
    byte_ptr,
    out_ptr,
    n_rows,
    n_cols,
    col_tiles,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    LARGEST: tl.constexpr,
    INTERPRETED: tl.constexpr,
    HAS_E4M3: tl.constexpr,
):
    """Values of elements ``[n_rows, n_cols]`` with a scale byte per row, all contiguous."""
    pid = tl.program_id(0)
    rows = (pid // col_tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    cols = (pid % col_tiles) * COLS + tl.arange(0, COLS)[None, :]
    mask = (rows < n_rows) & (cols < n_cols)
    element = tl.load(elements_ptr + rows * n_cols + cols, mask=mask, other=0)
    scale = scale_value(tl.load(byte_ptr + rows, mask=rows < n_rows, other=0).to(tl.int32))
    values = clamp(e4m3_values(element, HAS_E4M3) * scale, LARGEST)
    tl.store(out_ptr + rows * n_cols + cols, as_stored(values, out_ptr, INTERPRETED), mask=mask)


def to_fp8(
    x: torch.Tensor,
    scale_dtype: torch.dtype = torch.float32,
    inexact: torch.Tensor | None = None,
    top: torch.Tensor | None = None,
    *,
    nan_rows: bool = False,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round ``x`` to E4M3 with one power-of-two scale for each row along the last axis. No gradient flows.

    Args:
        x: float32, bfloat16 or float16 tensor ``[..., K]`` on a GPU. A matrix may have any strides: ``x.mT`` is
            converted along the columns of ``x``.
        scale_dtype: float32 for scales, uint8 for their E8M0 bytes, where a row with NaN or infinity is NaN as a whole.
        inexact: int32 scalar on the same device, to which the number of elements that were rounded is added, or `None`.
        top: float32, the largest magnitude of each matrix ``[..., N, K]``, whose rows then get one scale, or `None`.
        nan_rows: with float32 scales too, a row with NaN or infinity is NaN as a whole, its scale included.
        out: contiguous elements and scales that the result is written to, instead of new ones.

    Returns:
        Elements ``float8_e4m3fn [..., K]``, contiguous, and scales ``[..., 1]``.

    Raises:
        TypeError: not a tensor, or another dtype.
        ValueError: a scalar, not on a GPU, or an ``out`` of another shape, device or layout.
    """
    check_input("to_fp8", x)
    elements = scale = None
    if out is not None:
        elements, scale = out
    elements = output_tensor(elements, x.shape, torch.float8_e4m3fn, x.device, "elements of out")
    scale = _scale_output(scale, x, scale_dtype)
    # It matters which rows are of which matrix where each has a largest magnitude.
    n_rows = -1 if top is None else x.shape[-2]
    _convert(x, n_rows, elements, None, scale, inexact, top, nan_rows)
    return elements, scale


def to_fp8_rows_and_columns(
    x: torch.Tensor,
    scale_dtype: torch.dtype = torch.float32,
    inexact: torch.Tensor | None = None,
    top: torch.Tensor | None = None,
    *,
    nan_rows: bool = False,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return [`to_fp8`] of matrices ``x [..., R, C]``, and its elements transposed, from one launch.

    Arguments and errors as there. Elements ``[..., R, C]`` and ``[..., C, R]``, both contiguous, and scales
    ``[..., R, 1]``.
    """
    check_input("to_fp8_rows_and_columns", x, 2)
    elements = columns = scale = None
    if out is not None:
        elements, columns, scale = out
    elements = output_tensor(elements, x.shape, torch.float8_e4m3fn, x.device, "elements of out")
    columns = output_tensor(columns, x.mT.shape, torch.float8_e4m3fn, x.device, "columns of out")
    scale = _scale_output(scale, x, scale_dtype)
    _convert(x, x.shape[-2], elements, columns, scale, inexact, top, nan_rows)
    return elements, columns, scale


def _scale_output(out: torch.Tensor | None, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the scales ``[..., 1]`` that are written for the rows of ``x``."""
    if dtype not in (torch.float32, torch.uint8):
        raise TypeError(f"scales are float32 or uint8 bytes, not {dtype}")
    return output_tensor(out, (*x.shape[:-1], 1), dtype, x.device, "scale of out")


def _convert(
    x: torch.Tensor,
    n_rows: int,
    elements: torch.Tensor,
    columns: torch.Tensor | None,
    scale: torch.Tensor,
    inexact: torch.Tensor | None,
    top: torch.Tensor | None,
    nan_rows: bool,
) -> None:
    """Start the kernel on matrices of ``n_rows`` rows of ``x``, or on one (-1): it writes elements, columns, if any are
    wanted, and scales. These are zero where there are no elements."""
    if not x.numel():
        scale.zero_()
        return
    n_cols = x.shape[-1]
    x = x.detach().reshape(1, -1, n_cols) if n_rows < 0 else x.detach().reshape(-1, n_rows, n_cols)
    stack, n_rows, _ = x.shape
    if top is not None and top.numel() != stack:
        raise ValueError(f"{stack} matrices need as many largest magnitudes, got {top.numel()}")
    # A tile is long where neighbours are in memory: along the rows, or along the columns. Transposed it is as long as
    # it is high.
    if columns is not None and top is None:
        tile = _tile(32, 256, n_cols)
    elif columns is not None:
        tile = _tile(64, 128, n_cols)
    elif n_cols == 1 or x.stride(2) == 1:
        tile = _tile(4, 1024, n_cols)
    else:
        tile = _tile(16, 256, n_cols)
    col_tiles = 1 if top is None else triton.cdiv(n_cols, tile["COLS"])
    row_tiles = triton.cdiv(n_rows, tile["ROWS"])
    with on(x.device):
        to_fp8_kernel[(stack * row_tiles * col_tiles,)](
            bits(x),
            elements.view(torch.uint8),
            None if columns is None else columns.view(torch.uint8),
            scale,
            inexact,
            top,
            n_rows,
            n_cols,
            *x.stride(),
            row_tiles,
            col_tiles,
            **tile,
            BF16=x.dtype == torch.bfloat16,
            NAN_ROWS=nan_rows or scale.dtype == torch.uint8,
            HAS_E4M3=has_e4m3(x.device),
            **_OPTIONS | ({"num_warps": 8} if columns is not None else {}),
        )


def transpose_fp8(elements: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return the transposes ``[..., C, R]`` of E4M3 matrices ``[..., R, C]``, contiguous as these are.

    Raises:
        TypeError: another dtype.
        ValueError: fewer than two axes, not contiguous, not on a GPU, or an ``out`` of another shape, device or layout.
    """
    if not isinstance(elements, torch.Tensor) or elements.dtype != torch.float8_e4m3fn:
        raise TypeError("transpose_fp8 needs a float8_e4m3fn tensor")
    if elements.dim() < 2 or not elements.is_contiguous():
        raise ValueError(f"contiguous matrices are needed, got {list(elements.shape)}, strides {elements.stride()}")
    check_device(elements)
    out = output_tensor(out, elements.mT.shape, torch.float8_e4m3fn, elements.device)
    if not out.numel():
        return out
    n_rows, n_cols = elements.shape[-2:]
    row_tiles = triton.cdiv(n_rows, _TRANSPOSED)
    col_tiles = triton.cdiv(n_cols, _TRANSPOSED)
    stack = out.numel() // (n_rows * n_cols)
    with on(out.device):
        transpose_kernel[(stack * row_tiles * col_tiles,)](
            elements.view(torch.uint8),
            out.view(torch.uint8),
            n_rows,
            n_cols,
            row_tiles,
            col_tiles,
            SIZE=_TRANSPOSED,
            **_OPTIONS,
        )
    return out


def _tile(rows: int, cols: int, n_cols: int) -> dict[str, int]:
    """Return the tile of a program for rows of ``n_cols`` elements: ``rows x cols``, or more rows of fewer columns
    where rows are short, as blocks of MXFP8 are."""
    width = min(cols, triton.next_power_of_2(n_cols))
    return {"ROWS": rows * min(32, cols // width), "COLS": width}


def from_fp8(
    elements: torch.Tensor, byte: torch.Tensor, dtype: torch.dtype, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the values ``[..., K]`` of what [`to_fp8`] returns with scale bytes, in float32, bfloat16 or float16,
    written to a contiguous tensor ``out`` if there is one.

    Raises:
        TypeError: another dtype, or other tensors.
        ValueError: shapes that do not fit together, or tensors that are not on a GPU.
    """
    check_output(dtype)
    if elements.dtype != torch.float8_e4m3fn or byte.dtype != torch.uint8:
        raise TypeError(f"elements must be float8_e4m3fn and scales uint8, got {elements.dtype} and {byte.dtype}")
    if elements.dim() == 0 or byte.shape != (*elements.shape[:-1], 1):
        raise ValueError(f"elements {list(elements.shape)} need a scale byte each row, got {list(byte.shape)}")
    check_device(elements)
    out = output_tensor(out, elements.shape, dtype, elements.device)
    if not out.numel():
        return out
    n_cols = elements.shape[-1]
    n_rows = out.numel() // n_cols
    tile = _tile(4, 512, n_cols)
    row_tiles = triton.cdiv(n_rows, tile["ROWS"])
    col_tiles = triton.cdiv(n_cols, 512)
    with on(out.device):
        from_fp8_kernel[(row_tiles * col_tiles,)](
            elements.contiguous().view(torch.uint8),
            byte.contiguous(),
            output_bits(out),
            n_rows,
            n_cols,
            col_tiles,
            **tile,
            LARGEST=torch.finfo(dtype).max,
            INTERPRETED=INTERPRETED,
            HAS_E4M3=has_e4m3(out.device),
            **_OPTIONS,
        )
    return out
