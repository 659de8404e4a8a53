# SPDX-License-Identifier: Apache-2.0
"""Conversion to FP8 (E4M3) with one power-of-two scale per row or per matrix, and back.

What it computes: the scale of a row is the smallest power of two by which no finite element clips. With scale bytes, a
row with NaN or infinity is NaN as a whole (``hf_mxfp4.numerics.quantize_e4m3``); with float32 scales these elements
alone are NaN (``hf_mxfp4.ops.to_fp8``). Rows may have any strides, so that the columns of a matrix are the rows of its
transpose.

Tile: a program owns some rows and goes over their columns twice: for the largest magnitude, where that is not given for
whole matrices, and to convert. Launch: one
program for every few rows; elements are converted by integer arithmetic, because not all GPUs have E4M3.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .common.blocks import EXPONENT_FIELD, MAGNITUDE_FIELD, NAN_BITS, NAN_BYTE, as_stored, clamp, scale_value, to_float
from .common.tensors import INTERPRETED, bits, check_device, check_input, check_output, on, output_bits, output_tensor


# 2**-6, the smallest normal E4M3 number, as float32 bits; and half of 1.5 * 2**23 over the 2**3 steps of a binade.
_SMALLEST_NORMAL = tl.constexpr(0x3C800000)
_ROUND_MAGIC = tl.constexpr(1.5 * 2.0**20)
# Contracting a multiply and an add would change bits; see `common/blocks.py`.
_OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}


@triton.jit
def _e4m3_bits(value):
    """E4M3 (float8_e4m3fn) bytes of float32 values in [-448, 448], to nearest, ties to even; NaN of all others."""
    bits = value.to(tl.int32, bitcast=True)
    binade = tl.maximum(bits & EXPONENT_FIELD, _SMALLEST_NORMAL).to(tl.float32, bitcast=True)
    # The products are exact, so that it does not matter whether the sums are fused.
    rounded = tl.fma(binade, -_ROUND_MAGIC, tl.fma(binade, _ROUND_MAGIC, value))
    magnitude = rounded.to(tl.int32, bitcast=True) & MAGNITUDE_FIELD
    subnormal = (tl.abs(rounded) * 512.0).to(tl.int32)
    code = tl.where(magnitude >= _SMALLEST_NORMAL, (magnitude >> 20) - 960, subnormal)
    code = tl.where((bits & MAGNITUDE_FIELD) >= EXPONENT_FIELD, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _e4m3_values(bits):
    """Float32 values of E4M3 bytes."""
    bits = bits.to(tl.int32)
    # The fields of E4M3 at the place of those of float32, whose exponent is larger by 120 for the same number.
    fields = tl.where((bits & 0x7F) == 0x7F, NAN_BITS, ((bits & 0x7F) << 20) | ((bits & 0x80) << 24))
    return fields.to(tl.float32, bitcast=True) * 2.0**120


@triton.jit(do_not_specialize=["n_rows"])
def to_fp8_kernel(
    x_ptr,
    elements_ptr,
    scale_ptr,
    inexact_ptr,
    top_ptr,
    n_rows,
    n_cols,
    row_stride,
    col_stride,
    rows_per_top,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    BF16: tl.constexpr,
):
    """Elements ``[n_rows, n_cols]`` (bytes, contiguous) and scales ``[n_rows]`` of a matrix with any strides. Scales
    are float32, or their bytes where ``scale_ptr`` points to bytes. ``inexact_ptr``, if it is not `None`, points to a
    counter of elements that were rounded, ``top_ptr`` to the largest magnitude of ``rows_per_top`` rows, float32."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, COLS)[None, :].to(tl.int64)
    inside = rows < n_rows
    BYTES: tl.constexpr = scale_ptr.dtype.element_ty == tl.uint8
    if top_ptr is not None:
        top = tl.load(top_ptr + rows // rows_per_top, mask=inside, other=0.0).to(tl.int32, bitcast=True)
    else:
        top = tl.zeros([ROWS, 1], tl.int32)
        col = tl.full([], 0, tl.int64)
        while col < n_cols:
            mask = inside & (cols < n_cols - col)
            x = to_float(tl.load(x_ptr + rows * row_stride + (col + cols) * col_stride, mask=mask, other=0), BF16)
            magnitude = x.to(tl.int32, bitcast=True) & MAGNITUDE_FIELD
            if not BYTES:
                magnitude = tl.where(magnitude < EXPONENT_FIELD, magnitude, 0)
            top = tl.maximum(top, tl.max(magnitude, axis=1, keep_dims=True))
            col += COLS
    # The largest E4M3 value is 1.75 * 2**8.
    byte = tl.maximum(((tl.minimum(top, EXPONENT_FIELD) + 0x1FFFFF) >> 23) - 8, 1)
    byte = tl.where(top >= EXPONENT_FIELD, NAN_BYTE, byte)
    inverse = tl.where(byte == NAN_BYTE, NAN_BITS, (254 - byte) << 23).to(tl.float32, bitcast=True)
    n_inexact = tl.zeros([ROWS, 1], tl.int32)
    col = tl.full([], 0, tl.int64)
    while col < n_cols:
        mask = inside & (cols < n_cols - col)
        x = to_float(tl.load(x_ptr + rows * row_stride + (col + cols) * col_stride, mask=mask, other=0), BF16)
        element = _e4m3_bits(x * inverse)
        tl.store(elements_ptr + rows * n_cols + col + cols, element, mask=mask)
        if inexact_ptr is not None:
            differs = (_e4m3_values(element) * scale_value(byte) != x) & (tl.abs(x) < float("inf"))
            n_inexact += tl.sum(differs.to(tl.int32), axis=1, keep_dims=True)
        col += COLS
    if inexact_ptr is not None:
        tl.atomic_add(inexact_ptr, tl.sum(tl.sum(n_inexact, axis=1), axis=0), sem="relaxed")
    scale = byte.to(tl.uint8) if BYTES else scale_value(byte)
    tl.store(scale_ptr + rows, scale, mask=inside)


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
):
    """Values of elements ``[n_rows, n_cols]`` with a scale byte per row, all contiguous."""
    pid = tl.program_id(0)
    rows = (pid // col_tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    cols = (pid % col_tiles) * COLS + tl.arange(0, COLS)[None, :]
    mask = (rows < n_rows) & (cols < n_cols)
    element = tl.load(elements_ptr + rows * n_cols + cols, mask=mask, other=0)
    scale = scale_value(tl.load(byte_ptr + rows, mask=rows < n_rows, other=0).to(tl.int32))
    values = clamp(_e4m3_values(element) * scale, LARGEST)
    tl.store(out_ptr + rows * n_cols + cols, as_stored(values, out_ptr, INTERPRETED), mask=mask)


def to_fp8(
    x: torch.Tensor,
    scale_dtype: torch.dtype = torch.float32,
    inexact: torch.Tensor | None = None,
    top: torch.Tensor | None = None,
    *,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round ``x`` to E4M3 with one power-of-two scale for each row along the last axis. No gradient flows.

    Args:
        x: float32, bfloat16 or float16 tensor ``[..., K]`` on a GPU. A matrix may have any strides: ``x.mT`` is
            converted along the columns of ``x``.
        scale_dtype: float32 for scales, uint8 for their E8M0 bytes, where a row with NaN or infinity is NaN as a whole.
        inexact: int32 scalar on the same device, to which the number of elements that were rounded is added, or `None`.
        top: float32, the largest magnitude of each matrix ``[..., N, K]``, whose rows then get one scale, or `None`.
        out: contiguous elements and scales that the result is written to, instead of new ones.

    Returns:
        Elements ``float8_e4m3fn [..., K]``, contiguous, and scales ``[..., 1]``.

    Raises:
        TypeError: not a tensor, or another dtype.
        ValueError: a scalar, not on a GPU, or an ``out`` of another shape, device or layout.
    """
    check_input("to_fp8", x)
    if scale_dtype not in (torch.float32, torch.uint8):
        raise TypeError(f"scales are float32 or uint8 bytes, not {scale_dtype}")
    elements = scale = None
    if out is not None:
        elements, scale = out
    elements = output_tensor(elements, x.shape, torch.float8_e4m3fn, x.device, "elements of out")
    scale = output_tensor(scale, (*x.shape[:-1], 1), scale_dtype, x.device, "scale of out")
    if not x.numel():
        scale.zero_()
        return elements, scale
    matrix = x.detach().reshape(-1, x.shape[-1])
    n_rows, n_cols = matrix.shape
    # A tile is long where neighbours are in memory: along the rows, or along the columns.
    if n_cols == 1 or matrix.stride(1) == 1:
        tile = _tile(4, 1024, n_cols)
    else:
        tile = _tile(16, 256, n_cols)
    rows_per_top = 1
    if top is not None:
        rows_per_top = n_rows // top.numel()
    with on(x.device):
        to_fp8_kernel[(triton.cdiv(n_rows, tile["ROWS"]),)](
            bits(matrix),
            elements.view(torch.uint8),
            scale,
            inexact,
            top,
            n_rows,
            n_cols,
            *matrix.stride(),
            rows_per_top,
            **tile,
            BF16=x.dtype == torch.bfloat16,
            **_OPTIONS,
        )
    return elements, scale


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
            **_OPTIONS,
        )
    return out
