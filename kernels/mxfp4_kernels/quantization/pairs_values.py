# SPDX-License-Identifier: Apache-2.0
"""What `quantization/pairs.py` writes without a residual, and the values of these codes beside it, from one read.

A tile is in four parts ``[macro blocks, blocks, 4]`` of words of two elements, as one half of a tile is there. Values
are magnitudes on the grid times the scale, which bfloat16 holds, and at last the signs; with macro factors they are
divided by these in float32, as [`fake_tile`] does it: one product with the inverse, which need not be exact.
"""

import triton
import triton.language as tl

from ..common.blocks import NO_MACRO, scale_value
from ..common.pairs import bfloat16_words, floats, four_magnitudes, largest, largest_of_four, multiply
from .pair_codes import (
    UNIT,
    factor_words,
    grid_values,
    inverse_of_factor,
    magnitude_codes,
    rounded,
    scaled,
    sign_bytes,
    signed,
)
from .pairs import load_words, numbers, store, store_macro


# Both halves of a word: 32 and the bit of the sign; and what carries a one into that bit but from zero.
_ONE_OVER_UNIT = tl.constexpr(0x42004200)
_SIGNS = tl.constexpr(-0x7FFF8000)
_CARRY = tl.constexpr(0x7FFF7FFF)


@triton.jit
def _values(w, steps, binade, scale, inverse, SCHEME: tl.constexpr):
    """Words of two values: of words of elements, what [`rounded`] gives, the scales, as words of two bfloat16 or, with
    macro factors, float32 over the factors."""
    y = grid_values(steps, binade, SCHEME)
    if SCHEME.SEARCH == NO_MACRO:
        y = multiply(y, tl.full(y.shape, _ONE_OVER_UNIT, tl.int32), SCHEME.INTERPRETED)
        # NaN where the scale is infinite: there all magnitudes are zero.
        y = multiply(y, scale, SCHEME.INTERPRETED)
    else:
        low, high = floats(y, True, SCHEME.INTERPRETED)
        y = bfloat16_words(low * inverse, high * inverse, SCHEME.INTERPRETED)
    return y | (w & (y + _CARRY) & _SIGNS)


@triton.jit(do_not_specialize=["n_blocks"])
def pairs_values_kernel(x_ptr, out, values_ptr, n_blocks, BLOCKS: tl.constexpr, SCHEME: tl.constexpr):
    """Codes (as int32 words of eight), scale bytes and macro bytes of ``n_blocks`` adjacent blocks, whole macro blocks,
    and their values, both read and written as int32 words of two elements. One program for every ``BLOCKS``."""
    INTERPRETED: tl.constexpr = SCHEME.INTERPRETED
    EACH: tl.constexpr = SCHEME.MACRO // 32
    first = tl.program_id(0).to(tl.int64) * BLOCKS
    left = tl.minimum(n_blocks - first, BLOCKS).to(tl.int32)
    w0, w1, w2, w3 = load_words(x_ptr + first * 16, left * 16, BLOCKS // EACH, EACH)
    m0, m1, m2, m3 = four_magnitudes((w0, w1, w2, w3), INTERPRETED)
    maxima = largest(largest_of_four((m0, m1, m2, m3), INTERPRETED), 2, INTERPRETED)
    maxima = tl.maximum(maxima & 0xFFFF, (maxima >> 16) & 0xFFFF)
    byte, inverse, m8, _ = scaled(maxima << 16, tl.max(maxima, axis=1, keep_dims=True) << 16, SCHEME)
    scale = tl.maximum(byte << 7, 0x40) * 0x00010001
    over_factor = scale_value(byte)
    if SCHEME.SEARCH == NO_MACRO:
        inverse = multiply(inverse, tl.full(inverse.shape, UNIT, tl.int32), INTERPRETED)
    else:
        over_factor = over_factor * inverse_of_factor(m8, INTERPRETED)
    inverse, factor = tl.broadcast_to(inverse, w0.shape), tl.broadcast_to(factor_words(m8), w0.shape)
    scale, over_factor = tl.broadcast_to(scale, w0.shape), tl.broadcast_to(over_factor, w0.shape)
    s0, b0 = rounded(m0, inverse, factor, SCHEME)
    s1, b1 = rounded(m1, inverse, factor, SCHEME)
    s2, b2 = rounded(m2, inverse, factor, SCHEME)
    s3, b3 = rounded(m3, inverse, factor, SCHEME)
    even, odd = sign_bytes(w0, w1, w2, w3, INTERPRETED)
    codes = signed(magnitude_codes(s0, s1, s2, s3, SCHEME), even, odd)
    store(out.codes, out.scale, first, codes, byte, left)
    if SCHEME.SEARCH != NO_MACRO:
        store_macro(out.macro, first, m8, left, SCHEME.MACRO)
    y0, y1 = _values(w0, s0, b0, scale, over_factor, SCHEME), _values(w1, s1, b1, scale, over_factor, SCHEME)
    y2, y3 = _values(w2, s2, b2, scale, over_factor, SCHEME), _values(w3, s3, b3, scale, over_factor, SCHEME)
    values = tl.reshape(tl.join(tl.join(y0, y2), tl.join(y1, y3)), [BLOCKS // EACH, EACH, 4, 4])
    offsets = numbers(BLOCKS // EACH, EACH)[:, :, :, None] * 4 + tl.arange(0, 4)[None, None, None, :]
    tl.store(values_ptr + first * 16 + offsets, values, mask=offsets < left * 16)
