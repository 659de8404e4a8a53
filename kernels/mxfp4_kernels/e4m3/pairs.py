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
from ..common.pairs import larger, largest, magnitudes, multiply, multiply_add, permute, smaller
from ..quantization.pair_codes import (
    EXPONENTS,
    EXPONENTS_16,
    LIMIT,
    as_float16,
    factor_words,
    inverse_of_factor,
    scaled,
)
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
def _half_of_words(x_ptr, row_stride, n_rows, n_cols, shape: tl.constexpr, HALF: tl.constexpr):
    """Words 0 to 3 of every eight (``HALF`` 0), or 4 to 7 (1), of a tile of rows that start with a word."""
    eighths = tl.arange(0, shape[1] * 8)[None, :, None]
    offsets = eighths * 8 + 4 * HALF + tl.arange(0, 4)[None, None, :]
    rows = tl.arange(0, shape[0])[:, None, None]
    pointers = x_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + rows * (row_stride >> 1).to(tl.int32) + offsets
    words = tl.load(pointers, mask=(rows < n_rows) & (offsets < n_cols >> 1), other=0)
    even, odd = tl.split(tl.reshape(words, [shape[0], shape[1], 4, 2, 2, 2]))
    w0, w2 = tl.split(even)
    w1, w3 = tl.split(odd)
    return w0, w1, w2, w3


@triton.jit
def _words_of_rows(x_ptr, row_stride, n_rows, n_cols, ROWS: tl.constexpr, COLS: tl.constexpr):
    """The eight words of every sixteen neighbours in a tile of rows that start with a word, zero from ``n_rows`` and
    ``n_cols`` (even) on."""
    w0, w1, w2, w3 = _half_of_words(x_ptr, row_stride, n_rows, n_cols, [ROWS, COLS // 128], 0)
    w4, w5, w6, w7 = _half_of_words(x_ptr, row_stride, n_rows, n_cols, [ROWS, COLS // 128], 1)
    return w0, w1, w2, w3, w4, w5, w6, w7


@triton.jit
def _words_of_columns(x_ptr, row_stride, n_rows, n_cols, COLS: tl.constexpr):
    """The same of a tile of 128 rows, in its columns."""
    rows, cols = tl.arange(0, 128)[:, None], tl.arange(0, COLS)[None, :]
    x = tl.load(x_ptr + rows * row_stride + cols, mask=(rows < n_rows) & (cols < n_cols), other=0)
    # Taking them apart makes the compiler move neighbours in a column into one thread, in their narrow type.
    low, high = tl.split(tl.reshape(tl.trans(x), [COLS, 1, 4, 2, 2, 2, 2, 2]))
    even, odd = tl.split((low.to(tl.int32) & 0xFFFF) | (high.to(tl.int32) << 16))
    w04, w26 = tl.split(even)
    w15, w37 = tl.split(odd)
    w0, w4 = tl.split(w04)
    w1, w5 = tl.split(w15)
    w2, w6 = tl.split(w26)
    w3, w7 = tl.split(w37)
    return w0, w1, w2, w3, w4, w5, w6, w7


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
def _largest_of(w0, w1, w2, w3, INTERPRETED: tl.constexpr):
    return larger(larger(w0, w1, INTERPRETED), larger(w2, w3, INTERPRETED), INTERPRETED)


@triton.jit
def _fold(words, elements_ptr, scale_ptr, row_bytes, scale_stride, n_rows, n_cols, SCHEME: tl.constexpr):
    """Write what [`fold_tile`] writes of a tile of [`_words_of_rows`]: elements as words of four, of rows that are
    ``row_bytes`` apart, and scales of groups that are ``scale_stride`` apart; ``n_cols`` columns, multiples of 128, and
    ``n_rows`` are left. Returns, per block, whether it was rounded."""
    INTERPRETED: tl.constexpr = SCHEME.INTERPRETED
    F16: tl.constexpr = SCHEME.SEARCH != NO_MACRO
    w0, w1, w2, w3, w4, w5, w6, w7 = words
    m0, m1 = magnitudes(w0, INTERPRETED), magnitudes(w1, INTERPRETED)
    m2, m3 = magnitudes(w2, INTERPRETED), magnitudes(w3, INTERPRETED)
    m4, m5 = magnitudes(w4, INTERPRETED), magnitudes(w5, INTERPRETED)
    m6, m7 = magnitudes(w6, INTERPRETED), magnitudes(w7, INTERPRETED)
    maxima = larger(_largest_of(m0, m1, m2, m3, INTERPRETED), _largest_of(m4, m5, m6, m7, INTERPRETED), INTERPRETED)
    maxima = larger(maxima, permute(maxima, maxima, 0x1032, INTERPRETED), INTERPRETED)
    maxima = largest(maxima, 3, INTERPRETED)
    byte, inverse, m8, bits = scaled(maxima << 16, largest(maxima, 2, INTERPRETED) << 16, SCHEME)
    is_nan = byte == NAN_BYTE
    counted = tl.where((bits > _ROUNDED_TO_ZERO) & (byte != NAN_BYTE), byte, -1)
    base = base_of(tl.max(counted, axis=2, keep_dims=True))
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
    rows, at = tl.arange(0, elements.shape[0])[:, None], tl.arange(0, elements.shape[1])[None, :]
    mask = (rows < n_rows) & (at < n_cols >> 2)
    tl.store(elements_ptr + rows * (row_bytes >> 2) + at, elements, mask=mask)
    scale = scale_value(base)
    if F16:
        m8 = tl.max(m8, axis=2, keep_dims=True)
        # At least 2**-125, so that nothing is lost by the multiplication.
        scale = scale * inverse_of_factor(m8, INTERPRETED)
    rows, groups = tl.arange(0, w0.shape[0])[:, None], tl.arange(0, w0.shape[1])[None, :]
    scale = tl.reshape(scale, [w0.shape[0], w0.shape[1]])
    tl.store(scale_ptr + groups * scale_stride + rows, scale, mask=(rows < n_rows) & (groups < n_cols >> 7))
    return ((counted >= 0) & is_small).to(tl.int32)


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
    words = _words_of_rows(start, row_stride, rows_left, cols_left, ROWS, COLS)
    elements = out.elements + row_start * (padded_cols >> 2) + (col_start >> 2)
    scale = out.scale + (col_start >> 7) * n_rows + row_start
    left = (padded_cols - col_start).to(tl.int32)
    return _fold(words, elements, scale, padded_cols, n_rows, rows_left, left, SCHEME)


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
    words = _words_of_columns(start, row_stride, rows_left, cols_left, COLS)
    elements = out.elements + col_start * (padded_rows >> 2) + (row_start >> 2)
    scale = out.scale + (row_start >> 7) * n_cols + col_start
    left = (padded_rows - row_start).to(tl.int32)
    return _fold(words, elements, scale, padded_rows, n_cols, cols_left, left, SCHEME)
