# SPDX-License-Identifier: Apache-2.0
"""The search for block mantissas of bfloat16, two or four elements an instruction, on NVIDIA GPUs. It finds those of
`common/macro.py`, from magnitudes x as of `mantissa_rounding.py`.

The definition adds up squares ``(h - x)**2`` of x less its value ``h = f * s * g`` (g on the grid), each cut to a
multiple of 2**-23. What is cut off is that of ``x**2``: where h is not zero, x is a multiple of 2**-12 and h is one of
2**-6, so that the squares, in units of 2**-24, differ by a multiple of 128. Hence all factors compare as the integers
``sum(h * (2 * x - h))`` do, below 2**24 in units of 2**-17; the greater is the better. They are sums of products of
bytes: h over s, times 8, has 7 bits, and 4096 times x, where h is not zero, is ``32 * high + low``.

Only blocks from 1.75 * 2**127 on have other values: there the definition cuts magnitudes to 3 scales without a factor,
and ``9 * s`` to what is finite, which is 8 scales and less by so little that it decides ties alone.
"""

import triton
import triton.language as tl

from ..common.pairs import dot, look_up, multiply, multiply_add, permute
from .mantissa_rounding import INFINITE, INVERSE_1, INVERSE_2, INVERSE_4, LEAST_TOP, STEP


# Bits of bfloat16: 1.75 * 2**127; and 1.875 * 2**127, beyond which a value of the factor 1.5 is cut. On that tie its
# neighbours do not err alike, hence one over a little more than 1.5, which rounds ties down.
_HUGE = tl.constexpr(0x7F60)
_LARGEST_UNCUT = tl.constexpr(0x7F70)
_INVERSE_OF_MORE = tl.constexpr(0x0D540D54)
# What carries into the exponent, of each factor: see `_CARRIES` of `mantissa_rounding.py`.
_CARRY_1 = tl.constexpr(0xA0)
_CARRY_2 = tl.constexpr(0x74)
_CARRY_3 = tl.constexpr(0x58)
_CARRY_4 = tl.constexpr(0x3C)
# Both halves of a word, of float16: 1, 8, -4096, 4096, and 1536 + 8 * 4096.
_ONE = tl.constexpr(0x3C003C00)
_EIGHT = tl.constexpr(0x48004800)
_MINUS_4096 = tl.constexpr(-0x13FF1400)
_4096 = tl.constexpr(0x6C006C00)
_OFFSET = tl.constexpr(0x78307830)
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
    """[`_high_and_low`] of four words, their bytes in two: of the low halves of words 0 and 2 and of their high ones,
    and of words 1 and 3."""
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
    inverse = up * -STEP + INVERSE
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
    top = tl.maximum(bits, LEAST_TOP)
    finite, huge = bits < INFINITE, bits >= _HUGE
    # Without values nothing is gained.
    low, high = tl.where(finite, _LOW_1, 0), tl.where(huge, _CUT_1, _HIGH_1)
    best = _gain(y, integers, top, _CARRY_1, INVERSE_1, low, tl.where(finite, high, 0), INTERPRETED)
    low, high = tl.where(finite, _LOW_2, 0), tl.where(finite, _HIGH_2, 0)
    gain = _gain(y, integers, top, _CARRY_2, INVERSE_2, low, high, INTERPRETED)
    mantissa = (gain > best).to(tl.int32)
    best = tl.maximum(gain, best)
    low, high = tl.where(finite, _LOW_3, 0), tl.where(huge, _CUT_3, _HIGH_3)
    gain = _gain(y, integers, top, _CARRY_3, _INVERSE_OF_MORE, low, tl.where(finite, high, 0), INTERPRETED)
    better = gain + (bits > _LARGEST_UNCUT).to(tl.int32) > best
    mantissa = tl.where(better, 2, mantissa)
    best = tl.where(better, gain, best)
    low, high = tl.where(finite, _LOW_4, 0), tl.where(finite, _HIGH_4, 0)
    gain = _gain(y, integers, top, _CARRY_4, INVERSE_4, low, high, INTERPRETED)
    mantissa = tl.where(gain > best, 3, mantissa)
    return tl.where(finite, mantissa, 0)
