# SPDX-License-Identifier: Apache-2.0
"""Block mantissas of bfloat16 and codes behind them, two or four elements an instruction, on NVIDIA GPUs: by the rule
``"even"``. The bits are those of `common/macro.py`, whose search this replaces.

Magnitudes x of a block are taken over the power of two below the largest, as float16. A candidate has a factor f in
1, 1.25, 1.5, 1.75 and a scale s, of which ``x / (f * s)`` is less than 7: no code is clipped.

**Rounding.** float16 below its normal numbers, and the first of these, have the spacing that E2M1 has with one digit
less. So the product of x and ``1 / (f * s)``, scaled by 2**-14, has the code in bits 9 to 11 once half of bit 9 is
added. The product errs by less than 2**-11 of itself, or 2**-11 of the scale below that; x, of 8 digits, is off a tie by
2**-8, or 2**-9 of the scale over f. On a tie, which is exact, ``1 / f`` (off by 2**-12) gives the tie's own float16.

**Errors.** The definition adds up squares ``(h - x)**2`` of x less its value ``h = f * s * g`` (g on the grid), cut to
2**-23 of the square of the power of two. What is cut off is that of ``x**2``: a value h that is not zero belongs to an x
that is a multiple of 2**-12 and is one of 2**-6, so that the squares, in units of 2**-24, differ by a multiple of 128.
Hence all candidates compare as the integers ``sum(h * (2 * x - h))``, below 2**24 in units of 2**-17, do: the greater is
the better. They are sums of products of bytes: h over s has 7 bits, and x that matters is ``32 * high + low``.

Only blocks from 1.75 * 2**127 on have other values: there the definition cuts magnitudes to 3 scales without a factor,
and ``9 * s`` to what is finite, which is 8 scales and less by so little that it decides ties alone.
"""

import triton
import triton.language as tl

from ..common.pairs import dot, look_up, multiply, multiply_add, permute, smaller
from .pair_codes import sign_bytes


# Bits of a maximum, bfloat16: of an exponent and digits by which all factors have scale byte 0. Smaller blocks are
# computed as one of those.
_LEAST_TOP = tl.constexpr(0x0144)
INFINITE = tl.constexpr(0x7F80)
# 1.75 * 2**127; and 1.875 * 2**127, from which on a value of the factor 1.5 is cut.
_HUGE = tl.constexpr(0x7F60)
_CUT = tl.constexpr(0x7F70)
# For each factor, what is added to those bits so that they carry into the exponent where the scale is the larger one of
# two: from 7/8 of the factor on, of 7/4; for 1 always, and twice from 7/4 on.
_CARRY_1 = tl.constexpr(0xA0)
_CARRY_2 = tl.constexpr(0x74)
_CARRY_3 = tl.constexpr(0x58)
_CARRY_4 = tl.constexpr(0x3C)
_CARRIES = tl.constexpr(0x3C5874A0)
# Both halves of a word, of float16: one over each factor, times 2**-11; a step of the exponent; 1, 8, -4096, 4096, and
# 1536 + 8 * 4096; 1.7, and 2.
_INVERSE_1 = tl.constexpr(0x10001000)
_INVERSE_2 = tl.constexpr(0x0E660E66)
_INVERSE_3 = tl.constexpr(0x0D550D55)
_INVERSE_4 = tl.constexpr(0x0C920C92)
_STEP = tl.constexpr(0x04000400)
_ONE = tl.constexpr(0x3C003C00)
_EIGHT = tl.constexpr(0x48004800)
_MINUS_4096 = tl.constexpr(-0x13FF1400)
_4096 = tl.constexpr(0x6C006C00)
_OFFSET = tl.constexpr(0x78307830)
_TO_3_SCALES = tl.constexpr(0x3ECD3ECD)
_TWO = tl.constexpr(0x40004000)
# The same of bfloat16: 2**-113.
_TO_FLOAT16 = tl.constexpr(0x07000700)
# For each factor, eight times it times the values of codes 0 to 3, and of 4 to 7; and where the definition cuts these.
_LOW_1 = tl.constexpr(0x0C080400)
_LOW_2 = tl.constexpr(0x0F0A0500)
_LOW_3 = tl.constexpr(0x120C0600)
_LOW_4 = tl.constexpr(0x150E0700)
_HIGH_1 = tl.constexpr(0x30201810)
_HIGH_2 = tl.constexpr(0x3C281E14)
_HIGH_3 = tl.constexpr(0x48302418)
_HIGH_4 = tl.constexpr(0x54382A1C)
_CUT_1 = tl.constexpr(0x18181810)
_CUT_3 = tl.constexpr(0x40302418)


@triton.jit
def _over_power_of_two(m, bits, INTERPRETED: tl.constexpr):
    """Words of magnitudes over the power of two below the largest, of which ``bits`` are given, as float16: exact from
    2**-13 on, and below 2**-12 otherwise. Of blocks with NaN or infinity, anything."""
    inverse = (255 - (tl.maximum(bits, _LEAST_TOP) >> 7)) * 0x00800080
    y = multiply(m, tl.broadcast_to(inverse, m.shape), INTERPRETED)
    # The exponents of the formats differ by 112, the digits by 3.
    return multiply(y, tl.full(y.shape, _TO_FLOAT16, tl.int32), INTERPRETED) << 3


@triton.jit
def over_power_of_two(m, bits, INTERPRETED: tl.constexpr):
    """[`_over_power_of_two`] of eight words."""
    m0, m1, m2, m3, m4, m5, m6, m7 = m
    y0, y1 = _over_power_of_two(m0, bits, INTERPRETED), _over_power_of_two(m1, bits, INTERPRETED)
    y2, y3 = _over_power_of_two(m2, bits, INTERPRETED), _over_power_of_two(m3, bits, INTERPRETED)
    y4, y5 = _over_power_of_two(m4, bits, INTERPRETED), _over_power_of_two(m5, bits, INTERPRETED)
    y6, y7 = _over_power_of_two(m6, bits, INTERPRETED), _over_power_of_two(m7, bits, INTERPRETED)
    return y0, y1, y2, y3, y4, y5, y6, y7


@triton.jit
def _high_and_low(y, INTERPRETED: tl.constexpr):
    """Words whose halves have in their low bytes the integers (unsigned, signed) of which 32 and 1 times add up to 4096
    times a magnitude."""
    one, eight = tl.full(y.shape, _ONE, tl.int32), tl.full(y.shape, _EIGHT, tl.int32)
    # The last digit of numbers from 8 on is 2**-7, of those from 1024 on 1.
    high = multiply_add(y, one, eight, INTERPRETED, F16=True)
    rest = tl.full(y.shape, _MINUS_4096, tl.int32), tl.full(y.shape, _OFFSET, tl.int32)
    rest = multiply_add(high, rest[0], rest[1], INTERPRETED, F16=True)
    return high, multiply_add(y, tl.full(y.shape, _4096, tl.int32), rest, INTERPRETED, F16=True)


@triton.jit
def _integers(y0, y1, INTERPRETED: tl.constexpr):
    """[`_high_and_low`] of two words, their bytes in one: of both low halves, and of both high ones."""
    high0, low0 = _high_and_low(y0, INTERPRETED)
    high1, low1 = _high_and_low(y1, INTERPRETED)
    return permute(high0, high1, 0x6240, INTERPRETED), permute(low0, low1, 0x6240, INTERPRETED)


@triton.jit
def _codes(y0, y1, y2, y3, inverse, INTERPRETED: tl.constexpr):
    """Codes without signs of four words, rounded up on ties, where both neighbours err alike: of words 0, 2, 0 and 2,
    then of 1, 3, 1 and 3, from the lowest on."""
    t0 = multiply(y0, inverse, INTERPRETED, F16=True)
    t1 = multiply(y1, inverse, INTERPRETED, F16=True)
    t2 = multiply(y2, inverse, INTERPRETED, F16=True)
    t3 = multiply(y3, inverse, INTERPRETED, F16=True)
    # Upper bytes are the code and a digit more: half a code is 1.
    codes = permute(t0, t1, 0x7531, INTERPRETED) + permute(t2, t3, 0x7531, INTERPRETED) * 16
    return ((codes + 0x11111111) >> 1) & 0x77777777


@triton.jit
def _add(sums, codes, integers, low, high, INTERPRETED: tl.constexpr):
    """Add to the sums of values times the first and the second integers, and of values squared, those of four codes."""
    values = look_up(low, high, codes, INTERPRETED)
    return (
        dot(values, integers[0], sums[0], False, INTERPRETED),
        dot(values, integers[1], sums[1], True, INTERPRETED),
        dot(values, values, sums[2], False, INTERPRETED),
    )


@triton.jit
def _gain(y, integers, top, CARRY: tl.constexpr, INVERSE: tl.constexpr, low, high, INTERPRETED: tl.constexpr):
    """What a factor leaves less of the squares of a block than no values would, in units of 2**-17 of the square of the
    power of two: ``[.., 1]``, given the bits of the maxima."""
    y0, y1, y2, y3, y4, y5, y6, y7 = y
    # The scale is 2**-3 of the power of two, times two to this.
    up = ((top & 0x7F) + CARRY) >> 7
    inverse = tl.broadcast_to(up * -_STEP + INVERSE, y0.shape)
    low, high = tl.broadcast_to(low, y0.shape), tl.broadcast_to(high, y0.shape)
    zero = tl.zeros_like(y0)
    codes = _codes(y0, y1, y2, y3, inverse, INTERPRETED)
    sums = _add((zero, zero, zero), codes, integers[0], low, high, INTERPRETED)
    sums = _add(sums, codes >> 16, integers[1], low, high, INTERPRETED)
    codes = _codes(y4, y5, y6, y7, inverse, INTERPRETED)
    sums = _add(sums, codes, integers[2], low, high, INTERPRETED)
    sums = _add(sums, codes >> 16, integers[3], low, high, INTERPRETED)
    gain = (sums[0] * 32 + sums[1] - ((sums[2] * 32) << up)) << up
    return tl.sum(gain, axis=2, keep_dims=True)


@triton.jit
def best_mantissas(y, bits, INTERPRETED: tl.constexpr):
    """Two-bit mantissas ``[.., 1]`` of the least squared error, the smallest of several; 0 of blocks with NaN or
    infinity. Of the eight words that each of the two threads of a block has, magnitudes by [`over_power_of_two`]; and
    the bits of the maxima."""
    y0, y1, y2, y3, y4, y5, y6, y7 = y
    integers = (
        _integers(y0, y2, INTERPRETED),
        _integers(y1, y3, INTERPRETED),
        _integers(y4, y6, INTERPRETED),
        _integers(y5, y7, INTERPRETED),
    )
    top = tl.maximum(bits, _LEAST_TOP)
    huge = bits >= _HUGE
    low = tl.full(bits.shape, _LOW_1, tl.int32)
    best = _gain(y, integers, top, _CARRY_1, _INVERSE_1, low, tl.where(huge, _CUT_1, _HIGH_1), INTERPRETED)
    low, high = tl.full(bits.shape, _LOW_2, tl.int32), tl.full(bits.shape, _HIGH_2, tl.int32)
    gain = _gain(y, integers, top, _CARRY_2, _INVERSE_2, low, high, INTERPRETED)
    mantissa = (gain > best).to(tl.int32)
    best = tl.maximum(gain, best)
    low = tl.full(bits.shape, _LOW_3, tl.int32)
    gain = _gain(y, integers, top, _CARRY_3, _INVERSE_3, low, tl.where(huge, _CUT_3, _HIGH_3), INTERPRETED)
    better = gain + (bits >= _CUT).to(tl.int32) > best
    mantissa = tl.where(better, 2, mantissa)
    best = tl.where(better, gain, best)
    low, high = tl.full(bits.shape, _LOW_4, tl.int32), tl.full(bits.shape, _HIGH_4, tl.int32)
    gain = _gain(y, integers, top, _CARRY_4, _INVERSE_4, low, high, INTERPRETED)
    mantissa = tl.where(gain > best, 3, mantissa)
    return tl.where(bits < INFINITE, mantissa, 0)


@triton.jit
def scales(bits, mantissa):
    """Scale bytes but for NaN, and words of ``2**-14`` over factor and scale, times the power of two, as float16; given
    the bits of the maxima."""
    top = tl.maximum(bits, _LEAST_TOP)
    byte = ((top + ((_CARRIES >> (8 * mantissa)) & 0xFF)) >> 7) - 3
    inverse = tl.where(mantissa == 0, _INVERSE_1, tl.where(mantissa == 1, _INVERSE_2, 0))
    inverse = tl.where(mantissa == 2, _INVERSE_3, tl.where(mantissa == 3, _INVERSE_4, inverse))
    return byte, inverse - (byte - (top >> 7) + 3) * _STEP


@triton.jit
def limits(byte):
    """Words of magnitudes over the power of two that none exceeds: of scale byte 253, which holds no more than 3 scales
    in float32, 3.4; of others, anything."""
    return tl.where(byte == 253, _TO_3_SCALES, _TWO)


@triton.jit
def rounded(y, inverse, limit, INTERPRETED: tl.constexpr):
    """Words with the codes of magnitudes, to nearest, ties to even, in bits 9 to 11 of their halves, and less in those
    below. ``limit`` is what [`limits`] gives, or `None`."""
    if limit is not None:
        y = smaller(y, tl.broadcast_to(limit, y.shape), INTERPRETED)
    t = multiply(y, tl.broadcast_to(inverse, y.shape), INTERPRETED, F16=True)
    return t + 0x00FF00FF + ((t >> 9) & 0x00010001)


@triton.jit
def codes_of_rounded(t0, t1, t2, t3, INTERPRETED: tl.constexpr):
    """Words of eight codes without signs of four words of [`rounded`]."""
    even, odd = sign_bytes(t0, t1, t2, t3, INTERPRETED)
    return ((even >> 1) & 0x07070707) | ((odd << 3) & 0x70707070)
