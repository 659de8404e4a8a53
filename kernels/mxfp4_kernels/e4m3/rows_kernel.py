# SPDX-License-Identifier: Apache-2.0
"""Rows of a matrix folded into E4M3, a scale per 128 elements or per row. Arithmetic is in `e4m3/tile.py`."""

import triton
import triton.language as tl

from ..common.arguments import Random, Tile
from ..common.blocks import EXPONENT_FIELD, NAN_BYTE, max_bits, scale_value
from ..common.elements import to_float
from ..common.tile import fake_tile, offsets_in_tile
from .pairs import fold_columns, fold_rows
from .tile import (
    NAN_BITS,
    base_of,
    blocks_of,
    count_inexact,
    e4m3_bits,
    elements_of,
    fold_tile,
    prepared,
    store_elements,
)


@triton.jit
def _load(x_ptr, rows, col_start, n_rows, lengths, COLS: tl.constexpr, BF16: tl.constexpr):
    """Elements as float32, zero outside of the matrix; row and column indices are int64. bfloat16 arrives as bits."""
    cols = col_start + offsets_in_tile(COLS, 128, 32, 32)
    mask = (rows < n_rows) & (cols < lengths.n_cols)
    x = tl.load(x_ptr + rows * lengths.x_row_stride + cols * lengths.x_col_stride, mask=mask, other=0)
    return to_float(x, BF16)


@triton.jit(do_not_specialize=["n_rows", "col_tiles", "seed_low", "seed_high"])
def fold_groups_kernel(
    x_ptr,
    out,
    values_ptr,
    macro_ptr,
    counter_ptr,
    signs_ptr,
    n_rows,
    lengths,
    col_tiles,
    seed_low,
    seed_high,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    PAIRS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SCHEME: tl.constexpr,
    SIDE: tl.constexpr,
):
    """What [`fold_tile`] writes for a matrix with any strides. One program per tile, of which ``col_tiles`` lie side by
    side. ``PAIRS`` is the way of `e4m3/pairs.py`, with elements as int32 words, where neighbours in memory are those in
    a row, or in a column (``COLUMNS``, tiles of 128 elements). MXFP4 values go to ``values_ptr``, if it is not `None`,
    as [`fake_tile`] writes them: of rows that are rounded to nearest, not rotated, and not in pairs. Macro bytes
    ``[n_rows, n_cols / 128]`` go to ``macro_ptr``, if it is not `None`, except in pairs."""
    pid = tl.program_id(0)
    row_start = (pid // col_tiles).to(tl.int64) * ROWS
    col_start = (pid % col_tiles).to(tl.int64) * COLS
    n_cols, padded_cols = lengths.n_cols, lengths.padded_cols
    if PAIRS:
        if COLUMNS:
            stride = lengths.x_col_stride
            found, _ = fold_columns(x_ptr, out, col_start, row_start, n_cols, n_rows, stride, padded_cols, ROWS, SCHEME)
        else:
            stride = lengths.x_row_stride
            found, _ = fold_rows(
                x_ptr, out, row_start, col_start, n_rows, n_cols, stride, padded_cols, ROWS, COLS, SCHEME
            )
        n_inexact = tl.sum(tl.reshape(found, [found.numel], can_reorder=True), axis=0)
    else:
        rows = row_start + tl.arange(0, ROWS)[:, None, None, None]
        x = _load(x_ptr, rows, col_start, n_rows, lengths, COLS, SCHEME.BF16)
        at = Tile(rows, col_start, n_rows, lengths.length)
        x, noise = prepared(x, at, signs_ptr, Random(0, seed_low, seed_high), SIDE)
        at = Tile(rows, col_start, n_rows, padded_cols)
        n_inexact, _ = fold_tile(x, noise, out, at, SIDE.STOCHASTIC, SCHEME, macro_ptr)
        if values_ptr is not None:
            fake_tile(x, values_ptr, Tile(rows, col_start, n_rows, n_cols), 1.0, Random(0, 0, 0), None, SCHEME, SIDE)
    count_inexact(counter_ptr, n_inexact)


@triton.jit
def _read_blocks(
    x_ptr,
    signs_ptr,
    rows,
    start,
    n_rows,
    lengths,
    random,
    COLS: tl.constexpr,
    FP8: tl.constexpr,
    SCHEME: tl.constexpr,
    SIDE: tl.constexpr,
):
    """What [`blocks_of`] gives for a part of whole rows, the macro factor apart, and the largest byte that counts,
    ``[ROWS, 1, 1, 1]``; with ``FP8`` the values, and the bits of the largest."""
    x = _load(x_ptr, rows, start, n_rows, lengths, COLS, SCHEME.BF16)
    if FP8:
        counted = max_bits(x, False, SCHEME.NATIVE)
        byte = counted
    else:
        x, noise = prepared(x, Tile(rows, start, n_rows, lengths.length), signs_ptr, random, SIDE)
        x, byte, counted, _ = blocks_of(x, noise, SIDE.STOCHASTIC, SCHEME)
    return x, byte, counted, tl.max(tl.max(counted, axis=2, keep_dims=True), axis=1, keep_dims=True)


@triton.jit
def _row_elements(z, byte, counted, base, FP8: tl.constexpr, STOCHASTIC: tl.constexpr, SCHEME: tl.constexpr):
    if FP8:
        inverse = tl.where(base == NAN_BYTE, NAN_BITS, (254 - base) << 23).to(tl.float32, bitcast=True)
        return e4m3_bits(z * inverse, SCHEME.NATIVE), 0
    else:
        return elements_of(z, byte, counted, base, STOCHASTIC, SCHEME)


@triton.jit(do_not_specialize=["n_rows", "seed_low", "seed_high"])
def fold_rows_kernel(
    x_ptr,
    out,
    values_ptr,
    counter_ptr,
    signs_ptr,
    n_rows,
    lengths,
    seed_low,
    seed_high,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    ONE_TILE: tl.constexpr,
    STEPS: tl.constexpr,
    FP8: tl.constexpr,
    SCHEME: tl.constexpr,
    SIDE: tl.constexpr,
):
    """Elements ``[n_rows, padded_cols]``, contiguous, and one scale per row of a matrix with any strides. One program
    per ``ROWS`` rows, which it reads once (``ONE_TILE``: they fit) or twice.

    ``FP8`` rounds the values themselves to E4M3, by the smallest power of two that lets nothing clip, as in
    `hf_mxfp4.numerics.formats.e4m3`; a row with NaN or infinity is NaN as a whole. Scales are float32, or their bytes.
    ``STEPS`` is the number of tiles of a row for the interpreter, which in Triton 3.6 cannot loop up to an argument.
    ``values_ptr`` is as of [`fold_groups_kernel`], without macro factors.
    """
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None, None, None]
    top = tl.zeros([ROWS, 1, 1, 1], tl.int32)
    random = Random(0, seed_low, seed_high)
    padded_cols = lengths.padded_cols
    if ONE_TILE:
        z, byte, counted, top = _read_blocks(
            x_ptr, signs_ptr, rows, rows * 0, n_rows, lengths, random, COLS, FP8, SCHEME, SIDE
        )
    else:
        for step in range(STEPS if SCHEME.INTERPRETED else tl.cdiv(padded_cols, COLS)):
            start = tl.cast(step, tl.int64) * COLS
            _, _, _, found = _read_blocks(
                x_ptr, signs_ptr, rows, start, n_rows, lengths, random, COLS, FP8, SCHEME, SIDE
            )
            top = tl.maximum(top, found)
    if FP8:
        # The largest E4M3 value is 1.75 * 2**8.
        base = tl.maximum(((top + 0x1FFFFF) >> 23) - 8, 1)
        base = tl.where(top >= EXPONENT_FIELD, NAN_BYTE, base)
    else:
        base = base_of(top)
    if ONE_TILE:
        elements, n_inexact = _row_elements(z, byte, counted, base, FP8, SIDE.STOCHASTIC, SCHEME)
        store_elements(out.elements, elements, Tile(rows, 0, n_rows, padded_cols))
        if values_ptr is not None:
            at = Tile(rows, rows * 0, n_rows, lengths.n_cols)
            fake_tile(z, values_ptr, at, 1.0, Random(0, 0, 0), None, SCHEME, SIDE)
    else:
        n_inexact = tl.cast(0, tl.int32)
        for step in range(STEPS if SCHEME.INTERPRETED else tl.cdiv(padded_cols, COLS)):
            start = tl.cast(step, tl.int64) * COLS
            z, byte, counted, _ = _read_blocks(
                x_ptr, signs_ptr, rows, start, n_rows, lengths, random, COLS, FP8, SCHEME, SIDE
            )
            elements, found = _row_elements(z, byte, counted, base, FP8, SIDE.STOCHASTIC, SCHEME)
            store_elements(out.elements, elements, Tile(rows, start, n_rows, padded_cols))
            if values_ptr is not None:
                at = Tile(rows, start, n_rows, lengths.n_cols)
                fake_tile(z, values_ptr, at, 1.0, Random(0, 0, 0), None, SCHEME, SIDE)
            n_inexact += found
    scale = base.to(tl.uint8) if out.scale.dtype.element_ty == tl.uint8 else scale_value(base)
    tl.store(out.scale + rows, scale, mask=rows < n_rows)
    if not FP8:
        count_inexact(counter_ptr, n_inexact)
