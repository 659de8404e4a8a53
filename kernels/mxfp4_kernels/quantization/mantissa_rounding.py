# SPDX-License-Identifier: Apache-2.0
"""Blocks of bfloat16 behind block mantissas, four times four words of two elements in a thread, on NVIDIA GPUs: from
memory to float16, to codes by the rule ``"even"``, and what these leave.

Magnitudes x of a block are taken over the power of two below the largest, as float16. A mantissa is for a factor f in
1, 1.25, 1.5, 1.75, which comes with a scale s that is the larger one of two from some digits of the largest magnitude
on; ``x / (f * s)`` is less than 7, so that none is clipped.

float16 numbers below the normal ones, and the first of these, are as far apart as those of E2M1, with more digits. So
the product of x and ``1 / (f * s)``, times 2**-14, has the code in bits 9 to 11 once half of bit 9 is added. It errs by
less than 2**-10 of itself, or by 0.6 * 2**-10 (of 1, which is 2**-14 there) next to 0.25; x, of 8 digits, is off a tie
by 2**-8 of itself, or next to 0.25 by 2**-9, over f. On a tie ``1 / f``, off by 2**-12, gives the tie's own float16.
"""

import triton
import triton.language as tl

from ..common.pairs import LOW, four_magnitudes, larger, largest_of_four, multiply, multiply_add, permute, smaller
from .pair_codes import sign_bytes


# Bits of a maximum, bfloat16: of an exponent and digits by which all factors have scale byte 0. Smaller blocks are
# computed as one of those.
LEAST_TOP = tl.constexpr(0x0144)
INFINITE = tl.constexpr(0x7F80)
# For each mantissa a byte, what is added to those bits so that they carry into the exponent where the scale is the
# larger one of two: digits from 7/8 of the factor on; for the factor 1 always, and twice from 7/4 on.
_CARRIES = tl.constexpr(0x3C5874A0)
# Both halves of a word, of float16: one over each factor, times 2**-11; a step of the exponent; 1.7, and 2.
INVERSE_1 = tl.constexpr(0x10001000)
INVERSE_2 = tl.constexpr(0x0E660E66)
INVERSE_3 = tl.constexpr(0x0D550D55)
INVERSE_4 = tl.constexpr(0x0C920C92)
STEP = tl.constexpr(0x04000400)
_TO_3_SCALES = tl.constexpr(0x3ECD3ECD)
_TWO = tl.constexpr(0x40004000)
# The same of bfloat16: 2**-13. What brings eight times the bits of numbers to those of half of them as float16: 15 less
# 128 to the exponents of both halves.
_LEAST = tl.constexpr(0x39003900)
_TO_FLOAT16 = tl.constexpr(0x3BFE3C00)
# The signs; where a code is the digit of a subnormal bfloat16 and those above; 2**126.
SIGNS = tl.constexpr(-0x7FFF8000)
_CODES = tl.constexpr(0x01C001C0)
_TO_VALUES = tl.constexpr(0x7E807E80)


@triton.jit
def numbers(MACROS: tl.constexpr):
    """Numbers of blocks."""
    return tl.arange(0, MACROS)[:, None] * 4 + tl.arange(0, 4)[None, :]


@triton.jit
def _load(x_ptr, n_words, MACROS: tl.constexpr, FIRST: tl.constexpr):
    """Words ``FIRST`` to ``FIRST + 3`` of every sixteen; zero from ``n_words`` on."""
    offsets = numbers(MACROS)[:, :, None] * 16 + FIRST + tl.arange(0, 4)[None, None, :]
    x = tl.load(x_ptr + offsets, mask=offsets < n_words, other=0)
    even, odd = tl.split(tl.reshape(x, [MACROS, 4, 2, 2]))
    w0, w2 = tl.split(even)
    w1, w3 = tl.split(odd)
    return w0, w1, w2, w3


@triton.jit
def load(x_ptr, n_blocks, MACROS: tl.constexpr):
    """The words of blocks, read as int32; zero from ``n_blocks`` on."""
    w0, w1 = _load(x_ptr, n_blocks * 16, MACROS, 0), _load(x_ptr, n_blocks * 16, MACROS, 4)
    w2, w3 = _load(x_ptr, n_blocks * 16, MACROS, 8), _load(x_ptr, n_blocks * 16, MACROS, 12)
    return w0, w1, w2, w3


@triton.jit
def magnitudes_of_blocks(w, INTERPRETED: tl.constexpr):
    """Magnitudes of blocks."""
    m0, m1 = four_magnitudes(w[0], INTERPRETED), four_magnitudes(w[1], INTERPRETED)
    m2, m3 = four_magnitudes(w[2], INTERPRETED), four_magnitudes(w[3], INTERPRETED)
    return m0, m1, m2, m3


@triton.jit
def largest_of_blocks(m, INTERPRETED: tl.constexpr):
    """The bits of the largest magnitudes of blocks."""
    low = larger(largest_of_four(m[0], INTERPRETED), largest_of_four(m[1], INTERPRETED), INTERPRETED)
    high = larger(largest_of_four(m[2], INTERPRETED), largest_of_four(m[3], INTERPRETED), INTERPRETED)
    words = larger(low, high, INTERPRETED)
    return larger(words, permute(words, words, 0x1032, INTERPRETED), INTERPRETED) & LOW


@triton.jit
def _over_power_of_two(m, inverse, INTERPRETED: tl.constexpr):
    """Words of magnitudes times ``inverse``, half of that as float16."""
    # What is 2**-4 or more stays as it is: there 2**-13 is less than half of the last digit.
    y = multiply_add(m, inverse, tl.full(m.shape, _LEAST, tl.int32), INTERPRETED)
    # The exponents of the formats differ by 112, the digits by 3.
    return y * 8 + _TO_FLOAT16


@triton.jit
def _four_over_power_of_two(m, inverse, INTERPRETED: tl.constexpr):
    y0, y1 = _over_power_of_two(m[0], inverse, INTERPRETED), _over_power_of_two(m[1], inverse, INTERPRETED)
    y2, y3 = _over_power_of_two(m[2], inverse, INTERPRETED), _over_power_of_two(m[3], inverse, INTERPRETED)
    return y0, y1, y2, y3


@triton.jit
def over_power_of_two(m, bits, INTERPRETED: tl.constexpr):
    """Magnitudes over the power of two below the largest, of which ``bits`` are given, as float16: exact from 2**-5 on,
    otherwise less than that. Of blocks with NaN or infinity, anything."""
    # Twice that power has a normal inverse in bfloat16 always.
    inverse = (255 - (tl.maximum(bits, LEAST_TOP) >> 7)) * 0x00800080
    y0, y1 = (
        _four_over_power_of_two(m[0], inverse, INTERPRETED),
        _four_over_power_of_two(m[1], inverse, INTERPRETED),
    )
    y2, y3 = (
        _four_over_power_of_two(m[2], inverse, INTERPRETED),
        _four_over_power_of_two(m[3], inverse, INTERPRETED),
    )
    return y0, y1, y2, y3


@triton.jit
def scales(bits, mantissa):
    """Scale bytes but for NaN, and words of ``2**-14`` over factor and scale, times the power of two, as float16; given
    the bits of the maxima."""
    top = tl.maximum(bits, LEAST_TOP)
    byte = ((top + ((_CARRIES >> (8 * mantissa)) & 0xFF)) >> 7) - 3
    inverse = tl.where(mantissa == 0, INVERSE_1, tl.where(mantissa == 1, INVERSE_2, 0))
    inverse = tl.where(mantissa == 2, INVERSE_3, tl.where(mantissa == 3, INVERSE_4, inverse))
    return byte, inverse - (byte - (top >> 7) + 3) * STEP


@triton.jit
def _limits(byte):
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
def _four_rounded(y, inverse, limit, INTERPRETED: tl.constexpr):
    """[`_rounded`] of four words, ``inverse`` of [`scales`]."""
    t0, t1 = _rounded(y[0], inverse, limit, INTERPRETED), _rounded(y[1], inverse, limit, INTERPRETED)
    t2, t3 = _rounded(y[2], inverse, limit, INTERPRETED), _rounded(y[3], inverse, limit, INTERPRETED)
    return t0, t1, t2, t3


@triton.jit
def rounded(y, inverse, byte, INTERPRETED: tl.constexpr):
    """[`_rounded`] of magnitudes by [`over_power_of_two`], given what [`scales`] has; ``byte`` is `None` where none is
    253."""
    if byte is None:
        limit = None
    else:
        limit = _limits(byte)
    t0, t1 = _four_rounded(y[0], inverse, limit, INTERPRETED), _four_rounded(y[1], inverse, limit, INTERPRETED)
    t2, t3 = _four_rounded(y[2], inverse, limit, INTERPRETED), _four_rounded(y[3], inverse, limit, INTERPRETED)
    return t0, t1, t2, t3


@triton.jit
def codes_of_rounded(t, INTERPRETED: tl.constexpr):
    """Words of eight codes without signs of what [`rounded`] gives."""
    even, odd = sign_bytes(t[0], t[1], t[2], t[3], INTERPRETED)
    return ((even >> 1) & 0x07070707) | ((odd << 3) & 0x70707070)


@triton.jit
def signs_of_blocks(w, INTERPRETED: tl.constexpr):
    """[`sign_bytes`] of every four words."""
    s0 = sign_bytes(w[0][0], w[0][1], w[0][2], w[0][3], INTERPRETED)
    s1 = sign_bytes(w[1][0], w[1][1], w[1][2], w[1][3], INTERPRETED)
    s2 = sign_bytes(w[2][0], w[2][1], w[2][2], w[2][3], INTERPRETED)
    s3 = sign_bytes(w[3][0], w[3][1], w[3][2], w[3][3], INTERPRETED)
    return s0, s1, s2, s3


@triton.jit
def steps(byte, mantissa):
    """Factor times scale, ``byte`` not below -1, in both halves of words, as bfloat16; subnormal below byte 1."""
    digits = 0x80 + (mantissa << 5)
    return tl.where(byte > 0, (byte << 7) + (mantissa << 5), digits >> (1 - tl.minimum(byte, 1))) * 0x00010001


@triton.jit
def _value(t, INTERPRETED: tl.constexpr):
    return multiply((t >> 3) & _CODES, tl.full(t.shape, _TO_VALUES, tl.int32), INTERPRETED)


@triton.jit
def _four_values(t, INTERPRETED: tl.constexpr):
    v0, v1 = _value(t[0], INTERPRETED), _value(t[1], INTERPRETED)
    v2, v3 = _value(t[2], INTERPRETED), _value(t[3], INTERPRETED)
    return v0, v1, v2, v3


@triton.jit
def grid_values(t, INTERPRETED: tl.constexpr):
    """Values on the grid, bfloat16, of what [`rounded`] gives."""
    v0, v1 = _four_values(t[0], INTERPRETED), _four_values(t[1], INTERPRETED)
    v2, v3 = _four_values(t[2], INTERPRETED), _four_values(t[3], INTERPRETED)
    return v0, v1, v2, v3


@triton.jit
def four_plus_products(a, v, step, INTERPRETED: tl.constexpr):
    """Four words and values times ``step`` added up, rounded once."""
    r0, r1 = multiply_add(v[0], step, a[0], INTERPRETED), multiply_add(v[1], step, a[1], INTERPRETED)
    r2, r3 = multiply_add(v[2], step, a[2], INTERPRETED), multiply_add(v[3], step, a[3], INTERPRETED)
    return r0, r1, r2, r3


@triton.jit
def residuals(m, values, step, INTERPRETED: tl.constexpr):
    """Magnitudes less ``step`` times their values: factor times residual, which has no more than 8 digits."""
    minus = step | SIGNS
    r0 = four_plus_products(m[0], values[0], minus, INTERPRETED)
    r1 = four_plus_products(m[1], values[1], minus, INTERPRETED)
    r2 = four_plus_products(m[2], values[2], minus, INTERPRETED)
    r3 = four_plus_products(m[3], values[3], minus, INTERPRETED)
    return r0, r1, r2, r3
