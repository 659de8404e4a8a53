# SPDX-License-Identifier: Apache-2.0
"""The kernel along rows: one read of a matrix, one write of its MXFP4 values, of codes and scale bytes, or of both."""

import triton
import triton.language as tl

from ..common.arguments import Random, Tile
from ..common.tile import fake_tile, load, offsets_in_tile, pack_tile, rotated, tile_start


@triton.jit(do_not_specialize=["n_rows", "col_tiles", "first_row", "seed_low", "seed_high"])
def quantize_kernel(
    x_ptr,
    out,
    packed,
    macro,
    signs_ptr,
    n_rows,
    lengths,
    col_tiles,
    first_row,
    seed_low,
    seed_high,
    alpha,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    SCHEME: tl.constexpr,
    SIDE: tl.constexpr,
):
    """Values of ``x[n_rows, n_read]`` (unit stride along columns) to ``out[n_rows, n_cols]`` (contiguous), or what
    [`pack_tile`] writes to ``packed``, with ``row_bytes`` in the lengths; or both, of what has no residual. `None` is
    there for what is not, as ``alpha`` without values. One program per tile, of which ``col_tiles`` lie side by side;
    columns from ``n_read`` on are zero before a rotation. ``first_row`` is the first one's number for random numbers;
    ``macro`` is as of [`fake_tile`]."""
    row_start, col_start = tile_start(col_tiles, ROWS, COLS)
    at = Tile(row_start + tl.arange(0, ROWS)[:, None, None, None], col_start, n_rows, lengths.n_cols)
    offsets = offsets_in_tile(COLS, SCHEME.MACRO, 32, 32)
    x = load(x_ptr, at, offsets, lengths.n_read, lengths.x_row_stride, SCHEME.BF16)
    x = rotated(x, col_start, lengths.n_cols, signs_ptr, SIDE)
    random = Random(first_row, seed_low, seed_high)
    if out is None:
        pack_tile(x, packed, at, lengths.row_bytes, random, SCHEME, SIDE)
    else:
        fake_tile(x, out, at, alpha, random, macro, SCHEME, SIDE, packed, lengths.row_bytes)
