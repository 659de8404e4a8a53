# SPDX-License-Identifier: Apache-2.0
"""Rows rounded to E4M3 by one power of two each, as in `hf_mxfp4.numerics.formats.e4m3`: their values along rows, or
those of elements that were kept, and elements or values along columns. A row with NaN or infinity is NaN as a whole.

Along columns programs would be few if each had all of some columns. So a first kernel finds the largest magnitudes of
parts of columns, and a second one, of tiles of 128 x 128, those of whole columns and what is rounded by them.
"""

import triton
import triton.language as tl

from ..common.blocks import EXPONENT_FIELD, MAGNITUDE_FIELD, NAN_BYTE, clamp, scale_value
from ..common.elements import as_stored, to_float
from ..quantization.both import transposed
from .tile import NAN_BITS, e4m3_bits


# 2**-6, the smallest normal E4M3 number, as float32 bits; and half of 1.5 * 2**23 over the 2**3 steps of a binade.
_SMALLEST_NORMAL = tl.constexpr(0x3C800000)
_ROUND_MAGIC = tl.constexpr(1.5 * 2.0**20)
_SIGN = tl.constexpr(-0x80000000)


@triton.jit
def base_of_row(top):
    """Scale bytes of rows, from the float32 bits of their largest magnitudes."""
    # The largest E4M3 value is 1.75 * 2**8.
    base = tl.maximum(((tl.minimum(top, EXPONENT_FIELD) + 0x1FFFFF) >> 23) - 8, 1)
    return tl.where(top >= EXPONENT_FIELD, NAN_BYTE, base)


@triton.jit
def inverse_of_row(base):
    """Float32 ``2**(127 - base)``, NaN for byte 255."""
    return tl.where(base == NAN_BYTE, NAN_BITS, (254 - base) << 23).to(tl.float32, bitcast=True)


@triton.jit
def values_of_rows(x, base, LARGEST: tl.constexpr):
    """Float32 values that elements of ``x`` at scale bytes ``base`` have."""
    y = x * inverse_of_row(base)
    bits = y.to(tl.int32, bitcast=True)
    binade = tl.maximum(bits & EXPONENT_FIELD, _SMALLEST_NORMAL).to(tl.float32, bitcast=True)
    # As in round_to_grid: the products are exact, so that it does not matter whether the sums are fused.
    y = tl.fma(binade, -_ROUND_MAGIC, tl.fma(binade, _ROUND_MAGIC, y))
    # E4M3 keeps the sign of a zero.
    y = (y.to(tl.int32, bitcast=True) | (bits & _SIGN)).to(tl.float32, bitcast=True)
    return clamp(y * scale_value(base), LARGEST)


@triton.jit
def read_matrix(x_ptr, rows, cols, n_rows, n_cols, row_stride, BF16: tl.constexpr):
    """Elements of ``x[n_rows, n_cols]`` (unit stride along columns) as float32, zero outside of it."""
    x = tl.load(x_ptr + rows * row_stride + cols, mask=(rows < n_rows) & (cols < n_cols), other=0)
    return to_float(x, BF16)


@triton.jit(do_not_specialize=["n_rows"])
def fake_rows_kernel(
    x_ptr,
    out_ptr,
    n_rows,
    n_cols,
    row_stride,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    ONE_TILE: tl.constexpr,
    STEPS: tl.constexpr,
    SCHEME: tl.constexpr,
):
    """Values of ``x[n_rows, n_cols]`` (unit stride along columns) to ``out``, contiguous. One program per ``ROWS``
    rows, which it reads once (``ONE_TILE``: they fit) or twice. ``STEPS`` is for the interpreter, which in Triton 3.6
    cannot loop up to an argument."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, COLS)[None, :]
    inside = rows < n_rows
    if ONE_TILE:
        x = read_matrix(x_ptr, rows, cols, n_rows, n_cols, row_stride, SCHEME.BF16)
        base = base_of_row(tl.max(x.to(tl.int32, bitcast=True) & MAGNITUDE_FIELD, axis=1, keep_dims=True))
        values = as_stored(values_of_rows(x, base, SCHEME.LARGEST), out_ptr, SCHEME.INTERPRETED)
        tl.store(out_ptr + rows * n_cols + cols, values, mask=inside & (cols < n_cols))
    else:
        top = tl.zeros([ROWS, 1], tl.int32)
        for step in range(STEPS if SCHEME.INTERPRETED else tl.cdiv(n_cols, COLS)):
            at = tl.cast(step, tl.int64) * COLS + cols
            x = read_matrix(x_ptr, rows, at, n_rows, n_cols, row_stride, SCHEME.BF16)
            found = tl.max(x.to(tl.int32, bitcast=True) & MAGNITUDE_FIELD, axis=1, keep_dims=True)
            top = tl.maximum(top, found)
        base = base_of_row(top)
        for step in range(STEPS if SCHEME.INTERPRETED else tl.cdiv(n_cols, COLS)):
            at = tl.cast(step, tl.int64) * COLS + cols
            x = read_matrix(x_ptr, rows, at, n_rows, n_cols, row_stride, SCHEME.BF16)
            values = as_stored(values_of_rows(x, base, SCHEME.LARGEST), out_ptr, SCHEME.INTERPRETED)
            tl.store(out_ptr + rows * n_cols + at, values, mask=inside & (at < n_cols))


@triton.jit(do_not_specialize=["n_rows", "col_tiles"])
def values_kernel(
    elements_ptr,
    byte_ptr,
    out_ptr,
    n_rows,
    n_cols,
    col_tiles,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    SCHEME: tl.constexpr,
):
    """Values of elements ``[n_rows, n_cols]`` with a scale byte per row, all contiguous. One program per tile, by
    integers: not all GPUs convert from E4M3."""
    pid = tl.program_id(0)
    rows = (pid // col_tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    cols = (pid % col_tiles) * COLS + tl.arange(0, COLS)[None, :]
    mask = (rows < n_rows) & (cols < n_cols)
    bits = tl.load(elements_ptr + rows * n_cols + cols, mask=mask, other=0).to(tl.int32)
    scale = scale_value(tl.load(byte_ptr + rows, mask=rows < n_rows, other=0).to(tl.int32))
    # The fields of E4M3 at the place of those of float32, whose exponent is larger by 120 for the same number.
    fields = tl.where((bits & 0x7F) == 0x7F, NAN_BITS, ((bits & 0x7F) << 20) | ((bits & 0x80) << 24))
    values = clamp(fields.to(tl.float32, bitcast=True) * 2.0**120 * scale, SCHEME.LARGEST)
    tl.store(out_ptr + rows * n_cols + cols, as_stored(values, out_ptr, SCHEME.INTERPRETED), mask=mask)


@triton.jit(do_not_specialize=["n_rows", "part_steps"])
def column_maxima_kernel(
    x_ptr, maxima_ptr, n_rows, n_cols, row_stride, part_steps, STEPS: tl.constexpr, SCHEME: tl.constexpr
):
    """Float32 bits of the largest magnitudes of the columns of ``x[n_rows, n_cols]`` (unit stride along columns) among
    the rows of a part, to ``maxima[parts, n_cols]``. One program per part, of ``part_steps`` times 32 rows, and 128
    columns; ``STEPS`` as in [`fake_rows_kernel`]."""
    part = tl.program_id(1).to(tl.int64)
    cols = tl.program_id(0).to(tl.int64) * 128 + tl.arange(0, 128)[None, :]
    top = tl.zeros([32, 128], tl.int32)
    for step in range(STEPS if SCHEME.INTERPRETED else part_steps):
        rows = (part * part_steps + step) * 32 + tl.arange(0, 32)[:, None]
        x = read_matrix(x_ptr, rows, cols, n_rows, n_cols, row_stride, SCHEME.BF16)
        top = tl.maximum(top, x.to(tl.int32, bitcast=True) & MAGNITUDE_FIELD)
    top = tl.max(top, axis=0, keep_dims=True)
    tl.store(maxima_ptr + part * n_cols + cols, top, mask=cols < n_cols)


@triton.jit
def _bases(maxima_ptr, cols, n_cols, n_parts, PARTS: tl.constexpr):
    """Scale bytes of columns."""
    parts = tl.arange(0, PARTS)[:, None]
    mask = (parts < n_parts) & (cols[None, :] < n_cols)
    top = tl.load(maxima_ptr + parts * n_cols + cols[None, :], mask=mask, other=0)
    return base_of_row(tl.max(top, axis=0))


@triton.jit(do_not_specialize=["n_rows", "n_parts", "col_tiles"])
def fake_columns_kernel(
    x_ptr,
    maxima_ptr,
    out_ptr,
    n_rows,
    n_cols,
    row_stride,
    n_parts,
    col_tiles,
    PARTS: tl.constexpr,
    SCHEME: tl.constexpr,
):
    """Values of the columns of ``x[n_rows, n_cols]`` (unit stride along columns) to ``out``, contiguous, given what
    [`column_maxima_kernel`] found. One program per 64 x 128 elements."""
    pid = tl.program_id(0)
    rows = (pid // col_tiles).to(tl.int64) * 64 + tl.arange(0, 64)[:, None]
    cols = (pid % col_tiles).to(tl.int64) * 128 + tl.arange(0, 128)
    base = _bases(maxima_ptr, cols, n_cols, n_parts, PARTS)[None, :]
    cols = cols[None, :]
    x = read_matrix(x_ptr, rows, cols, n_rows, n_cols, row_stride, SCHEME.BF16)
    values = as_stored(values_of_rows(x, base, SCHEME.LARGEST), out_ptr, SCHEME.INTERPRETED)
    tl.store(out_ptr + rows * n_cols + cols, values, mask=(rows < n_rows) & (cols < n_cols))


@triton.jit(do_not_specialize=["n_rows", "n_parts", "col_tiles"])
def columns_kernel(
    x_ptr,
    maxima_ptr,
    out,
    n_rows,
    n_cols,
    padded_rows,
    row_stride,
    n_parts,
    col_tiles,
    PARTS: tl.constexpr,
    SCHEME: tl.constexpr,
):
    """Elements ``[n_cols, padded_rows]`` and scales ``[n_cols]`` of the columns of ``x[n_rows, n_cols]`` (unit stride
    along columns), given what [`column_maxima_kernel`] found. One program per 128 rows and 64 columns."""
    pid = tl.program_id(0)
    along = (pid // col_tiles).to(tl.int64) * 128 + tl.arange(0, 128)
    cols = (pid % col_tiles).to(tl.int64) * 64 + tl.arange(0, 64)
    mask = (along[:, None] < n_rows) & (cols[None, :] < n_cols)
    x = tl.load(x_ptr + along[:, None] * row_stride + cols[None, :], mask=mask, other=0)
    x = to_float(transposed(x), SCHEME.BF16)
    base = _bases(maxima_ptr, cols, n_cols, n_parts, PARTS)
    elements = e4m3_bits(x * inverse_of_row(base)[:, None], SCHEME.NATIVE)
    mask = (cols[:, None] < n_cols) & (along[None, :] < padded_rows)
    tl.store(out.elements + cols[:, None] * padded_rows + along[None, :], elements, mask=mask)
    if pid < col_tiles:
        tl.store(out.scale + cols, scale_value(base), mask=cols < n_cols)
