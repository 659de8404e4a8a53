# SPDX-License-Identifier: Apache-2.0
"""The kernels along columns, or along rows and columns from one read of a matrix.

A strip of columns is read as it lies in memory and transposed on the way into the layout of rows; from there on it is
like any tile. For both directions a program owns ``TILE x TILE`` elements and goes over them in strips of columns, then
in strips of rows: the second time they come out of the caches, and no more registers are needed than for one direction.
The second axis of the grid runs over the matrices of a stack, which are ``x_stack_stride`` apart.
"""

import triton
import triton.language as tl

from ..common.tile import as_float, fake_tile, pack_tile, rotated


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
def _tile_of(x, MACRO: tl.constexpr, BF16: tl.constexpr):
    """Float32 ``[ROWS, macro blocks, blocks, 32]`` of stored elements ``[ROWS, COLS]``."""
    return as_float(tl.reshape(x, [x.shape[0], x.shape[1] // MACRO, MACRO // 32, 32]), BF16)


@triton.jit(do_not_specialize=["col_tiles", "seed_low", "seed_high", "seed_low_t", "seed_high_t"])
def fake_quantize_both_kernel(
    x_ptr,
    out_ptr,
    out_t_ptr,
    signs_ptr,
    signs_t_ptr,
    n_rows,
    n_cols,
    out_cols,
    out_cols_t,
    x_row_stride,
    x_stack_stride,
    col_tiles,
    seed_low,
    seed_high,
    seed_low_t,
    seed_high_t,
    alpha,
    TILE: tl.constexpr,
    STRIP: tl.constexpr,
    BY_ROWS: tl.constexpr,
    MACRO: tl.constexpr,
    SEARCH: tl.constexpr,
    HAS_FALLBACK: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    STOCHASTIC_T: tl.constexpr,
    ROTATION: tl.constexpr,
    ROTATION_SCALE: tl.constexpr,
    HAS_SIGNS: tl.constexpr,
    ROTATION_T: tl.constexpr,
    ROTATION_SCALE_T: tl.constexpr,
    HAS_SIGNS_T: tl.constexpr,
    CARRY: tl.constexpr,
    CLIPS: tl.constexpr,
    LEAST_SQUARES: tl.constexpr,
    LIMITED: tl.constexpr,
    LARGEST: tl.constexpr,
    BF16: tl.constexpr,
    OUT_BF16: tl.constexpr,
    TILES: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """``out[n_rows, out_cols]`` (``BY_ROWS``) and ``out_t[n_cols, out_cols_t]``, each contiguous, of ``x[n_rows,
    n_cols]`` with unit stride along columns."""
    # Without rows a tile is a strip of columns.
    width: tl.constexpr = TILE if BY_ROWS else STRIP
    pid = tl.program_id(0)
    row_start = (pid // col_tiles).to(tl.int64) * TILE
    col_start = (pid % col_tiles).to(tl.int64) * width
    stack = tl.program_id(1).to(tl.int64)
    x_ptr += stack * x_stack_stride
    for strip in range(width // STRIP):
        start = col_start + strip * STRIP
        y = transposed(_read(x_ptr, row_start, start, n_rows, n_cols, x_row_stride, TILE, STRIP))
        y = _tile_of(y, MACRO, BF16)
        y = rotated(y, row_start, out_cols_t, signs_t_ptr, TILE, MACRO, ROTATION_T, ROTATION_SCALE_T, HAS_SIGNS_T)
        fake_tile(
            y,
            out_t_ptr + stack * n_cols * out_cols_t,
            start + tl.arange(0, STRIP)[:, None, None, None],
            row_start,
            n_cols,
            out_cols_t,
            alpha,
            stack * n_cols,
            seed_low_t,
            seed_high_t,
            STRIP,
            TILE,
            MACRO,
            SEARCH,
            HAS_FALLBACK,
            STOCHASTIC_T,
            CARRY,
            CLIPS,
            LEAST_SQUARES,
            LIMITED,
            LARGEST,
            OUT_BF16,
            TILES,
            INTERPRETED,
        )
    if BY_ROWS:
        for strip in range(TILE // STRIP):
            start = row_start + strip * STRIP
            y = _read(x_ptr, start, col_start, n_rows, n_cols, x_row_stride, STRIP, TILE)
            y = _tile_of(y, MACRO, BF16)
            y = rotated(y, col_start, out_cols, signs_ptr, TILE, MACRO, ROTATION, ROTATION_SCALE, HAS_SIGNS)
            fake_tile(
                y,
                out_ptr + stack * n_rows * out_cols,
                start + tl.arange(0, STRIP)[:, None, None, None],
                col_start,
                n_rows,
                out_cols,
                alpha,
                stack * n_rows,
                seed_low,
                seed_high,
                STRIP,
                TILE,
                MACRO,
                SEARCH,
                HAS_FALLBACK,
                STOCHASTIC,
                CARRY,
                CLIPS,
                LEAST_SQUARES,
                LIMITED,
                LARGEST,
                OUT_BF16,
                TILES,
                INTERPRETED,
            )


@triton.jit(do_not_specialize=["col_tiles", "seed_low", "seed_high", "seed_low_t", "seed_high_t"])
def quantize_both_kernel(
    x_ptr,
    codes_ptr,
    scale_ptr,
    macro_ptr,
    residual_codes_ptr,
    residual_scale_ptr,
    codes_t_ptr,
    scale_t_ptr,
    macro_t_ptr,
    residual_codes_t_ptr,
    residual_scale_t_ptr,
    signs_ptr,
    signs_t_ptr,
    n_rows,
    n_cols,
    out_cols,
    out_cols_t,
    x_row_stride,
    x_stack_stride,
    n_codes,
    n_blocks,
    n_macros,
    n_codes_t,
    n_blocks_t,
    n_macros_t,
    col_tiles,
    seed_low,
    seed_high,
    seed_low_t,
    seed_high_t,
    TILE: tl.constexpr,
    STRIP: tl.constexpr,
    BY_ROWS: tl.constexpr,
    MACRO: tl.constexpr,
    SEARCH: tl.constexpr,
    HAS_FALLBACK: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    STOCHASTIC_T: tl.constexpr,
    ROTATION: tl.constexpr,
    ROTATION_SCALE: tl.constexpr,
    HAS_SIGNS: tl.constexpr,
    ROTATION_T: tl.constexpr,
    ROTATION_SCALE_T: tl.constexpr,
    HAS_SIGNS_T: tl.constexpr,
    CARRY: tl.constexpr,
    CLIPS: tl.constexpr,
    LEAST_SQUARES: tl.constexpr,
    LIMITED: tl.constexpr,
    BF16: tl.constexpr,
    TILES: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """What [`pack_tile`] writes for ``x`` (``BY_ROWS``) and for its transpose; see [`fake_quantize_both_kernel`]."""
    # Without rows a tile is a strip of columns.
    width: tl.constexpr = TILE if BY_ROWS else STRIP
    pid = tl.program_id(0)
    row_start = (pid // col_tiles).to(tl.int64) * TILE
    col_start = (pid % col_tiles).to(tl.int64) * width
    stack = tl.program_id(1).to(tl.int64)
    x_ptr += stack * x_stack_stride
    before = stack * n_cols
    for strip in range(width // STRIP):
        start = col_start + strip * STRIP
        y = transposed(_read(x_ptr, row_start, start, n_rows, n_cols, x_row_stride, TILE, STRIP))
        y = _tile_of(y, MACRO, BF16)
        y = rotated(y, row_start, out_cols_t, signs_t_ptr, TILE, MACRO, ROTATION_T, ROTATION_SCALE_T, HAS_SIGNS_T)
        pack_tile(
            y,
            codes_t_ptr + before * n_codes_t,
            scale_t_ptr + before * n_blocks_t,
            macro_t_ptr + before * n_macros_t if SEARCH > 0 else None,
            residual_codes_t_ptr + before * n_codes_t if HAS_FALLBACK else None,
            residual_scale_t_ptr + before * n_blocks_t if HAS_FALLBACK else None,
            start + tl.arange(0, STRIP)[:, None, None, None],
            row_start,
            n_cols,
            out_cols_t,
            n_codes_t,
            n_blocks_t,
            n_macros_t,
            before,
            seed_low_t,
            seed_high_t,
            STRIP,
            TILE,
            MACRO,
            SEARCH,
            HAS_FALLBACK,
            STOCHASTIC_T,
            CARRY,
            CLIPS,
            LEAST_SQUARES,
            LIMITED,
            TILES,
            INTERPRETED,
        )
    before = stack * n_rows
    if BY_ROWS:
        for strip in range(TILE // STRIP):
            start = row_start + strip * STRIP
            y = _read(x_ptr, start, col_start, n_rows, n_cols, x_row_stride, STRIP, TILE)
            y = _tile_of(y, MACRO, BF16)
            y = rotated(y, col_start, out_cols, signs_ptr, TILE, MACRO, ROTATION, ROTATION_SCALE, HAS_SIGNS)
            pack_tile(
                y,
                codes_ptr + before * n_codes,
                scale_ptr + before * n_blocks,
                macro_ptr + before * n_macros if SEARCH > 0 else None,
                residual_codes_ptr + before * n_codes if HAS_FALLBACK else None,
                residual_scale_ptr + before * n_blocks if HAS_FALLBACK else None,
                start + tl.arange(0, STRIP)[:, None, None, None],
                col_start,
                n_rows,
                out_cols,
                n_codes,
                n_blocks,
                n_macros,
                before,
                seed_low,
                seed_high,
                STRIP,
                TILE,
                MACRO,
                SEARCH,
                HAS_FALLBACK,
                STOCHASTIC,
                CARRY,
                CLIPS,
                LEAST_SQUARES,
                LIMITED,
                TILES,
                INTERPRETED,
            )
