# SPDX-License-Identifier: Apache-2.0
"""What `quantization/pairs.py` writes, along the columns of a matrix, or along rows and columns from one read of it.

As in `quantization/both.py` a program owns 128 x 128 elements and goes over them in strips; elements of a column are
moved beside each other in their narrow type, and are two in a word from there on.
"""

import triton
import triton.language as tl

from ..common.blocks import NO_MACRO
from ..common.pairs import eight_magnitudes, largest, maxima_of_blocks, multiply, words_of_columns, words_of_rows
from .pair_codes import UNIT, factor_words, magnitude_codes, rounded, scaled, sign_bytes, signed


@triton.jit
def _codes(w0, w1, w2, w3, m0, m1, m2, m3, inverse, factor, SCHEME: tl.constexpr):
    """A word of eight codes of every four words, given their magnitudes too."""
    s0, _ = rounded(m0, inverse, factor, SCHEME)
    s1, _ = rounded(m1, inverse, factor, SCHEME)
    s2, _ = rounded(m2, inverse, factor, SCHEME)
    s3, _ = rounded(m3, inverse, factor, SCHEME)
    even, odd = sign_bytes(w0, w1, w2, w3, SCHEME.INTERPRETED)
    return signed(magnitude_codes(s0, s1, s2, s3, SCHEME), even, odd)


@triton.jit
def _quantize(words, out, row_start, col_start, n_rows, n_cols, SCHEME: tl.constexpr):
    """[`store_blocks`] of a tile of [`words_of_rows`]."""
    m = eight_magnitudes(words, SCHEME.INTERPRETED)
    maxima = maxima_of_blocks(m, SCHEME.INTERPRETED)
    byte, inverse, m8, _ = scaled(maxima << 16, largest(maxima, 2, SCHEME.INTERPRETED) << 16, SCHEME)
    store_blocks(words, m, byte, inverse, m8, out, row_start, col_start, n_rows, n_cols, SCHEME)


@triton.jit
def store_blocks(words, m, byte, inverse, m8, out, row_start, col_start, n_rows, n_cols, SCHEME: tl.constexpr):
    """Write codes, scale bytes and macro bytes of a tile of [`words_of_rows`] with magnitudes ``m``, of which
    [`scaled`] has given the others: 128 columns of a matrix ``[n_rows, n_cols]`` from a place (int64) on."""
    INTERPRETED: tl.constexpr = SCHEME.INTERPRETED
    w0, w1, w2, w3, w4, w5, w6, w7 = words
    m0, m1, m2, m3, m4, m5, m6, m7 = m
    if SCHEME.SEARCH == NO_MACRO:
        inverse = multiply(inverse, tl.full(inverse.shape, UNIT, tl.int32), INTERPRETED)
    inverse, factor = tl.broadcast_to(inverse, w0.shape), tl.broadcast_to(factor_words(m8), w0.shape)
    low = _codes(w0, w1, w2, w3, m0, m1, m2, m3, inverse, factor, SCHEME)
    high = _codes(w4, w5, w6, w7, m4, m5, m6, m7, inverse, factor, SCHEME)
    ROWS: tl.constexpr = w0.shape[0]
    rows_left, cols_left = (n_rows - row_start).to(tl.int32), (n_cols - col_start).to(tl.int32)
    rows, at = tl.arange(0, ROWS)[:, None], tl.arange(0, 16)[None, :]
    codes = tl.reshape(tl.join(low, high), [ROWS, 16])
    to = out.codes + row_start * (n_cols >> 3) + (col_start >> 3) + rows * (n_cols >> 3) + at
    tl.store(to, codes, mask=(rows < rows_left) & (at < cols_left >> 3))
    blocks = tl.arange(0, 4)[None, :]
    to = out.scale + row_start * (n_cols >> 5) + (col_start >> 5) + rows * (n_cols >> 5) + blocks
    byte = tl.reshape(byte, [ROWS, 4]).to(tl.uint8)
    tl.store(to, byte, mask=(rows < rows_left) & (blocks < cols_left >> 5))
    if SCHEME.SEARCH != NO_MACRO:
        to = out.macro + row_start * (n_cols >> 7) + (col_start >> 7) + rows * (n_cols >> 7)
        m8 = tl.reshape(tl.max(m8, axis=2, keep_dims=True), [ROWS, 1]).to(tl.uint8)
        tl.store(to, m8, mask=(rows < rows_left) & (cols_left > 0))


@triton.jit(do_not_specialize=["col_tiles"])
def quantize_pairs_both_kernel(
    x_ptr,
    out,
    out_t,
    n_rows,
    n_cols,
    row_stride,
    col_tiles,
    STRIP: tl.constexpr,
    BY_ROWS: tl.constexpr,
    SCHEME: tl.constexpr,
):
    """Codes (as int32 words of eight), scale bytes and macro bytes of ``x[n_rows, n_cols]`` (rows of whole words, of
    ``row_stride`` elements), if ``BY_ROWS``, and of its transpose. Both lengths are multiples of what belongs together:
    32, or macro blocks of 128."""
    # Without rows a tile is a strip of columns.
    WIDTH: tl.constexpr = 128 if BY_ROWS else STRIP
    pid = tl.program_id(0)
    row_start = (pid // col_tiles).to(tl.int64) * 128
    col_start = (pid % col_tiles).to(tl.int64) * WIDTH
    for strip in range(WIDTH // STRIP):
        start = col_start + strip * STRIP
        rows_left, cols_left = (n_rows - row_start).to(tl.int32), (n_cols - start).to(tl.int32)
        words = words_of_columns(x_ptr + row_start * row_stride + start, row_stride, rows_left, cols_left, STRIP)
        _quantize(words, out_t, start, row_start, n_cols, n_rows, SCHEME)
    if BY_ROWS:
        for strip in range(128 // STRIP):
            start = row_start + strip * STRIP
            rows_left, cols_left = (n_rows - start).to(tl.int32), (n_cols - col_start).to(tl.int32)
            words = words_of_rows(x_ptr + start * row_stride + col_start, row_stride, rows_left, cols_left, STRIP, 128)
            _quantize(words, out, start, col_start, n_rows, n_cols, SCHEME)
