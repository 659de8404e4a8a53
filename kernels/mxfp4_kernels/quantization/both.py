# SPDX-License-Identifier: Apache-2.0
"""The kernel along columns, or along rows and columns from one read of a matrix.

A strip of columns is read as it lies in memory and transposed on the way into the layout of rows; from there on it is
like any tile. For both directions a program owns ``TILE x TILE`` elements and goes over them in strips of columns, then
in strips of rows: the second time they come out of the caches, and no more registers are needed than for one direction.
The second axis of the grid runs over the matrices of a stack, which are ``x_stack_stride`` apart.
"""

import triton
import triton.language as tl

from ..common.arguments import PackedPointers, Random, Tile
from ..common.elements import to_float
from ..common.tile import fake_tile, pack_tile, rotated


@triton.jit
def _read(x_ptr, row_start, col_start, n_rows, n_cols, x_row_stride, ROWS: tl.constexpr, COLS: tl.constexpr):
    """``[ROWS, COLS]`` as they are stored, zero outside of the matrix."""
    rows = row_start + tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, COLS)[None, :]
    mask = (rows < n_rows) & (cols < n_cols - col_start)
    return tl.load(x_ptr + col_start + rows * x_row_stride + cols, mask=mask, other=0)


@triton.jit
def transposed(x):
    """``[COLS, ROWS]`` of ``[ROWS, COLS]``, with eight neighbours of a row in one thread.

    Taking eight neighbours apart and putting them together again makes the compiler move them there, through shared
    memory and in their narrow type. Without it the columns of a block would stay in different threads, and each maximum
    would take shuffles and shared memory of its own.
    """
    y = tl.reshape(tl.trans(x), [x.numel // 8, 2, 2, 2])
    a, b = tl.split(y)
    a0, a1 = tl.split(a)
    b0, b1 = tl.split(b)
    a00, a01 = tl.split(a0)
    a10, a11 = tl.split(a1)
    b00, b01 = tl.split(b0)
    b10, b11 = tl.split(b1)
    a = tl.join(tl.join(a00, a01), tl.join(a10, a11))
    b = tl.join(tl.join(b00, b01), tl.join(b10, b11))
    return tl.reshape(tl.join(a, b), [x.shape[1], x.shape[0]])


@triton.jit
def _quantize_strip(
    y, out, signs_ptr, at, row_bytes, alpha, stack, seed_low, seed_high, SCHEME: tl.constexpr, SIDE: tl.constexpr
):
    """Write what becomes of stored elements ``[ROWS, COLS]`` at their place in matrix number ``stack`` of those that
    ``out`` holds: values, or with ``row_bytes`` codes and the rest."""
    y = tl.reshape(y, [y.shape[0], y.shape[1] // SCHEME.MACRO, SCHEME.MACRO // 32, 32])
    y = rotated(to_float(y, SCHEME.BF16), at.col_start, at.n_cols, signs_ptr, SIDE)
    before = stack * at.n_rows
    random = Random(before, seed_low, seed_high)
    if row_bytes is None:
        out += before * at.n_cols
    else:
        n_codes, n_blocks = row_bytes.n_codes, row_bytes.n_blocks
        out = PackedPointers(
            out.codes + before * n_codes,
            out.scale + before * n_blocks,
            out.macro + before * row_bytes.n_macros if SCHEME.SEARCH > 0 else None,
            out.residual_codes + before * n_codes if SCHEME.HAS_FALLBACK else None,
            out.residual_scale + before * n_blocks if SCHEME.HAS_FALLBACK else None,
        )
    rows = at.rows + tl.arange(0, y.shape[0])[:, None, None, None]
    at = Tile(rows, at.col_start, at.n_rows, at.n_cols)
    if row_bytes is None:
        fake_tile(y, out, at, alpha, random, None, SCHEME, SIDE)
    else:
        pack_tile(y, out, at, row_bytes, random, SCHEME, SIDE)


@triton.jit(do_not_specialize=["col_tiles", "seed_low", "seed_high", "seed_low_t", "seed_high_t"])
def quantize_both_kernel(
    x_ptr,
    out,
    out_t,
    signs,
    lengths,
    row_bytes,
    col_tiles,
    seed_low,
    seed_high,
    seed_low_t,
    seed_high_t,
    alpha,
    TILE: tl.constexpr,
    STRIP: tl.constexpr,
    BY_ROWS: tl.constexpr,
    SCHEME: tl.constexpr,
    SIDES: tl.constexpr,
):
    """Values of ``x[n_rows, n_cols]`` (unit stride along columns) to ``out[n_rows, out_cols]`` (``BY_ROWS``) and
    ``out_t[n_cols, out_cols_t]``, each contiguous; or what [`pack_tile`] writes, where these are `PackedPointers`,
    ``row_bytes`` a pair and ``alpha`` is `None`. So are signs: of rows, then of columns."""
    # Triton 3.6 passes no part of a constant on, but a constant.
    SIDE: tl.constexpr = SIDES.rows
    SIDE_T: tl.constexpr = SIDES.columns
    # Without rows a tile is a strip of columns.
    width: tl.constexpr = TILE if BY_ROWS else STRIP
    n_rows, n_cols, stride = lengths.n_rows, lengths.n_cols, lengths.x_row_stride
    pid = tl.program_id(0)
    row_start = (pid // col_tiles).to(tl.int64) * TILE
    col_start = (pid % col_tiles).to(tl.int64) * width
    stack = tl.program_id(1).to(tl.int64)
    x_ptr += stack * lengths.x_stack_stride
    for strip in range(width // STRIP):
        start = col_start + strip * STRIP
        y = transposed(_read(x_ptr, row_start, start, n_rows, n_cols, stride, TILE, STRIP))
        at = Tile(start, row_start, n_cols, lengths.out_cols_t)
        of_rows = None if row_bytes is None else row_bytes[1]
        _quantize_strip(y, out_t, signs[1], at, of_rows, alpha, stack, seed_low_t, seed_high_t, SCHEME, SIDE_T)
    if BY_ROWS:
        for strip in range(TILE // STRIP):
            start = row_start + strip * STRIP
            y = _read(x_ptr, start, col_start, n_rows, n_cols, stride, STRIP, TILE)
            at = Tile(start, col_start, n_rows, lengths.out_cols)
            of_rows = None if row_bytes is None else row_bytes[0]
            _quantize_strip(y, out, signs[0], at, of_rows, alpha, stack, seed_low, seed_high, SCHEME, SIDE)
