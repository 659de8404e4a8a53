# SPDX-License-Identifier: Apache-2.0
"""A matrix rounded to E4M3 by a power of two for each row, and by one for each column: elements or values of both.

A first kernel reads the matrix once for the scale bytes of parts of rows and of parts of columns; that of a whole row
is the largest of its parts, as bytes grow with the largest magnitude. A second one reads it again and writes both.
"""

import triton
import triton.language as tl

from ..common.blocks import MAGNITUDE_FIELD, scale_value
from ..common.elements import as_stored
from ..quantization.both import transposed
from .fp8_kernel import base_of_row, inverse_of_row, read_matrix, values_of_rows
from .tile import e4m3_bits


#: Rows of a step of [`scale_bytes_kernel`], and columns of a program.
STEP = tl.constexpr(16)
WIDTH = tl.constexpr(256)


@triton.jit(do_not_specialize=["n_rows", "part_steps"])
def scale_bytes_kernel(
    x_ptr,
    of_rows_ptr,
    of_columns_ptr,
    n_rows,
    n_cols,
    row_stride,
    part_steps,
    STEPS: tl.constexpr,
    SCHEME: tl.constexpr,
):
    """Scale bytes of parts of the rows of ``x[n_rows, n_cols]`` (unit stride along columns), ``[parts, n_rows]``, and
    of its columns, ``[parts, n_cols]``. One program for ``part_steps * STEP`` rows and ``WIDTH`` columns; ``STEPS`` as
    in [`fake_rows_kernel`]."""
    col_part, row_part = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    cols = col_part * WIDTH + tl.arange(0, WIDTH)[None, :]
    top = tl.zeros([STEP, WIDTH], tl.int32)
    for step in range(STEPS if SCHEME.INTERPRETED else part_steps):
        rows = (row_part * part_steps + step) * STEP + tl.arange(0, STEP)[:, None]
        x = read_matrix(x_ptr, rows, cols, n_rows, n_cols, row_stride, SCHEME.BF16)
        magnitudes = x.to(tl.int32, bitcast=True) & MAGNITUDE_FIELD
        base = base_of_row(tl.max(magnitudes, axis=1, keep_dims=True))
        tl.store(of_rows_ptr + col_part * n_rows + rows, base.to(tl.uint8), mask=rows < n_rows)
        top = tl.maximum(top, magnitudes)
    base = base_of_row(tl.max(top, axis=0, keep_dims=True))
    tl.store(of_columns_ptr + row_part * n_cols + cols, base.to(tl.uint8), mask=cols < n_cols)


@triton.jit
def bases(parts_ptr, at, length, n_parts, PARTS: tl.constexpr):
    """Scale bytes (int32) of the rows or columns ``at``, of which there are ``length``."""
    parts = tl.arange(0, PARTS)[:, None]
    found = tl.load(parts_ptr + parts * length + at[None, :], mask=(parts < n_parts) & (at[None, :] < length), other=0)
    return tl.max(found.to(tl.int32), axis=0)


@triton.jit(do_not_specialize=["n_rows", "n_col_parts", "n_row_parts", "col_tiles"])
def elements_both_kernel(
    x_ptr,
    of_rows_ptr,
    of_columns_ptr,
    out,
    out_t,
    n_rows,
    n_cols,
    padded_rows,
    padded_cols,
    row_stride,
    n_col_parts,
    n_row_parts,
    col_tiles,
    COL_PARTS: tl.constexpr,
    ROW_PARTS: tl.constexpr,
    SCHEME: tl.constexpr,
):
    """Elements ``[n_rows, padded_cols]`` and ``[n_cols, padded_rows]`` of ``x[n_rows, n_cols]`` (unit stride along
    columns) and of its transpose, given what [`scale_bytes_kernel`] found, and their scales for every 128 elements,
    ``[padded_cols / 128, n_rows]`` and ``[padded_rows / 128, n_cols]``. One program per 128 rows and 64 columns."""
    pid = tl.program_id(0)
    row_tile, col_tile = (pid // col_tiles).to(tl.int64), (pid % col_tiles).to(tl.int64)
    rows, cols = row_tile * 128 + tl.arange(0, 128), col_tile * 64 + tl.arange(0, 64)
    x = read_matrix(x_ptr, rows[:, None], cols[None, :], n_rows, n_cols, row_stride, SCHEME.BF16)
    base = bases(of_rows_ptr, rows, n_rows, n_col_parts, COL_PARTS)
    elements = e4m3_bits(x * inverse_of_row(base)[:, None], SCHEME.NATIVE)
    mask = (rows[:, None] < n_rows) & (cols[None, :] < padded_cols)
    tl.store(out.elements + rows[:, None] * padded_cols + cols[None, :], elements, mask=mask)
    if col_tile % 2 == 0:
        tl.store(out.scale + col_tile // 2 * n_rows + rows, scale_value(base), mask=rows < n_rows)
    base = bases(of_columns_ptr, cols, n_cols, n_row_parts, ROW_PARTS)
    elements = transposed(e4m3_bits(x * inverse_of_row(base)[None, :], SCHEME.NATIVE))
    mask = (cols[:, None] < n_cols) & (rows[None, :] < padded_rows)
    tl.store(out_t.elements + cols[:, None] * padded_rows + rows[None, :], elements, mask=mask)
    tl.store(out_t.scale + row_tile * n_cols + cols, scale_value(base), mask=cols < n_cols)


@triton.jit(do_not_specialize=["n_rows", "n_col_parts", "n_row_parts", "col_tiles"])
def values_both_kernel(
    x_ptr,
    of_rows_ptr,
    of_columns_ptr,
    out_ptr,
    out_t_ptr,
    n_rows,
    n_cols,
    row_stride,
    n_col_parts,
    n_row_parts,
    col_tiles,
    COL_PARTS: tl.constexpr,
    ROW_PARTS: tl.constexpr,
    SCHEME: tl.constexpr,
):
    """The values that elements of rows have, and those that elements of columns have, both as ``x[n_rows, n_cols]`` and
    contiguous. One program per 64 x 128 elements."""
    pid = tl.program_id(0)
    rows = (pid // col_tiles).to(tl.int64) * 64 + tl.arange(0, 64)
    cols = (pid % col_tiles).to(tl.int64) * 128 + tl.arange(0, 128)
    x = read_matrix(x_ptr, rows[:, None], cols[None, :], n_rows, n_cols, row_stride, SCHEME.BF16)
    mask = (rows[:, None] < n_rows) & (cols[None, :] < n_cols)
    at = rows[:, None] * n_cols + cols[None, :]
    base = bases(of_rows_ptr, rows, n_rows, n_col_parts, COL_PARTS)[:, None]
    values = values_of_rows(x, base, SCHEME.LARGEST)
    tl.store(out_ptr + at, as_stored(values, out_ptr, SCHEME.INTERPRETED), mask=mask)
    base = bases(of_columns_ptr, cols, n_cols, n_row_parts, ROW_PARTS)[None, :]
    values = values_of_rows(x, base, SCHEME.LARGEST)
    tl.store(out_t_ptr + at, as_stored(values, out_t_ptr, SCHEME.INTERPRETED), mask=mask)
