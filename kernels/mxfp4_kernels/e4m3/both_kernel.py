# SPDX-License-Identifier: Apache-2.0
"""A matrix folded into E4M3 along its rows and along its columns, from one read of it. Tiles and arithmetic are in
`e4m3/tile.py`; strips are as in `quantization/both.py`."""

import triton
import triton.language as tl

from ..common.blocks import NO_MACRO, scale_value
from ..common.tile import as_float
from ..quantization.both import transposed
from .tile import base_of, blocks_of, count_inexact, elements_of, fold_tile, prepared


@triton.jit
def _read(
    x_ptr, row_start, col_start, n_rows, n_cols, x_row_stride, x_col_stride, ROWS: tl.constexpr, COLS: tl.constexpr
):
    """``[ROWS, COLS]`` as they are stored, zero outside of the matrix."""
    rows = row_start + tl.arange(0, ROWS)[:, None]
    cols = col_start + tl.arange(0, COLS)[None, :]
    mask = (rows < n_rows) & (cols < n_cols)
    return tl.load(x_ptr + rows * x_row_stride + cols * x_col_stride, mask=mask, other=0)


@triton.jit(do_not_specialize=["col_tiles", "seed_low", "seed_high", "seed_low_t", "seed_high_t"])
def fold_both_kernel(
    x_ptr,
    elements_ptr,
    scale_ptr,
    elements_t_ptr,
    scale_t_ptr,
    counter_ptr,
    signs_ptr,
    signs_t_ptr,
    n_rows,
    n_cols,
    length,
    length_t,
    padded_cols,
    padded_rows,
    x_row_stride,
    x_col_stride,
    col_tiles,
    seed_low,
    seed_high,
    seed_low_t,
    seed_high_t,
    STRIP: tl.constexpr,
    REUSED: tl.constexpr,
    SEARCH: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    ROTATION: tl.constexpr,
    ROTATION_SCALE: tl.constexpr,
    HAS_SIGNS: tl.constexpr,
    STOCHASTIC_T: tl.constexpr,
    ROTATION_T: tl.constexpr,
    ROTATION_SCALE_T: tl.constexpr,
    HAS_SIGNS_T: tl.constexpr,
    CARRY: tl.constexpr,
    CLIPS: tl.constexpr,
    LEAST_SQUARES: tl.constexpr,
    LIMITED: tl.constexpr,
    BF16: tl.constexpr,
    NATIVE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """What [`fold_tile`] writes for a matrix with any strides, and for its transpose ``[n_cols, n_rows]``. One program
    per 128 x 128 elements, which goes over them in strips: of rows, then of columns. With ``REUSED`` the transpose
    holds the values that were quantized along the rows, without macro factors, otherwise those of blocks along the
    columns. ``length`` and ``length_t`` are ``n_cols`` and ``n_rows`` with the padding of rotations."""
    pid = tl.program_id(0)
    row_start = (pid // col_tiles).to(tl.int64) * 128
    col_start = (pid % col_tiles).to(tl.int64) * 128
    n_inexact = tl.cast(0, tl.int32)
    top = tl.full([STRIP, 1, 4, 1], -1, tl.int32)
    for strip in range(128 // STRIP):
        start = row_start + strip * STRIP
        rows = start + tl.arange(0, STRIP)[:, None, None, None]
        y = _read(x_ptr, start, col_start, n_rows, n_cols, x_row_stride, x_col_stride, STRIP, 128)
        y, noise = prepared(
            as_float(tl.reshape(y, [STRIP, 1, 4, 32]), BF16),
            rows,
            col_start,
            length,
            signs_ptr,
            seed_low,
            seed_high,
            STRIP,
            128,
            STOCHASTIC,
            ROTATION,
            ROTATION_SCALE,
            HAS_SIGNS,
        )
        found, counted = fold_tile(
            y,
            noise,
            elements_ptr,
            scale_ptr,
            rows,
            col_start,
            n_rows,
            padded_cols,
            128,
            SEARCH,
            STOCHASTIC,
            CARRY,
            CLIPS,
            LEAST_SQUARES,
            LIMITED,
            False,
            NATIVE,
            INTERPRETED,
        )
        n_inexact += found
        if REUSED:
            top = tl.maximum(top, counted)
    if REUSED:
        base = base_of(tl.max(top, axis=0, keep_dims=True))
    for strip in range(128 // STRIP):
        if REUSED:
            start = row_start + strip * STRIP
            rows = start + tl.arange(0, STRIP)[:, None, None, None]
            y = _read(x_ptr, start, col_start, n_rows, n_cols, x_row_stride, x_col_stride, STRIP, 128)
            y, noise = prepared(
                as_float(tl.reshape(y, [STRIP, 1, 4, 32]), BF16),
                rows,
                col_start,
                length,
                signs_ptr,
                seed_low,
                seed_high,
                STRIP,
                128,
                STOCHASTIC,
                ROTATION,
                ROTATION_SCALE,
                HAS_SIGNS,
            )
            y, byte, counted, _ = blocks_of(
                y, noise, NO_MACRO, STOCHASTIC, CARRY, CLIPS, LEAST_SQUARES, LIMITED, False, NATIVE, INTERPRETED
            )
            elements, found = elements_of(y, byte, counted, base, STOCHASTIC, CLIPS, LIMITED, NATIVE)
            elements = transposed(tl.reshape(elements, [STRIP, 128]))
            cols = col_start + tl.arange(0, 128)[:, None]
            along = start + tl.arange(0, STRIP)[None, :]
            at = elements_t_ptr + cols * padded_rows + along
            tl.store(at, elements, mask=(cols < n_cols) & (along < padded_rows))
        else:
            start = col_start + strip * STRIP
            rows = start + tl.arange(0, STRIP)[:, None, None, None]
            y = _read(x_ptr, row_start, start, n_rows, n_cols, x_row_stride, x_col_stride, 128, STRIP)
            y, noise = prepared(
                as_float(tl.reshape(transposed(y), [STRIP, 1, 4, 32]), BF16),
                rows,
                row_start,
                length_t,
                signs_t_ptr,
                seed_low_t,
                seed_high_t,
                STRIP,
                128,
                STOCHASTIC_T,
                ROTATION_T,
                ROTATION_SCALE_T,
                HAS_SIGNS_T,
            )
            found, _ = fold_tile(
                y,
                noise,
                elements_t_ptr,
                scale_t_ptr,
                rows,
                row_start,
                n_cols,
                padded_rows,
                128,
                SEARCH,
                STOCHASTIC_T,
                CARRY,
                CLIPS,
                LEAST_SQUARES,
                LIMITED,
                False,
                NATIVE,
                INTERPRETED,
            )
        n_inexact += found
    if REUSED:
        cols = col_start + tl.arange(0, 4)[None, None, :, None] * 32 + tl.arange(0, 32)[None, None, None, :]
        scale = tl.broadcast_to(scale_value(base), cols.shape)
        tl.store(scale_t_ptr + (row_start // 128) * n_cols + cols, scale, mask=cols < n_cols)
    count_inexact(counter_ptr, n_inexact)
