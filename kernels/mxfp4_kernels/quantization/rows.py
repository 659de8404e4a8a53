# SPDX-License-Identifier: Apache-2.0
"""The kernels along rows: one read of a matrix, one write of its MXFP4 values, or of their codes and scale bytes."""

import triton
import triton.language as tl

from ..common.tile import fake_tile, load, offsets_in_tile, pack_tile, rotated, tile_start


@triton.jit(do_not_specialize=["n_rows", "col_tiles", "first_row", "seed_low", "seed_high"])
def fake_quantize_kernel(
    x_ptr,
    out_ptr,
    signs_ptr,
    n_rows,
    n_cols,
    n_read,
    x_row_stride,
    col_tiles,
    first_row,
    seed_low,
    seed_high,
    alpha,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    MACRO: tl.constexpr,
    SEARCH: tl.constexpr,
    HAS_FALLBACK: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    ROTATION: tl.constexpr,
    ROTATION_SCALE: tl.constexpr,
    HAS_SIGNS: tl.constexpr,
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
    """``out[n_rows, n_cols]`` (contiguous) from ``x[n_rows, n_read]`` with unit stride along columns, one program per
    tile, of which ``col_tiles`` lie side by side; columns from ``n_read`` on are zero before a rotation. ``LARGEST`` is
    the largest finite output, ``first_row`` the first one's number for random numbers."""
    row_start, col_start = tile_start(col_tiles, ROWS, COLS)
    rows = row_start + tl.arange(0, ROWS)[:, None, None, None]
    x = load(x_ptr, rows, col_start, offsets_in_tile(COLS, MACRO, 32, 32), n_rows, n_read, x_row_stride, BF16)
    x = rotated(x, col_start, n_cols, signs_ptr, COLS, MACRO, ROTATION, ROTATION_SCALE, HAS_SIGNS)
    fake_tile(
        x,
        out_ptr,
        rows,
        col_start,
        n_rows,
        n_cols,
        alpha,
        first_row,
        seed_low,
        seed_high,
        ROWS,
        COLS,
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


@triton.jit(do_not_specialize=["n_rows", "col_tiles", "first_row", "seed_low", "seed_high"])
def quantize_kernel(
    x_ptr,
    codes_ptr,
    scale_ptr,
    macro_ptr,
    residual_codes_ptr,
    residual_scale_ptr,
    signs_ptr,
    n_rows,
    n_cols,
    n_read,
    x_row_stride,
    n_codes,
    n_blocks,
    n_macros,
    col_tiles,
    first_row,
    seed_low,
    seed_high,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    MACRO: tl.constexpr,
    SEARCH: tl.constexpr,
    HAS_FALLBACK: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    ROTATION: tl.constexpr,
    ROTATION_SCALE: tl.constexpr,
    HAS_SIGNS: tl.constexpr,
    CARRY: tl.constexpr,
    CLIPS: tl.constexpr,
    LEAST_SQUARES: tl.constexpr,
    LIMITED: tl.constexpr,
    BF16: tl.constexpr,
    TILES: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """What [`pack_tile`] writes, from ``x`` as in [`fake_quantize_kernel`]."""
    row_start, col_start = tile_start(col_tiles, ROWS, COLS)
    rows = row_start + tl.arange(0, ROWS)[:, None, None, None]
    x = load(x_ptr, rows, col_start, offsets_in_tile(COLS, MACRO, 32, 32), n_rows, n_read, x_row_stride, BF16)
    x = rotated(x, col_start, n_cols, signs_ptr, COLS, MACRO, ROTATION, ROTATION_SCALE, HAS_SIGNS)
    pack_tile(
        x,
        codes_ptr,
        scale_ptr,
        macro_ptr,
        residual_codes_ptr,
        residual_scale_ptr,
        rows,
        col_start,
        n_rows,
        n_cols,
        n_codes,
        n_blocks,
        n_macros,
        first_row,
        seed_low,
        seed_high,
        ROWS,
        COLS,
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
