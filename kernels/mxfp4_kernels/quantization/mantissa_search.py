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
# 1.75 * 2**127; and 1.875 * 2**127, beyond which a value of the factor 1.5 is cut. On that tie its neighbours do not err
# alike, hence in the search it is one over a little more than 1.5, which rounds ties down.
_HUGE = tl.constexpr(0x7F60)
_LARGEST_UNCUT = tl.constexpr(0x7F70)
_INVERSE_OF_MORE = tl.constexpr(0x0D540D54)
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
# The same of bfloat16: 2**-13, and the largest number. What brings eight times its bits to those of half the number as float16: 15 - 127 - 1 to
# the exponents of both halves.
_LEAST = tl.constexpr(0x39003900)
_LARGEST = tl.constexpr(0x7F7F7F7F)
_TO_FLOAT16 = tl.constexpr(0x3BFE3C00)
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
def _over_power_of_two(m, inverse, INTERPRETED: tl.constexpr):
    """Words of magnitudes times ``inverse``, half of that as float16."""
    # What is 2**-4 or more stays as it is: there 2**-13 is less than half of the last digit.
    if INTERPRETED:
        # Any number for infinity and NaN, of which numpy warns.
        m = smaller(m, tl.full(m.shape, _LARGEST, tl.int32), INTERPRETED)
    y = multiply_add(m, inverse, tl.full(m.shape, _LEAST, tl.int32), INTERPRETED)
    # The exponents of the formats differ by 112, the digits by 3.
    return y * 8 + _TO_FLOAT16


@triton.jit
def over_power_of_two(m, bits, INTERPRETED: tl.constexpr):
    """Four words of magnitudes over the power of two below the largest, of which ``bits`` are given, as float16: exact
    from 2**-5 on, otherwise less than that. Of blocks with NaN or infinity, anything."""
    # Twice that power has a normal inverse in bfloat16 always.
    inverse = (255 - (tl.maximum(bits, _LEAST_TOP) >> 7)) * 0x00800080
    y0, y1 = _over_power_of_two(m[0], inverse, INTERPRETED), _over_power_of_two(m[1], inverse, INTERPRETED)
    y2, y3 = _over_power_of_two(m[2], inverse, INTERPRETED), _over_power_of_two(m[3], inverse, INTERPRETED)
    return y0, y1, y2, y3


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
def _integers(y, INTERPRETED: tl.constexpr):
    """[`_high_and_low`] of four words, their bytes in two: of the low halves of words 0 and 2 and of their high ones, and
    of words 1 and 3."""
    high0, low0 = _high_and_low(y[0], INTERPRETED)
    high1, low1 = _high_and_low(y[1], INTERPRETED)
    high2, low2 = _high_and_low(y[2], INTERPRETED)
    high3, low3 = _high_and_low(y[3], INTERPRETED)
    high0, low0 = permute(high0, high2, 0x6240, INTERPRETED), permute(low0, low2, 0x6240, INTERPRETED)
    high1, low1 = permute(high1, high3, 0x6240, INTERPRETED), permute(low1, low3, 0x6240, INTERPRETED)
    return high0, low0, high1, low1


@triton.jit
def _codes(y, inverse, INTERPRETED: tl.constexpr):
    """Codes without signs of four words, rounded up on ties, where both neighbours err alike: in the order of
    [`_integers`]."""
    t0, t1 = multiply(y[0], inverse, INTERPRETED, F16=True), multiply(y[1], inverse, INTERPRETED, F16=True)
    t2, t3 = multiply(y[2], inverse, INTERPRETED, F16=True), multiply(y[3], inverse, INTERPRETED, F16=True)
    # Upper bytes are the code and a digit more: half a code is 1.
    codes = permute(t0, t1, 0x7531, INTERPRETED) + permute(t2, t3, 0x7531, INTERPRETED) * 16
    return ((codes + 0x11111111) >> 1) & 0x77777777


@triton.jit
def _add(sums, codes, high, low, table, INTERPRETED: tl.constexpr):
    """Add to the sums of values times the first and the second integers, and of values squared, those of four codes."""
    values = look_up(table[0], table[1], codes, INTERPRETED)
    return (
        dot(values, high, sums[0], False, INTERPRETED),
        dot(values, low, sums[1], True, INTERPRETED),
        dot(values, values, sums[2], False, INTERPRETED),
    )


@triton.jit
def _add_four(sums, y, integers, inverse, table, INTERPRETED: tl.constexpr):
    """The same of four words."""
    codes = _codes(y, inverse, INTERPRETED)
    sums = _add(sums, codes, integers[0], integers[1], table, INTERPRETED)
    return _add(sums, codes >> 16, integers[2], integers[3], table, INTERPRETED)


@triton.jit
def _gain(y, integers, top, CARRY: tl.constexpr, INVERSE: tl.constexpr, low, high, INTERPRETED: tl.constexpr):
    """What a factor leaves less of the squares of a block than no values would, in units of 2**-17 of the square of the
    power of two, given the bits of the maxima."""
    # The scale is 2**-3 of the power of two, times two to this.
    up = ((top & 0x7F) + CARRY) >> 7
    inverse = up * -_STEP + INVERSE
    table = low, high
    zero = tl.zeros_like(top)
    sums = _add_four((zero, zero, zero), y[0], integers[0], inverse, table, INTERPRETED)
    sums = _add_four(sums, y[1], integers[1], inverse, table, INTERPRETED)
    sums = _add_four(sums, y[2], integers[2], inverse, table, INTERPRETED)
    sums = _add_four(sums, y[3], integers[3], inverse, table, INTERPRETED)
    return (sums[2] * (tl.full(top.shape, -32, tl.int32) << up) + (sums[0] * 32 + sums[1])) << up


@triton.jit
def best_mantissas(y, bits, INTERPRETED: tl.constexpr):
    """Two-bit mantissas of the least squared error, the smallest of several; 0 of blocks with NaN or infinity. Of four
    times four words, magnitudes by [`over_power_of_two`]; and the bits of the maxima."""
    integers = (
        _integers(y[0], INTERPRETED),
        _integers(y[1], INTERPRETED),
        _integers(y[2], INTERPRETED),
        _integers(y[3], INTERPRETED),
    )
    top = tl.maximum(bits, _LEAST_TOP)
    finite, huge = bits < INFINITE, bits >= _HUGE
    # Without values nothing is gained.
    low, high = tl.where(finite, _LOW_1, 0), tl.where(huge, _CUT_1, _HIGH_1)
    best = _gain(y, integers, top, _CARRY_1, _INVERSE_1, low, tl.where(finite, high, 0), INTERPRETED)
    low, high = tl.where(finite, _LOW_2, 0), tl.where(finite, _HIGH_2, 0)
    gain = _gain(y, integers, top, _CARRY_2, _INVERSE_2, low, high, INTERPRETED)
    mantissa = (gain > best).to(tl.int32)
    best = tl.maximum(gain, best)
    low, high = tl.where(finite, _LOW_3, 0), tl.where(huge, _CUT_3, _HIGH_3)
    gain = _gain(y, integers, top, _CARRY_3, _INVERSE_OF_MORE, low, tl.where(finite, high, 0), INTERPRETED)
    better = gain + (bits > _LARGEST_UNCUT).to(tl.int32) > best
    mantissa = tl.where(better, 2, mantissa)
    best = tl.where(better, gain, best)
    low, high = tl.where(finite, _LOW_4, 0), tl.where(finite, _HIGH_4, 0)
    gain = _gain(y, integers, top, _CARRY_4, _INVERSE_4, low, high, INTERPRETED)
    mantissa = tl.where(gain > best, 3, mantissa)
    return tl.where(finite, mantissa, 0)


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
def _rounded(y, inverse, limit, INTERPRETED: tl.constexpr):
    """Words with the codes of magnitudes, to nearest, ties to even, in bits 9 to 11 of their halves, and less in those
    below."""
    if limit is not None:
        y = smaller(y, limit, INTERPRETED)
    t = multiply(y, inverse, INTERPRETED, F16=True)
    return t + 0x00FF00FF + ((t >> 9) & 0x00010001)


@triton.jit
def rounded(y, inverse, limit, INTERPRETED: tl.constexpr):
    """[`_rounded`] of four words, given what [`scales`] has; ``limit`` is what [`limits`] gives, or `None`."""
    t0, t1 = _rounded(y[0], inverse, limit, INTERPRETED), _rounded(y[1], inverse, limit, INTERPRETED)
    t2, t3 = _rounded(y[2], inverse, limit, INTERPRETED), _rounded(y[3], inverse, limit, INTERPRETED)
    return t0, t1, t2, t3


@triton.jit
def codes_of_rounded(t, INTERPRETED: tl.constexpr):
    """Words of eight codes without signs of what [`rounded`] gives."""
    even, odd = sign_bytes(t[0], t[1], t[2], t[3], INTERPRETED)
    return ((even >> 1) & 0x07070707) | ((odd << 3) & 0x70707070)
