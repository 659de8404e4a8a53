# SPDX-License-Identifier: Apache-2.0
"""What [`fold_tile`] writes of bfloat16, two elements an instruction, on NVIDIA GPUs: rounded to nearest by the rules
that need no search, without macro factors or with static ones.

Eight neighbours in a row are four words of two elements; tiles of words are ``[ROWS, groups, 4 blocks, 4]``. Magnitudes
on the grid are multiplied by the power of two of their block inside of E4M3, and then by the one that makes the
smallest number of E4M3 one of bfloat16 (float16, behind macro factors): there the bits of both formats are the same,
but for their place.
"""

import triton
import triton.language as tl

from ..common.blocks import NAN_BYTE, NO_MACRO, scale_value
from ..common.pairs import (
    eight_magnitudes,
    larger,
    largest,
    maxima_of_blocks,
    multiply,
    multiply_add,
    permute,
    smaller,
    words_of_columns,
    words_of_rows,
)
from ..quantization.pair_codes import (
    EXPONENTS,
    EXPONENTS_16,
    LIMIT,
    as_float16,
    factor_words,
    inverse_of_factor,
    scaled,
)
from ..quantization.pairs_both import store_blocks
from .tile import HIGHEST, LOWEST, base_of


# Both halves of a word, of bfloat16: 1, 6, 64 and -64, of float16 -1 and 512.
_ONE = tl.constexpr(0x3F803F80)
_SIX = tl.constexpr(0x40C040C0)
_ANCHOR = tl.constexpr(0x42804280)
_MINUS_ANCHOR = tl.constexpr(-0x3D7F3D80)
_MINUS_ONE_16 = tl.constexpr(-0x43FF4400)
_ANCHOR_16 = tl.constexpr(0x60006000)
# The smallest number of E4M3 over that of the format: 2**-120, and 2**-8 for float16.
_TO_BITS = tl.constexpr(0x03800380)
_TO_BITS_16 = tl.constexpr(0x1C001C00)
# The power of two at which only zeros are left of a block.
_ALL_ZERO = tl.constexpr(-14)
# 2**-129 as float32 bits: up to there maxima are rounded to zero at scale byte 0.
_ROUNDED_TO_ZERO = tl.constexpr(0x00100000)
_SIGNS = tl.constexpr(-0x7F7F7F80)


@triton.jit
def _on_grid(m, inverse, factor, SCHEME: tl.constexpr):
    """Magnitudes over their scale, times the factor, on the grid; in float16 where there is one."""
    # As in quantization/pair_codes.py: the values of byte 253, and NaN that is to become zero.
    y = smaller(m, tl.full(m.shape, LIMIT, tl.int32), SCHEME.INTERPRETED)
    y = multiply(y, inverse, SCHEME.INTERPRETED)
    if SCHEME.SEARCH == NO_MACRO:
        if SCHEME.CARRY == 0:
            y = smaller(y, tl.full(m.shape, _SIX, tl.int32), SCHEME.INTERPRETED)
        binade = larger(y & EXPONENTS, tl.full(m.shape, _ONE, tl.int32), SCHEME.INTERPRETED)
        y = multiply_add(binade, tl.full(m.shape, _ANCHOR, tl.int32), y, SCHEME.INTERPRETED)
        y = multiply_add(binade, tl.full(m.shape, _MINUS_ANCHOR, tl.int32), y, SCHEME.INTERPRETED)
    else:
        y = as_float16(y, SCHEME.INTERPRETED)
        product = multiply(y, factor + 0x24002400, SCHEME.INTERPRETED, F16=True)
        binade = larger(product & EXPONENTS_16, tl.full(m.shape, _ANCHOR_16, tl.int32), SCHEME.INTERPRETED)
        y = multiply_add(y, factor, binade, SCHEME.INTERPRETED, F16=True)
        y = multiply_add(binade, tl.full(m.shape, _MINUS_ONE_16, tl.int32), y, SCHEME.INTERPRETED, F16=True)
    return y


@triton.jit
def _in_e4m3(y, power, rounder, less, SCHEME: tl.constexpr):
    """E4M3 bits, in the lower 15 of both halves those of bits 8 to 14, of magnitudes ``y`` on the grid times a power.
    Adding ``rounder`` leaves the digits that a subnormal number has; ``less`` takes it away again, as it is after the
    multiplication that brings the bits about."""
    F16: tl.constexpr = SCHEME.SEARCH != NO_MACRO
    to_bits = tl.full(y.shape, _TO_BITS_16 if F16 else _TO_BITS, tl.int32)
    y = multiply_add(y, power, rounder, SCHEME.INTERPRETED, F16)
    y = multiply_add(y, to_bits, less, SCHEME.INTERPRETED, F16)
    return y << (1 if F16 else 4)


@triton.jit
def _four(w0, w1, m0, m1, inverse, factor, power, rounder, less, SCHEME: tl.constexpr):
    """Words of four E4M3 elements."""
    y0, y1 = _on_grid(m0, inverse, factor, SCHEME), _on_grid(m1, inverse, factor, SCHEME)
    z0, z1 = _in_e4m3(y0, power, rounder, less, SCHEME), _in_e4m3(y1, power, rounder, less, SCHEME)
    elements = permute(z0, z1, 0x7531, SCHEME.INTERPRETED) & 0x7F7F7F7F
    # Adding 127 carries a one into the bit of the sign where what is on the grid is not zero.
    nonzero = permute(y0, y1, 0x7531, SCHEME.INTERPRETED) + 0x7F7F7F7F
    return elements | (permute(w0, w1, 0x7531, SCHEME.INTERPRETED) & nonzero & _SIGNS)


@triton.jit
def _blocks(words, SCHEME: tl.constexpr):
    """Of a tile of [`words_of_rows`]: magnitudes, scale bytes of blocks, those of the blocks that count (neither zero
    nor NaN; -1 of the others), one over the scale, and macro bytes."""
    m = eight_magnitudes(words, SCHEME.INTERPRETED)
    maxima = maxima_of_blocks(m, SCHEME.INTERPRETED)
    byte, inverse, m8, bits = scaled(maxima << 16, largest(maxima, 2, SCHEME.INTERPRETED) << 16, SCHEME)
    counted = tl.where((bits > _ROUNDED_TO_ZERO) & (byte != NAN_BYTE), byte, -1)
    return m, byte, counted, inverse, m8


@triton.jit
def _elements(words, m, byte, counted, base, inverse, m8, SCHEME: tl.constexpr):
    """Words of four elements ``[ROWS, columns / 4]`` of what [`_blocks`] gives, in groups with scale bytes ``base``,
    and, per block, whether it was rounded."""
    F16: tl.constexpr = SCHEME.SEARCH != NO_MACRO
    w0, w1, w2, w3, w4, w5, w6, w7 = words
    m0, m1, m2, m3, m4, m5, m6, m7 = m
    is_nan = byte == NAN_BYTE
    shift = byte - base
    is_small = shift < LOWEST
    shift = tl.minimum(tl.maximum(shift, _ALL_ZERO), HIGHEST)
    if F16:
        power = (shift + 15) * 0x04000400
        rounder = tl.where(is_small, 0x40004000, 0)
        less = tl.where(is_nan, 0x3F803F80, tl.where(is_small, -0x5FFF6000, 0))
    else:
        power = (shift + 127) * 0x00800080
        rounder = tl.where(is_small, 0x3E803E80, 0)
        less = tl.where(is_nan, 0x07F007F0, tl.where(is_small, -0x7D7F7D80, 0))
    factor = tl.broadcast_to(factor_words(m8), w0.shape)
    inverse, power = tl.broadcast_to(inverse, w0.shape), tl.broadcast_to(power, w0.shape)
    rounder, less = tl.broadcast_to(rounder, w0.shape), tl.broadcast_to(less, w0.shape)
    e0 = _four(w0, w1, m0, m1, inverse, factor, power, rounder, less, SCHEME)
    e1 = _four(w2, w3, m2, m3, inverse, factor, power, rounder, less, SCHEME)
    e2 = _four(w4, w5, m4, m5, inverse, factor, power, rounder, less, SCHEME)
    e3 = _four(w6, w7, m6, m7, inverse, factor, power, rounder, less, SCHEME)
    elements = tl.reshape(tl.join(tl.join(e0, e2), tl.join(e1, e3)), [w0.shape[0], w0.shape[1] * 32])
    return elements, ((counted >= 0) & is_small).to(tl.int32)


@triton.jit
def _fold(words, elements_ptr, scale_ptr, row_bytes, scale_stride, n_rows, n_cols, SCHEME: tl.constexpr):
    """Write what [`fold_tile`] writes of a tile of [`words_of_rows`]: elements as words of four, of rows that are
    ``row_bytes`` apart, and scales of groups that are ``scale_stride`` apart; ``n_cols`` columns, multiples of 128, and
    ``n_rows`` are left. Returns, per block, whether it was rounded, and the bytes of those that count."""
    m, byte, counted, inverse, m8 = _blocks(words, SCHEME)
    base = base_of(tl.max(counted, axis=2, keep_dims=True))
    elements, found = _elements(words, m, byte, counted, base, inverse, m8, SCHEME)
    rows, at = tl.arange(0, elements.shape[0])[:, None], tl.arange(0, elements.shape[1])[None, :]
    mask = (rows < n_rows) & (at < n_cols >> 2)
    tl.store(elements_ptr + rows * (row_bytes >> 2) + at, elements, mask=mask)
    scale = scale_value(base)
    if SCHEME.SEARCH != NO_MACRO:
        m8 = tl.max(m8, axis=2, keep_dims=True)
        # At least 2**-125, so that nothing is lost by the multiplication.
        scale = scale * inverse_of_factor(m8, SCHEME.INTERPRETED)
    rows, groups = tl.arange(0, base.shape[0])[:, None], tl.arange(0, base.shape[1])[None, :]
    scale = tl.reshape(scale, [base.shape[0], base.shape[1]])
    tl.store(scale_ptr + groups * scale_stride + rows, scale, mask=(rows < n_rows) & (groups < n_cols >> 7))
    return found, counted


@triton.jit
def fold_rows(
    x_ptr,
    out,
    row_start,
    col_start,
    n_rows,
    n_cols,
    row_stride,
    padded_cols,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    SCHEME: tl.constexpr,
):
    """[`_fold`] of ``ROWS x COLS`` elements of ``x[n_rows, n_cols]``, from a place (int64) on, into rows of
    ``padded_cols``."""
    rows_left, cols_left = (n_rows - row_start).to(tl.int32), (n_cols - col_start).to(tl.int32)
    start = x_ptr + row_start * row_stride + col_start
    words = words_of_rows(start, row_stride, rows_left, cols_left, ROWS, COLS)
    elements = out.elements + row_start * (padded_cols >> 2) + (col_start >> 2)
    scale = out.scale + (col_start >> 7) * n_rows + row_start
    left = (padded_cols - col_start).to(tl.int32)
    return _fold(words, elements, scale, padded_cols, n_rows, rows_left, left, SCHEME)


@triton.jit
def counted_of_rows(x_ptr, row_start, col_start, n_rows, n_cols, row_stride, ROWS: tl.constexpr, SCHEME: tl.constexpr):
    """The scale bytes of those blocks that count, of ``ROWS`` x 128 elements from a place (int64) on."""
    rows_left, cols_left = (n_rows - row_start).to(tl.int32), (n_cols - col_start).to(tl.int32)
    start = x_ptr + row_start * row_stride + col_start
    _, _, counted, _, _ = _blocks(words_of_rows(start, row_stride, rows_left, cols_left, ROWS, 128), SCHEME)
    return counted


@triton.jit
def codes_of_rows(
    x_ptr, out, row_start, col_start, n_rows, n_cols, row_stride, ROWS: tl.constexpr, SCHEME: tl.constexpr
):
    """[`counted_of_rows`], of whole blocks whose codes, as int32 words of eight, and scale bytes are written."""
    rows_left, cols_left = (n_rows - row_start).to(tl.int32), (n_cols - col_start).to(tl.int32)
    start = x_ptr + row_start * row_stride + col_start
    words = words_of_rows(start, row_stride, rows_left, cols_left, ROWS, 128)
    m, byte, counted, inverse, m8 = _blocks(words, SCHEME)
    store_blocks(words, m, byte, inverse, m8, out, row_start, col_start, n_rows, n_cols, SCHEME)
    return counted


@triton.jit
def elements_of_rows(
    x_ptr, base, row_start, col_start, n_rows, n_cols, row_stride, ROWS: tl.constexpr, SCHEME: tl.constexpr
):
    """Elements ``[ROWS, 128]`` (bytes) from a place (int64) on, quantized along the rows, whose blocks have the scale
    bytes ``base``; and, per block, whether it was rounded."""
    rows_left, cols_left = (n_rows - row_start).to(tl.int32), (n_cols - col_start).to(tl.int32)
    start = x_ptr + row_start * row_stride + col_start
    words = words_of_rows(start, row_stride, rows_left, cols_left, ROWS, 128)
    m, byte, counted, inverse, m8 = _blocks(words, SCHEME)
    e, found = _elements(words, m, byte, counted, base, inverse, m8, SCHEME)
    even = tl.join(e.to(tl.uint8), (e >> 16).to(tl.uint8))
    odd = tl.join((e >> 8).to(tl.uint8), (e >> 24).to(tl.uint8))
    return tl.reshape(tl.join(even, odd), [ROWS, 128]), found


@triton.jit
def fold_columns(
    x_ptr,
    out,
    row_start,
    col_start,
    n_rows,
    n_cols,
    row_stride,
    padded_rows,
    COLS: tl.constexpr,
    SCHEME: tl.constexpr,
):
    """The same of 128 x ``COLS`` elements along the columns, into rows of ``padded_rows``."""
    rows_left, cols_left = (n_rows - row_start).to(tl.int32), (n_cols - col_start).to(tl.int32)
    start = x_ptr + row_start * row_stride + col_start
    words = words_of_columns(start, row_stride, rows_left, cols_left, COLS)
    elements = out.elements + col_start * (padded_rows >> 2) + (row_start >> 2)
    scale = out.scale + (row_start >> 7) * n_cols + col_start
    left = (padded_rows - row_start).to(tl.int32)
    return _fold(words, elements, scale, padded_rows, n_cols, cols_left, left, SCHEME)
