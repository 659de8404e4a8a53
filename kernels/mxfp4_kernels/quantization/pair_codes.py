# SPDX-License-Identifier: Apache-2.0
"""Codes of bfloat16 and scale bytes of their blocks, two elements an instruction, on NVIDIA GPUs: by the rules that
need no search, without macro factors or with static ones.

Magnitudes are rounded as in [`round_to_grid`], by adding a multiple of the start of their binade, but one by whose sum
the count of steps in it comes to stand in the last bits, below the exponent. Twice the exponent and that count make the
code. Signs are put in at the end, where the code is not zero.
"""

import triton
import triton.language as tl

from ..common.blocks import BYTE_ZERO_BITS, EXPONENT_FIELD, NAN_BYTE, NO_MACRO
from ..common.pairs import larger, multiply, multiply_add, permute, reciprocal, smaller


# Both halves of a word, of bfloat16: 1.7 * 2**127, 2**-5, 6 * 2**-5, 64, -64, 2**-112, and the field of the exponent.
LIMIT = tl.constexpr(0x7F597F59)
UNIT = tl.constexpr(0x3D003D00)
_SIX = tl.constexpr(0x3E403E40)
_ANCHOR = tl.constexpr(0x42804280)
_MINUS_ANCHOR = tl.constexpr(-0x3D7F3D80)
_TO_FLOAT16 = tl.constexpr(0x07800780)
EXPONENTS = tl.constexpr(0x7F807F80)
# Of float16: 512, -1, and the field of the exponent.
_ANCHOR_16 = tl.constexpr(0x60006000)
_MINUS_ONE_16 = tl.constexpr(-0x43FF4400)
EXPONENTS_16 = tl.constexpr(0x7C007C00)
# What exponents of float16 leave in four bytes, and shifted by half a byte in four more.
_OFFSETS_16 = tl.constexpr(0x33333330)
MAGNITUDE_CODES = tl.constexpr(0x77777777)
_SIGN_CODES = tl.constexpr(-0x77777778)
_UPPER_CODES = tl.constexpr(-0x0F0F0F10)
# Macro factors other than 1 belong to maxima from 1.5 * 2**-126 (6 over a smaller one is infinite) to below 2**127.
_SMALLEST_TO_SCALE = tl.constexpr(0x00C00000)
_RANGE_TO_SCALE = tl.constexpr(0x7F000000 - 0x00C00000)


@triton.jit
def scales_of_both(maxima, SCHEME: tl.constexpr):
    """Of blocks in both halves of words, given the maxima: scale bytes but for NaN, ``2**-5`` over the scales (0 in
    blocks with NaN or infinity), and all ones in the halves of those blocks."""
    rounded_up = ((maxima + (SCHEME.CARRY >> 16) * 0x00010001) >> 7) & 0x01FF01FF
    byte = larger(rounded_up, tl.full(maxima.shape, 0x00020002, tl.int32), SCHEME.INTERPRETED) - 0x00020002
    nan = (((maxima + 0x00800080) >> 15) & 0x00010001) * 0xFFFF
    # At most 253 for finite maxima, so that each half is a normal number.
    inverse = (0x7F007F00 - byte * 128) & ~nan
    inverse = multiply(inverse, tl.full(maxima.shape, UNIT, tl.int32), SCHEME.INTERPRETED)
    return byte, inverse, nan


@triton.jit
def _macro_bytes(bits, INTERPRETED: tl.constexpr):
    """Static macro bytes of macro maxima, given as float32 bits of bfloat16 numbers ``m * 2**E``, m in [1, 2).

    They are ``floor(256 * (q - 1))`` for the mantissa q of ``6 / m``, which is that of ``1.5 / m``. As m is a multiple
    of 2**-7, ``256 * q`` is an integer or below the next one by at least 2**-8: so is q by 2**-16, ``1.5 / m`` by
    2**-17. Adding 2**-18, which no error of the reciprocal outweighs, the integer part is exact.
    """
    m = ((bits & 0x007F0000) | 0x3F800000).to(tl.float32, bitcast=True)
    ratio = tl.fma(reciprocal(m, INTERPRETED), 1.5, tl.full(m.shape, 2.0**-18, tl.float32))
    m8 = (ratio.to(tl.int32, bitcast=True) >> 15) & 0xFF
    has_factor = (bits - _SMALLEST_TO_SCALE).to(tl.uint32, bitcast=True) < _RANGE_TO_SCALE
    return tl.where(has_factor, m8, 0)


@triton.jit
def inverse_of_factor(m8, INTERPRETED: tl.constexpr):
    """One over macro factors, correctly rounded. The remainder of the first guess is exact, as products of 24 and 9
    digits less their leading ones have no more than 24; what is left of its error, 2**-46, is less than what there is
    between an inverse of 9 digits and the middle of two numbers, 2**-33."""
    factor = ((m8 << 15) | 0x3F800000).to(tl.float32, bitcast=True)
    one = tl.full(factor.shape, 1.0, tl.float32)
    if INTERPRETED:
        return tl.div_rn(one, factor)
    else:
        guess = reciprocal(factor, INTERPRETED)
        return tl.fma(guess, tl.fma(-factor, guess, one), guess)


@triton.jit
def scaled(maxima, macro_maxima, SCHEME: tl.constexpr):
    """Of blocks, given the float32 bits of their maxima and of those of their macro blocks: scale bytes, one over the
    scale (0 in blocks with NaN or infinity) as a word of two bfloat16, macro bytes, and the bits of the maxima times
    their factors."""
    m8 = tl.zeros_like(maxima)
    bits = maxima & 0x7FFFFFFF
    if SCHEME.SEARCH != NO_MACRO:
        m8 += _macro_bytes(macro_maxima, SCHEME.INTERPRETED)
        factor = ((m8 << 15) | 0x3F800000).to(tl.float32, bitcast=True)
        # Products of 8 and 9 digits are exact.
        bits = (bits.to(tl.float32, bitcast=True) * factor).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    finite = bits < EXPONENT_FIELD
    byte = tl.maximum(((tl.minimum(bits, EXPONENT_FIELD) + SCHEME.CARRY) >> 23) - 2, 0)
    # At most 253 of finite maxima, so that the inverse is a normal number.
    inverse = tl.where(finite, (254 - byte) * 0x00800080, 0)
    return tl.where(finite, byte, NAN_BYTE), inverse, m8, bits


@triton.jit
def as_float16(y, INTERPRETED: tl.constexpr):
    """Magnitudes of two bfloat16 below 8 as float16, those below ``2**-14`` to a multiple of ``2**-21``."""
    # The exponents of the formats differ by 112, the digits by 3. Subnormal numbers of both are such multiples.
    return multiply(y, tl.full(y.shape, _TO_FLOAT16, tl.int32), INTERPRETED) << 3


@triton.jit
def rounded(m, inverse, factor, SCHEME: tl.constexpr):
    """Magnitudes over the scale on the grid: as steps, which [`magnitude_codes`] makes codes of, and the starts of
    their binades, with which [`grid_values`] has the values.

    ``inverse`` is ``2**-5`` over the scale. With macro factors it is one over it, and ``factor`` a word of two float16
    in [1, 2): float16 holds the 8 digits of a magnitude from ``2**-14`` scales on, and the factor. Their product is
    rounded together with the sum, once; alone it is rounded only to find its binade, where the start of the next one
    belongs to both grids.
    """
    # Byte 253 lets nothing exceed 3.5 scales then, where 4 would not be finite. NaN becomes a number, then zero.
    y = smaller(m, tl.full(m.shape, LIMIT, tl.int32), SCHEME.INTERPRETED)
    y = multiply(y, inverse, SCHEME.INTERPRETED)
    if SCHEME.SEARCH == NO_MACRO:
        if SCHEME.CARRY == 0:
            # The other rules let nothing reach 7 scales.
            y = smaller(y, tl.full(y.shape, _SIX, tl.int32), SCHEME.INTERPRETED)
        binade = larger(y & EXPONENTS, tl.full(y.shape, UNIT, tl.int32), SCHEME.INTERPRETED)
        steps = multiply_add(binade, tl.full(y.shape, _ANCHOR, tl.int32), y, SCHEME.INTERPRETED)
    else:
        y = as_float16(y, SCHEME.INTERPRETED)
        product = multiply(y, factor + 0x24002400, SCHEME.INTERPRETED, F16=True)
        binade = larger(product & EXPONENTS_16, tl.full(y.shape, _ANCHOR_16, tl.int32), SCHEME.INTERPRETED)
        steps = multiply_add(y, factor, binade, SCHEME.INTERPRETED, F16=True)
    return steps, binade


@triton.jit
def grid_values(steps, binade, SCHEME: tl.constexpr):
    """Of what [`rounded`] gives, values on the grid: words of two float16; without macro factors of two bfloat16, times
    ``2**-5``."""
    if SCHEME.SEARCH == NO_MACRO:
        return multiply_add(binade, tl.full(steps.shape, _MINUS_ANCHOR, tl.int32), steps, SCHEME.INTERPRETED)
    else:
        minus_one = tl.full(steps.shape, _MINUS_ONE_16, tl.int32)
        return multiply_add(binade, minus_one, steps, SCHEME.INTERPRETED, F16=True)


@triton.jit
def _interleaved(a, b, c, d, SELECT: tl.constexpr, INTERPRETED: tl.constexpr):
    """Of four words, one byte of each low half, ``SELECT``'s first, and one of each high half."""
    a = permute(a, b, SELECT, INTERPRETED)
    c = permute(c, d, SELECT, INTERPRETED)
    return permute(a, c, 0x5410, INTERPRETED), permute(a, c, 0x7632, INTERPRETED)


@triton.jit
def magnitude_codes(s0, s1, s2, s3, SCHEME: tl.constexpr):
    """Words of eight codes without signs, of four words of steps."""
    # Exponents of bfloat16 are 128 and the next two: twice that is 256 and one digit of the code. Of float16 they leave
    # more, which is taken away.
    shift: tl.constexpr = 6 if SCHEME.SEARCH == NO_MACRO else 9
    s0 += s0 >> shift
    s1 += s1 >> shift
    s2 += s2 >> shift
    s3 += s3 >> shift
    even, odd = _interleaved(s0, s1, s2, s3, 0x6240, SCHEME.INTERPRETED)
    codes = even + (odd << 4)
    if SCHEME.SEARCH != NO_MACRO:
        codes -= _OFFSETS_16
    return codes & MAGNITUDE_CODES


@triton.jit
def sign_bytes(w0, w1, w2, w3, INTERPRETED: tl.constexpr):
    """Of four words, the highest byte of each low half, and of each high half."""
    return _interleaved(w0, w1, w2, w3, 0x7351, INTERPRETED)


@triton.jit
def signed(codes, even, odd):
    """Codes with the signs of two words of [`sign_bytes`], but for zeros."""
    signs = ((even >> 4) & ~_UPPER_CODES) | (odd & _UPPER_CODES)
    # Adding 7 carries a one into the bit of the sign where a code is not zero.
    return codes | (signs & (codes + MAGNITUDE_CODES) & _SIGN_CODES)


@triton.jit
def factor_words(m8):
    """Words of two float16, the factors of macro bytes."""
    return m8 * 0x00040004 + 0x3C003C00


@triton.jit
def minus_scales(byte):
    """Minus the scales of bytes as float32; minus infinity for byte 255, of whose blocks nothing is left."""
    return tl.maximum(byte << 23, BYTE_ZERO_BITS).to(tl.float32, bitcast=True) * -1.0


@triton.jit
def residual_scales(largest, finite, SCHEME: tl.constexpr):
    """Scale bytes of residuals, given the largest magnitudes (float32), and one over the scales; byte 0 where
    ``finite`` has no bits, rather than all."""
    byte = tl.maximum(((largest.to(tl.int32, bitcast=True) + SCHEME.CARRY) >> 23) - 2, 0) & finite
    # What is left of finite blocks is a scale at most (two under "floor"), so that this is a normal number.
    return byte, ((254 - byte) << 23).to(tl.float32, bitcast=True)
