# SPDX-License-Identifier: Apache-2.0
"""Blocks of bfloat16 to codes or values, two or four elements an instruction, on NVIDIA GPUs: the bits of
`common/blocks.py` for rounding to nearest with one scale per block, or with block mantissas under the rule ``"even"``,
and the same of what these leave.

A tile is four words of eight neighbours each, ``[ROWS, macro blocks, blocks, 4]``; see [`words_of`].

Magnitudes x of a block are taken over the power of two below the largest, as float16. A mantissa is for a factor f in
1, 1.25, 1.5, 1.75 (without mantissas, 1), which comes with a scale s.

float16 numbers below the normal ones, and the first of these, are as far apart as those of E2M1, with more digits. So
the product of x and ``1 / (f * s)``, times 2**-14, has the code in bits 9 to 11 once half of bit 9 is added. For f = 1
it is exact where it decides. Otherwise it errs by less than 2**-10 of itself, or by 0.6 * 2**-10 (of 1, which is 2**-14
there) next to 0.25; x, of 8 digits, is off a tie by 2**-8 of itself, or next to 0.25 by 2**-9, over f. On a tie
``1 / f``, off by 2**-12, gives the tie's own float16.

The search for mantissas: the definition adds up squares ``(h - x)**2`` of x less its value ``h = f * s * g`` (g on the
grid), each cut to a multiple of 2**-23. What is cut off is that of ``x**2``: where h is not zero, x is a multiple of
2**-12 and h is one of 2**-6, so that the squares, in units of 2**-24, differ by a multiple of 128. Hence all factors
compare as the integers ``sum(h * (2 * x - h))`` do, below 2**24 in units of 2**-17; the greater is the better. They are
sums of products of bytes: h over s, times 8, has 7 bits, and 4096 times x, where h is not zero, is ``32 * high + low``.

Only blocks from 1.75 * 2**127 on have other values: there the definition cuts magnitudes to 3 scales without a factor,
and ``9 * s`` to what is finite, which is 8 scales and less by so little that it decides ties alone.
"""

import triton
import triton.language as tl

from .bf16x2 import LOW, bytes_of, dot, larger, multiply, multiply_add, smaller
from .blocks import BLOCK_MANTISSAS, NAN_BYTE


_MAGNITUDES = tl.constexpr(0x7FFF7FFF)
_SIGNS = tl.constexpr(-0x7FFF8000)
# Bits of bfloat16: infinity; 2**127; 1.75 * 2**127; 1.875 * 2**127, beyond which a value of the factor 1.5 is cut.
_INFINITE = tl.constexpr(0x7F80)
_HALVED = tl.constexpr(0x7F00)
_HUGE = tl.constexpr(0x7F60)
_LARGEST_UNCUT = tl.constexpr(0x7F70)
# Of a maximum: an exponent and digits by which every rule, or every factor, has scale byte 0. Smaller blocks are
# computed as one of those.
_LEAST_TOP = tl.constexpr(0x0140)
_LEAST_TOP_OF_MANTISSAS = tl.constexpr(0x0144)
# Of each factor, what is added to the digits of a maximum so that they carry into the exponent where the scale is the
# larger one of two: digits from 7/8 of the factor on; for the factor 1 always, and twice from 7/4 on.
_CARRY_1 = tl.constexpr(0xA0)
_CARRY_2 = tl.constexpr(0x74)
_CARRY_3 = tl.constexpr(0x58)
_CARRY_4 = tl.constexpr(0x3C)
_CARRIES = tl.constexpr(0x3C5874A0)
# Both halves of a word, of float16: one over each factor, times 2**-11; one over a little more than 1.5, which rounds
# ties down, as the value above, which may be cut, must not err as little; a step of the exponent.
_INVERSE_1 = tl.constexpr(0x10001000)
_INVERSE_2 = tl.constexpr(0x0E660E66)
_INVERSE_3 = tl.constexpr(0x0D550D55)
_INVERSE_OF_MORE = tl.constexpr(0x0D540D54)
_INVERSE_4 = tl.constexpr(0x0C920C92)
_STEP = tl.constexpr(0x04000400)
# Magnitudes over the power of two that none exceeds: 3.4 scales of byte 253, 6.5 scales under "floor", and anything.
_TO_3_SCALES = tl.constexpr(0x3ECD3ECD)
_TO_6_SCALES = tl.constexpr(0x3E803E80)
_TO_ANY = tl.constexpr(0x40004000)
# Of bfloat16: 2**-13. What brings eight times the bits of numbers to those of half of them as float16: 15 less 128 to
# the exponents of both halves.
_LEAST = tl.constexpr(0x39003900)
_TO_FLOAT16 = tl.constexpr(0x3BFE3C00)
# Where a code is the digit of a subnormal bfloat16 and those above; 2**126.
_CODES = tl.constexpr(0x01C001C0)
_TO_VALUES = tl.constexpr(0x7E807E80)
# Of bfloat16: 1, 2, NaN, the largest number, and half of it.
_ONE = tl.constexpr(0x3F803F80)
_TWO = tl.constexpr(0x40004000)
_NAN = tl.constexpr(0x7FC07FC0)
_LARGEST = tl.constexpr(0x7F7F7F7F)
_HALF_OF_LARGEST = tl.constexpr(0x7EFF7EFF)
# Of float16: 1, 8, -4096, 4096, and 1536 + 8 * 4096.
_ONE_16 = tl.constexpr(0x3C003C00)
_EIGHT_16 = tl.constexpr(0x48004800)
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
def _max_bits(w, INTERPRETED: tl.constexpr):
    """Return the bits of the largest magnitudes of blocks, ``[.., 1]``."""
    low = larger(w[0] & _MAGNITUDES, w[1] & _MAGNITUDES, INTERPRETED)
    high = larger(w[2] & _MAGNITUDES, w[3] & _MAGNITUDES, INTERPRETED)
    both = larger(low, high, INTERPRETED)
    return tl.max(tl.maximum(both & LOW, both >> 16), axis=3, keep_dims=True)


@triton.jit
def _over_power_of_two(w, inverse, INTERPRETED: tl.constexpr):
    """Magnitudes of words times ``inverse``, half of that as float16: exact from 2**-5 on, otherwise less than that. Of
    blocks with NaN or infinity, anything."""
    # What is 2**-4 or more stays as it is: there 2**-13 is less than half of the last digit.
    y = multiply_add(w & _MAGNITUDES, inverse, _LEAST, INTERPRETED)
    # The exponents of the formats differ by 112, the digits by 3.
    return y * 8 + _TO_FLOAT16


@triton.jit
def _scales(top, mantissa, SCHEME: tl.constexpr):
    """Scale bytes but for NaN, and words of ``2**-14`` over factor and scale, times the power of two, as float16."""
    if SCHEME.SEARCH == BLOCK_MANTISSAS:
        carry = (_CARRIES >> (8 * mantissa)) & 0xFF
        inverse = tl.where(mantissa == 0, _INVERSE_1, tl.where(mantissa == 1, _INVERSE_2, 0))
        inverse = tl.where(mantissa == 2, _INVERSE_3, tl.where(mantissa == 3, _INVERSE_4, inverse))
    else:
        carry = 0x80 + (SCHEME.CARRY >> 16)
        inverse = _INVERSE_1
    up = ((top & 0x7F) + carry) >> 7
    return (top >> 7) + up - 3, inverse - up * _STEP


@triton.jit
def _rounded(y, inverse, byte, SCHEME: tl.constexpr):
    """Words with codes of magnitudes, to nearest, ties to even, in bits 9 to 11 of halves, less in those below."""
    if SCHEME.CARRY == 0:
        y = smaller(y, tl.full(y.shape, _TO_6_SCALES, tl.int32), SCHEME.INTERPRETED)
    else:
        # 4 * 2**126 is not finite.
        y = smaller(y, tl.where(byte == 253, _TO_3_SCALES, _TO_ANY), SCHEME.INTERPRETED)
    t = multiply(y, inverse, SCHEME.INTERPRETED, F16=True)
    return t + 0x00FF00FF + ((t >> 9) & 0x00010001)


@triton.jit
def _upper_bytes(a, b, c, d, INTERPRETED: tl.constexpr):
    """Of four words, the upper byte of each low half, and of each high half."""
    a, c = bytes_of(a, b, 0x7351, INTERPRETED), bytes_of(c, d, 0x7351, INTERPRETED)
    return bytes_of(a, c, 0x5410, INTERPRETED), bytes_of(a, c, 0x7632, INTERPRETED)


@triton.jit
def _signed_codes(w, t, finite, INTERPRETED: tl.constexpr):
    """Words of eight codes of what [`_rounded`] gives, with the signs of ``w``; zero where ``finite`` has no bits."""
    t0, t1, t2, t3 = t[0] | (w[0] & _SIGNS), t[1] | (w[1] & _SIGNS), t[2] | (w[2] & _SIGNS), t[3] | (w[3] & _SIGNS)
    even, odd = _upper_bytes(t0, t1, t2, t3, INTERPRETED)
    codes = (((even >> 1) & 0x07070707) | ((odd << 3) & 0x70707070)) & finite
    signs = ((even >> 4) & 0x08080808) | (odd & -0x7F7F7F80)
    # Adding 7 carries a one into the bit of the sign where a code is not zero.
    return codes | (signs & (codes + 0x77777777))


@triton.jit
def _high_and_low(y, INTERPRETED: tl.constexpr):
    """Words whose halves have in their low bytes the integers (unsigned, signed) of which 32 and 1 times add up to 4096
    times a magnitude."""
    # The last digit of numbers from 8 on is 2**-7, of those from 1024 on 1.
    high = multiply_add(y, _ONE_16, _EIGHT_16, INTERPRETED, F16=True)
    rest = multiply_add(high, _MINUS_4096, _OFFSET, INTERPRETED, F16=True)
    return high, multiply_add(y, _4096, rest, INTERPRETED, F16=True)


@triton.jit
def _integers(y, INTERPRETED: tl.constexpr):
    """[`_high_and_low`] of four words, their bytes in two: of the low halves of words 0 and 2 and of their high ones,
    and of words 1 and 3."""
    high0, low0 = _high_and_low(y[0], INTERPRETED)
    high1, low1 = _high_and_low(y[1], INTERPRETED)
    high2, low2 = _high_and_low(y[2], INTERPRETED)
    high3, low3 = _high_and_low(y[3], INTERPRETED)
    high0, low0 = bytes_of(high0, high2, 0x6240, INTERPRETED), bytes_of(low0, low2, 0x6240, INTERPRETED)
    high1, low1 = bytes_of(high1, high3, 0x6240, INTERPRETED), bytes_of(low1, low3, 0x6240, INTERPRETED)
    return high0, low0, high1, low1


@triton.jit
def _gain(y, integers, top, CARRY: tl.constexpr, INVERSE: tl.constexpr, low, high, INTERPRETED: tl.constexpr):
    """Return what a factor leaves less of the squares of blocks than no values would, in units of 2**-17 of the square
    of the power of two. ``low`` and ``high`` are the factor's values of codes."""
    # The scale is 2**-3 of the power of two, times two to this.
    up = ((top & 0x7F) + CARRY) >> 7
    inverse = up * -_STEP + INVERSE
    t0, t1 = multiply(y[0], inverse, INTERPRETED, F16=True), multiply(y[1], inverse, INTERPRETED, F16=True)
    t2, t3 = multiply(y[2], inverse, INTERPRETED, F16=True), multiply(y[3], inverse, INTERPRETED, F16=True)
    # Upper bytes are the code and a digit more: half a code is 1. Ties, whose neighbours err alike, are rounded up.
    codes = bytes_of(t0, t1, 0x7531, INTERPRETED) + bytes_of(t2, t3, 0x7531, INTERPRETED) * 16
    codes = ((codes + 0x11111111) >> 1) & 0x77777777
    low, high = tl.full(codes.shape, 0, tl.int32) + low, tl.full(codes.shape, 0, tl.int32) + high
    first, second = bytes_of(low, high, codes, INTERPRETED), bytes_of(low, high, codes >> 16, INTERPRETED)
    zero = tl.zeros_like(codes)
    of_high = dot(second, integers[2], dot(first, integers[0], zero, False, INTERPRETED), False, INTERPRETED)
    of_low = dot(second, integers[3], dot(first, integers[1], zero, True, INTERPRETED), True, INTERPRETED)
    squares = dot(second, second, dot(first, first, zero, False, INTERPRETED), False, INTERPRETED)
    gain = squares * (tl.full(up.shape, -32, tl.int32) << up) + (of_high * 32 + of_low)
    return tl.sum(gain, axis=3, keep_dims=True) << up


@triton.jit
def _best_mantissas(y, bits, top, SCHEME: tl.constexpr):
    """Two-bit mantissas of the least squared error, the smallest of several; 0 of blocks with NaN or infinity."""
    INTERPRETED: tl.constexpr = SCHEME.INTERPRETED
    integers = _integers(y, INTERPRETED)
    huge = bits >= _HUGE
    best = _gain(y, integers, top, _CARRY_1, _INVERSE_1, _LOW_1, tl.where(huge, _CUT_1, _HIGH_1), INTERPRETED)
    gain = _gain(y, integers, top, _CARRY_2, _INVERSE_2, _LOW_2, _HIGH_2, INTERPRETED)
    mantissa = (gain > best).to(tl.int32)
    best = tl.maximum(gain, best)
    high = tl.where(huge, _CUT_3, _HIGH_3)
    gain = _gain(y, integers, top, _CARRY_3, _INVERSE_OF_MORE, _LOW_3, high, INTERPRETED)
    better = gain + (bits > _LARGEST_UNCUT).to(tl.int32) > best
    mantissa = tl.where(better, 2, mantissa)
    best = tl.where(better, gain, best)
    if SCHEME.MANTISSAS == 4:
        gain = _gain(y, integers, top, _CARRY_4, _INVERSE_4, _LOW_4, _HIGH_4, INTERPRETED)
        mantissa = tl.where(gain > best, 3, mantissa)
    return tl.where(bits < _INFINITE, mantissa, 0)


@triton.jit
def quantize_words(w, mantissa, SCHEME: tl.constexpr):
    """Of the four words of a tile: the bits of block maxima, mantissas (`None` to find them), scale bytes but for NaN,
    and words of [`_rounded`]."""
    INTERPRETED: tl.constexpr = SCHEME.INTERPRETED
    bits = _max_bits(w, INTERPRETED)
    least: tl.constexpr = _LEAST_TOP_OF_MANTISSAS if SCHEME.SEARCH == BLOCK_MANTISSAS else _LEAST_TOP
    top = tl.maximum(bits, least)
    # Twice the power of two below the maximum has a normal inverse in bfloat16 always.
    inverse = (255 - (top >> 7)) * 0x00800080
    y0, y1 = _over_power_of_two(w[0], inverse, INTERPRETED), _over_power_of_two(w[1], inverse, INTERPRETED)
    y2, y3 = _over_power_of_two(w[2], inverse, INTERPRETED), _over_power_of_two(w[3], inverse, INTERPRETED)
    if SCHEME.SEARCH != BLOCK_MANTISSAS:
        mantissa = tl.zeros_like(bits)
    elif mantissa is None:
        mantissa = _best_mantissas((y0, y1, y2, y3), bits, top, SCHEME)
    byte, inverse = _scales(top, mantissa, SCHEME)
    t0, t1 = _rounded(y0, inverse, byte, SCHEME), _rounded(y1, inverse, byte, SCHEME)
    t2, t3 = _rounded(y2, inverse, byte, SCHEME), _rounded(y3, inverse, byte, SCHEME)
    return bits, mantissa, byte, (t0, t1, t2, t3)


@triton.jit
def _steps(byte, mantissa):
    """Factor times scale, ``byte`` not below -1, in both halves of words; subnormal below byte 1."""
    digits = 0x80 + (mantissa << 5)
    bits = tl.where(byte > 0, (byte << 7) + (mantissa << 5), digits >> (1 - tl.minimum(byte, 1)))
    return bits * 0x00010001


@triton.jit
def _grid(t, INTERPRETED: tl.constexpr):
    """Values on the grid of what [`_rounded`] gives."""
    return multiply((t >> 3) & _CODES, _TO_VALUES, INTERPRETED)


@triton.jit
def _residuals(w, t, byte, mantissa, INTERPRETED: tl.constexpr):
    """Magnitudes less their values: factor times residual, which has no more than 8 digits."""
    minus = _steps(byte, mantissa) | _SIGNS
    r0 = multiply_add(_grid(t[0], INTERPRETED), minus, w[0] & _MAGNITUDES, INTERPRETED)
    r1 = multiply_add(_grid(t[1], INTERPRETED), minus, w[1] & _MAGNITUDES, INTERPRETED)
    r2 = multiply_add(_grid(t[2], INTERPRETED), minus, w[2] & _MAGNITUDES, INTERPRETED)
    r3 = multiply_add(_grid(t[3], INTERPRETED), minus, w[3] & _MAGNITUDES, INTERPRETED)
    return r0, r1, r2, r3


@triton.jit
def codes_of_words(w, SCHEME: tl.constexpr):
    """Of the four words of a tile: words of eight codes ``[.., 4]``, scale bytes ``[.., 1]`` (int32), bytes of
    mantissas ``[.., 1, 1]``, and codes and scale bytes of the residual (without one, the first)."""
    bits, mantissa, byte, t = quantize_words(w, None, SCHEME)
    finite = tl.where(bits < _INFINITE, -1, 0)
    codes = _signed_codes(w, t, finite, SCHEME.INTERPRETED)
    m8 = mantissa
    if SCHEME.SEARCH == BLOCK_MANTISSAS:
        m8 = tl.sum(mantissa << (2 * tl.arange(0, 4)[None, None, :, None]), axis=2, keep_dims=True)
    residual_codes, residual_byte = codes, byte
    if SCHEME.HAS_FALLBACK:
        r = _residuals(w, t, byte, mantissa, SCHEME.INTERPRETED)
        _, _, residual_byte, t = quantize_words(r, mantissa, SCHEME)
        signs = w[0] ^ r[0], w[1] ^ r[1], w[2] ^ r[2], w[3] ^ r[3]
        residual_codes = _signed_codes(signs, t, finite, SCHEME.INTERPRETED)
    return codes, tl.where(bits < _INFINITE, byte, NAN_BYTE), m8, residual_codes, residual_byte & finite


@triton.jit
def _with_residual(value, r, t, step, INTERPRETED: tl.constexpr):
    """Values and ``step`` times those of residuals, which have the signs of these. Both have 5 digits, one of them is
    that of the residual of the other: the sum is rounded as the definition's is, which is exact in float32."""
    return multiply_add(_grid(t, INTERPRETED) | (r & _SIGNS), step, value, INTERPRETED)


@triton.jit
def _with_sign_of(w, value, limit, multiplier, INTERPRETED: tl.constexpr):
    """Magnitudes cut to ``limit``, times ``multiplier`` and a sign that zero does not have."""
    return multiply_add(smaller(value, limit, INTERPRETED), (w & _SIGNS) | multiplier, 0, INTERPRETED)


@triton.jit
def values_of_words(w, SCHEME: tl.constexpr):
    """Words ``[.., 16]`` of the values of two elements each, of the four words of a tile; the residual is added whole.

    A product of factor, scale and a value on the grid has 5 digits. Of blocks from 2**127 on, half of it is computed,
    which is finite always."""
    INTERPRETED: tl.constexpr = SCHEME.INTERPRETED
    bits, mantissa, byte, t = quantize_words(w, None, SCHEME)
    halved = (bits >= _HALVED).to(tl.int32)
    step = _steps(byte - halved, mantissa)
    a, b = multiply(_grid(t[0], INTERPRETED), step, INTERPRETED), multiply(_grid(t[1], INTERPRETED), step, INTERPRETED)
    c, d = multiply(_grid(t[2], INTERPRETED), step, INTERPRETED), multiply(_grid(t[3], INTERPRETED), step, INTERPRETED)
    if SCHEME.HAS_FALLBACK:
        r = _residuals(w, t, byte, mantissa, INTERPRETED)
        _, _, byte, t = quantize_words(r, mantissa, SCHEME)
        step = _steps(byte - halved, mantissa)
        a, b = _with_residual(a, r[0], t[0], step, INTERPRETED), _with_residual(b, r[1], t[1], step, INTERPRETED)
        c, d = _with_residual(c, r[2], t[2], step, INTERPRETED), _with_residual(d, r[3], t[3], step, INTERPRETED)
    limit = tl.where(halved == 0, _LARGEST, _HALF_OF_LARGEST)
    multiplier = tl.where(bits < _INFINITE, tl.where(halved == 0, _ONE, _TWO), _NAN)
    a, b = (
        _with_sign_of(w[0], a, limit, multiplier, INTERPRETED),
        _with_sign_of(w[1], b, limit, multiplier, INTERPRETED),
    )
    c, d = (
        _with_sign_of(w[2], c, limit, multiplier, INTERPRETED),
        _with_sign_of(w[3], d, limit, multiplier, INTERPRETED),
    )
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [a.shape[0], a.shape[1], a.shape[2], 16])
