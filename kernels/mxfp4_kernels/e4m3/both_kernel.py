# SPDX-License-Identifier: Apache-2.0
"""A matrix folded into E4M3 along its rows and its columns, or packed along its rows and folded along its columns, from
one read of it. Tiles and arithmetic are in `e4m3/tile.py`; strips are as in `quantization/both.py`."""

import triton
import triton.language as tl

from ..common.arguments import Random, Tile
from ..common.blocks import scale_value
from ..common.elements import to_float
from ..common.tile import pack_tile
from ..quantization.both import transposed
from .pairs import codes_of_rows, counted_of_rows, elements_of_rows, fold_columns, fold_rows
from .tile import base_of, blocks_of, count_inexact, elements_of, fold_tile, prepared


@triton.jit
def _read(x_ptr, row_start, col_start, lengths, ROWS: tl.constexpr, COLS: tl.constexpr):
    """``[ROWS, COLS]`` as they are stored, zero outside of the matrix."""
    rows = row_start + tl.arange(0, ROWS)[:, None]
    cols = col_start + tl.arange(0, COLS)[None, :]
    mask = (rows < lengths.n_rows) & (cols < lengths.n_cols)
    return tl.load(x_ptr + rows * lengths.x_row_stride + cols * lengths.x_col_stride, mask=mask, other=0)


@triton.jit
def read_rows(
    x_ptr, start, at, lengths, signs_ptr, random, STRIP: tl.constexpr, BF16: tl.constexpr, SIDE: tl.constexpr
):
    """What [`prepared`] makes of a strip of ``STRIP`` rows of 128 elements."""
    y = _read(x_ptr, start, at.col_start, lengths, STRIP, 128)
    y = to_float(tl.reshape(y, [STRIP, 1, 4, 32]), BF16)
    return prepared(y, at, signs_ptr, random, SIDE)


@triton.jit(do_not_specialize=["col_tiles", "seed_low", "seed_high", "seed_low_t", "seed_high_t"])
def fold_both_kernel(
    x_ptr,
    out,
    out_t,
    counter_ptr,
    signs,
    lengths,
    row_bytes,
    col_tiles,
    seed_low,
    seed_high,
    seed_low_t,
    seed_high_t,
    STRIP: tl.constexpr,
    REUSED: tl.constexpr,
    PAIRS: tl.constexpr,
    SCHEME: tl.constexpr,
    SIDES: tl.constexpr,
):
    """What [`fold_tile`] writes for a matrix with any strides, and for its transpose ``[n_cols, n_rows]``. One program
    per 128 x 128 elements, which goes over them in strips: of rows, then of columns. With ``REUSED`` the transpose
    holds the values that were quantized along the rows, without macro factors, otherwise those of blocks along the
    columns; then ``out`` may be `None`, or with ``row_bytes`` (otherwise `None`) it is `PackedPointers` for what
    [`pack_tile`] writes of the rows. Signs are a pair: of rows, then of columns. ``PAIRS`` is the way of
    `e4m3/pairs.py`, with elements and codes as int32 words where they are written along blocks."""
    # Triton 3.6 passes no part of a constant on, but a constant.
    SIDE: tl.constexpr = SIDES.rows
    SIDE_T: tl.constexpr = SIDES.columns
    n_rows, n_cols = lengths.n_rows, lengths.n_cols
    padded_cols, padded_rows = lengths.padded_cols, lengths.padded_rows
    pid = tl.program_id(0)
    row_start = (pid // col_tiles).to(tl.int64) * 128
    col_start = (pid % col_tiles).to(tl.int64) * 128
    random, random_t = Random(0, seed_low, seed_high), Random(0, seed_low_t, seed_high_t)
    n_inexact = tl.cast(0, tl.int32)
    inexact = tl.zeros([STRIP, 1, 4, 1], tl.int32)
    top = tl.full([STRIP, 1, 4, 1], -1, tl.int32)
    for strip in range(128 // STRIP):
        start = row_start + strip * STRIP
        rows = start + tl.arange(0, STRIP)[:, None, None, None]
        # Triton 3.6 compares no bundle that has `None` in it with `None`.
        if row_bytes is not None:
            if PAIRS:
                stride = lengths.x_row_stride
                counted = codes_of_rows(x_ptr, out, start, col_start, n_rows, n_cols, stride, STRIP, SCHEME)
            else:
                at = Tile(rows, col_start, n_rows, lengths.length)
                y, noise = read_rows(x_ptr, start, at, lengths, signs[0], random, STRIP, SCHEME.BF16, SIDE)
                _, _, counted, _ = blocks_of(y, noise, SIDE.STOCHASTIC, SCHEME)
                pack_tile(y, out, at, row_bytes, random, SCHEME, SIDE)
            top = tl.maximum(top, counted)
        elif PAIRS and out is None:
            counted = counted_of_rows(x_ptr, start, col_start, n_rows, n_cols, lengths.x_row_stride, STRIP, SCHEME)
            top = tl.maximum(top, counted)
        elif PAIRS:
            found, counted = fold_rows(
                x_ptr, out, start, col_start, n_rows, n_cols, lengths.x_row_stride, padded_cols, STRIP, 128, SCHEME
            )
            inexact += found
            if REUSED:
                top = tl.maximum(top, counted)
        elif out is None:
            at = Tile(rows, col_start, n_rows, lengths.length)
            y, noise = read_rows(x_ptr, start, at, lengths, signs[0], random, STRIP, SCHEME.BF16, SIDE)
            _, _, counted, _ = blocks_of(y, noise, SIDE.STOCHASTIC, SCHEME)
            top = tl.maximum(top, counted)
        else:
            at = Tile(rows, col_start, n_rows, lengths.length)
            y, noise = read_rows(x_ptr, start, at, lengths, signs[0], random, STRIP, SCHEME.BF16, SIDE)
            at = Tile(rows, col_start, n_rows, padded_cols)
            found, counted = fold_tile(y, noise, out, at, SIDE.STOCHASTIC, SCHEME)
            n_inexact += found
            if REUSED:
                top = tl.maximum(top, counted)
    if REUSED:
        base = base_of(tl.max(top, axis=0, keep_dims=True))
    for strip in range(128 // STRIP):
        if REUSED:
            start = row_start + strip * STRIP
            if PAIRS:
                elements, found = elements_of_rows(
                    x_ptr, base, start, col_start, n_rows, n_cols, lengths.x_row_stride, STRIP, SCHEME
                )
                inexact += found
            else:
                rows = start + tl.arange(0, STRIP)[:, None, None, None]
                at = Tile(rows, col_start, n_rows, lengths.length)
                y, noise = read_rows(x_ptr, start, at, lengths, signs[0], random, STRIP, SCHEME.BF16, SIDE)
                y, byte, counted, _ = blocks_of(y, noise, SIDE.STOCHASTIC, SCHEME)
                elements, found = elements_of(y, byte, counted, base, SIDE.STOCHASTIC, SCHEME)
                elements = tl.reshape(elements, [STRIP, 128])
                n_inexact += found
            elements = transposed(elements)
            cols = col_start + tl.arange(0, 128)[:, None]
            along = start + tl.arange(0, STRIP)[None, :]
            to = out_t.elements + cols * padded_rows + along
            tl.store(to, elements, mask=(cols < n_cols) & (along < padded_rows))
        elif PAIRS:
            start = col_start + strip * STRIP
            found, _ = fold_columns(
                x_ptr, out_t, row_start, start, n_rows, n_cols, lengths.x_row_stride, padded_rows, STRIP, SCHEME
            )
            inexact += found
        else:
            start = col_start + strip * STRIP
            rows = start + tl.arange(0, STRIP)[:, None, None, None]
            y = _read(x_ptr, row_start, start, lengths, 128, STRIP)
            y = to_float(tl.reshape(transposed(y), [STRIP, 1, 4, 32]), SCHEME.BF16)
            at = Tile(rows, row_start, n_cols, lengths.length_t)
            y, noise = prepared(y, at, signs[1], random_t, SIDE_T)
            at = Tile(rows, row_start, n_cols, padded_rows)
            found, _ = fold_tile(y, noise, out_t, at, SIDE_T.STOCHASTIC, SCHEME)
            n_inexact += found
    if PAIRS:
        n_inexact = tl.sum(tl.reshape(inexact, [inexact.numel], can_reorder=True), axis=0)
    if REUSED:
        cols = col_start + tl.arange(0, 4)[None, None, :, None] * 32 + tl.arange(0, 32)[None, None, None, :]
        scale = tl.broadcast_to(scale_value(base), cols.shape)
        tl.store(out_t.scale + (row_start // 128) * n_cols + cols, scale, mask=cols < n_cols)
    count_inexact(counter_ptr, n_inexact)
