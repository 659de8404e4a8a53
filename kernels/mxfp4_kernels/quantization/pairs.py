# SPDX-License-Identifier: Apache-2.0
"""Codes and scale bytes of bfloat16, two elements an instruction, on NVIDIA GPUs: whole blocks, by the rules that need
no search, without macro factors or with static ones. The bits are those of [`pack_tile`], which takes three times the
instructions.

A tile is two halves of ``BLOCKS`` blocks, each in four parts ``[BLOCKS, 4]`` of words of two elements: words 0, 1, 2
and 3 of every four, of which one word of eight codes is made. What belongs to blocks, ``[BLOCKS, 1]``, is in the low
half of a word for the first half of the tile, in the high half for the second.

Magnitudes are rounded as in [`round_to_grid`], by adding a multiple of the start of their binade, but one by whose sum
the count of steps in it comes to stand in the last bits, below the exponent. Twice the exponent and that count make the
code. Signs are put in at the end, where the code is not zero.
"""

import triton
import triton.language as tl

from ..common.blocks import EXPONENT_FIELD, NAN_BYTE, NO_MACRO
from ..common.pairs import HIGH, larger, largest, magnitudes, multiply, multiply_add, permute, reciprocal, smaller


# Both halves of a word, of bfloat16: 1.7 * 2**127, 2**-5, 6 * 2**-5, 64 and 2**-15; and the field of the exponent.
LIMIT = tl.constexpr(0x7F597F59)
UNIT = tl.constexpr(0x3D003D00)
_SIX = tl.constexpr(0x3E403E40)
_ANCHOR = tl.constexpr(0x42804280)
_LEAST = tl.constexpr(0x38003800)
EXPONENTS = tl.constexpr(0x7F807F80)
# Of float16: 512, and the field of the exponent.
_ANCHOR_16 = tl.constexpr(0x60006000)
EXPONENTS_16 = tl.constexpr(0x7C007C00)
# What exponents of float16 leave in four bytes, and shifted by half a byte in four more.
_OFFSETS_16 = tl.constexpr(0x33333330)
_MAGNITUDE_CODES = tl.constexpr(0x77777777)
_SIGN_CODES = tl.constexpr(-0x77777778)
_UPPER_CODES = tl.constexpr(-0x0F0F0F10)
# Macro factors other than 1 belong to maxima from 1.5 * 2**-126 (6 over a smaller one is infinite) to below 2**127.
_SMALLEST_TO_SCALE = tl.constexpr(0x00C00000)
_RANGE_TO_SCALE = tl.constexpr(0x7F000000 - 0x00C00000)


@triton.jit
def _load(x_ptr, n_words, BLOCKS: tl.constexpr):
    """The four parts of one half, and their magnitudes; zero from ``n_words`` on."""
    blocks, quads, words = tl.arange(0, BLOCKS), tl.arange(0, 4), tl.arange(0, 4)
    offsets = blocks[:, None, None] * 16 + quads[None, :, None] * 4 + words[None, None, :]
    x = tl.load(x_ptr + offsets, mask=offsets < n_words, other=0)
    even, odd = tl.split(tl.reshape(x, [BLOCKS, 4, 2, 2]))
    w0, w2 = tl.split(even)
    w1, w3 = tl.split(odd)
    return w0, w1, w2, w3


@triton.jit
def _four_magnitudes(w0, w1, w2, w3, INTERPRETED: tl.constexpr):
    return (
        magnitudes(w0, INTERPRETED),
        magnitudes(w1, INTERPRETED),
        magnitudes(w2, INTERPRETED),
        magnitudes(w3, INTERPRETED),
    )


@triton.jit
def _maxima(v0, v1, v2, v3, w0, w1, w2, w3, INTERPRETED: tl.constexpr):
    """The largest magnitudes ``[BLOCKS, 1]`` of the blocks of both halves."""
    v = larger(larger(v0, v1, INTERPRETED), larger(v2, v3, INTERPRETED), INTERPRETED)
    w = larger(larger(w0, w1, INTERPRETED), larger(w2, w3, INTERPRETED), INTERPRETED)
    even, odd = permute(v, w, 0x5410, INTERPRETED), permute(v, w, 0x7632, INTERPRETED)
    return largest(larger(even, odd, INTERPRETED), 1, INTERPRETED)


@triton.jit
def _scales(maxima, SCHEME: tl.constexpr):
    """Scale bytes of both halves, and ``2**-5`` over the scales; 0 over those of blocks with NaN or infinity."""
    rounded_up = ((maxima + (SCHEME.CARRY >> 16) * 0x00010001) >> 7) & 0x01FF01FF
    byte = larger(rounded_up, tl.full(maxima.shape, 0x00020002, tl.int32), SCHEME.INTERPRETED) - 0x00020002
    nan = (((maxima + 0x00800080) >> 15) & 0x00010001) * 0xFFFF
    # At most 253 for finite maxima, so that each half is a normal number.
    inverse = (0x7F007F00 - byte * 128) & ~nan
    inverse = multiply(inverse, tl.full(maxima.shape, UNIT, tl.int32), SCHEME.INTERPRETED)
    return byte | (nan & 0x00FF00FF), inverse


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
def _steps(y, inverse, SCHEME: tl.constexpr):
    """Codes, without signs, in the low bits 0 to 2 of both halves, bits 3 to 6 of which are zero: of magnitudes times
    ``2**-5`` over the scale."""
    # Byte 253 lets nothing exceed 3.5 scales then, where 4 would not be finite. NaN becomes a number, then zero.
    y = smaller(y, tl.full(y.shape, LIMIT, tl.int32), SCHEME.INTERPRETED)
    y = multiply(y, inverse, SCHEME.INTERPRETED)
    if SCHEME.CARRY == 0:
        # The other rules let nothing reach 7 scales.
        y = smaller(y, tl.full(y.shape, _SIX, tl.int32), SCHEME.INTERPRETED)
    binade = larger(y & EXPONENTS, tl.full(y.shape, UNIT, tl.int32), SCHEME.INTERPRETED)
    steps = multiply_add(binade, tl.full(y.shape, _ANCHOR, tl.int32), y, SCHEME.INTERPRETED)
    # Exponents are 128 and the next two: twice that is 256 and one digit of the code.
    return steps + (steps >> 6)


@triton.jit
def as_float16(y, INTERPRETED: tl.constexpr):
    """Magnitudes of two bfloat16 as float16: zero below ``2**-15``, above at most 8."""
    # From there on the exponents of the formats differ by 112, the digits by 3.
    return (larger(y, tl.full(y.shape, _LEAST, tl.int32), INTERPRETED) - _LEAST) << 3


@triton.jit
def _factored_steps(y, inverse, factor, SCHEME: tl.constexpr):
    """[`_steps`] of magnitudes over the scale times ``factor``, a word of two float16 in [1, 2); 0x30 higher.

    float16 holds the 8 digits of a magnitude from ``2**-14`` scales on, and the factor. Their product is rounded
    together with the sum, once; alone it is rounded only to find its binade, where the start of the next one belongs
    to both grids.
    """
    y = smaller(y, tl.full(y.shape, LIMIT, tl.int32), SCHEME.INTERPRETED)
    y = multiply(y, inverse, SCHEME.INTERPRETED)
    y = as_float16(y, SCHEME.INTERPRETED)
    product = multiply(y, factor + 0x24002400, SCHEME.INTERPRETED, F16=True)
    binade = larger(product & EXPONENTS_16, tl.full(y.shape, _ANCHOR_16, tl.int32), SCHEME.INTERPRETED)
    steps = multiply_add(y, factor, binade, SCHEME.INTERPRETED, F16=True)
    return steps + (steps >> 9)


@triton.jit
def _interleaved(a, b, c, d, SELECT: tl.constexpr, INTERPRETED: tl.constexpr):
    """Of four words, one byte of each low half, ``SELECT``'s first, and one of each high half."""
    a = permute(a, b, SELECT, INTERPRETED)
    c = permute(c, d, SELECT, INTERPRETED)
    return permute(a, c, 0x5410, INTERPRETED), permute(a, c, 0x7632, INTERPRETED)


@triton.jit
def codes_of(w0, w1, w2, w3, m0, m1, m2, m3, inverse, factor, SCHEME: tl.constexpr):
    """Words ``[BLOCKS, 4]`` of eight codes of the parts of one half, given their magnitudes too."""
    if SCHEME.SEARCH == NO_MACRO:
        even, odd = _interleaved(
            _steps(m0, inverse, SCHEME),
            _steps(m1, inverse, SCHEME),
            _steps(m2, inverse, SCHEME),
            _steps(m3, inverse, SCHEME),
            0x6240,
            SCHEME.INTERPRETED,
        )
        codes = even + (odd << 4)
    else:
        even, odd = _interleaved(
            _factored_steps(m0, inverse, factor, SCHEME),
            _factored_steps(m1, inverse, factor, SCHEME),
            _factored_steps(m2, inverse, factor, SCHEME),
            _factored_steps(m3, inverse, factor, SCHEME),
            0x6240,
            SCHEME.INTERPRETED,
        )
        codes = even + (odd << 4) - _OFFSETS_16
    codes = codes & _MAGNITUDE_CODES
    even, odd = _interleaved(w0, w1, w2, w3, 0x7351, SCHEME.INTERPRETED)
    signs = ((even >> 4) & ~_UPPER_CODES) | (odd & _UPPER_CODES)
    # Adding 7 carries a one into the bit of the sign where a code is not zero.
    return codes | (signs & (codes + _MAGNITUDE_CODES) & _SIGN_CODES)


@triton.jit
def _store(out, first, codes, byte, m8, n_blocks, SCHEME: tl.constexpr):
    """Store what belongs to one half, whose first block has the number ``first``; no more than ``n_blocks``."""
    at = tl.arange(0, codes.shape[0])[:, None] * 4 + tl.arange(0, 4)[None, :]
    inside = at < n_blocks * 4
    tl.store(out.codes + first * 4 + at, codes, mask=inside)
    # By one of the four threads of a block.
    tl.store(out.scale + first + (at >> 2), tl.broadcast_to(byte.to(tl.uint8), at.shape), mask=inside & (at % 4 == 0))
    if SCHEME.SEARCH != NO_MACRO:
        each: tl.constexpr = SCHEME.MACRO // 8
        m8 = tl.broadcast_to(m8.to(tl.uint8), at.shape)
        tl.store(out.macro + first * 32 // SCHEME.MACRO + at // each, m8, mask=inside & (at % each == 0))


@triton.jit
def factor_words(m8, like):
    """Words of two float16, the factors of macro bytes."""
    return tl.broadcast_to(m8 * 0x00040004 + 0x3C003C00, like.shape)


@triton.jit(do_not_specialize=["n_blocks"])
def quantize_pairs_kernel(x_ptr, out, n_blocks, BLOCKS: tl.constexpr, SCHEME: tl.constexpr):
    """Codes (as int32 words of eight), scale bytes and macro bytes of ``n_blocks`` adjacent blocks, whole macro blocks,
    read as int32 words of two elements. One program for every ``2 * BLOCKS``."""
    INTERPRETED: tl.constexpr = SCHEME.INTERPRETED
    first = tl.program_id(0).to(tl.int64) * (2 * BLOCKS)
    left = tl.minimum(n_blocks - first, 2 * BLOCKS).to(tl.int32)
    x_ptr += first * 16
    v0, v1, v2, v3 = _load(x_ptr, left * 16, BLOCKS)
    w0, w1, w2, w3 = _load(x_ptr + BLOCKS * 16, (left - BLOCKS) * 16, BLOCKS)
    a0, a1, a2, a3 = _four_magnitudes(v0, v1, v2, v3, INTERPRETED)
    b0, b1, b2, b3 = _four_magnitudes(w0, w1, w2, w3, INTERPRETED)
    maxima = _maxima(a0, a1, a2, a3, b0, b1, b2, b3, INTERPRETED)
    if SCHEME.SEARCH == NO_MACRO:
        m8 = tl.zeros_like(maxima)
        m8_w = m8
        byte, inverses = _scales(maxima, SCHEME)
        byte_w = byte >> 16
        inverse = permute(inverses, inverses, 0x1010, INTERPRETED)
        inverse_w = permute(inverses, inverses, 0x3232, INTERPRETED)
    else:
        each: tl.constexpr = SCHEME.MACRO // 32
        macro = largest(tl.reshape(maxima, [BLOCKS // each, each]), 1, INTERPRETED)
        macro = tl.reshape(tl.broadcast_to(macro, [BLOCKS // each, each]), [BLOCKS, 1])
        byte, inverse, m8, _ = scaled(maxima << 16, macro << 16, SCHEME)
        byte_w, inverse_w, m8_w, _ = scaled(maxima & HIGH, macro & HIGH, SCHEME)
    inverse, inverse_w = tl.broadcast_to(inverse, v0.shape), tl.broadcast_to(inverse_w, v0.shape)
    codes = codes_of(v0, v1, v2, v3, a0, a1, a2, a3, inverse, factor_words(m8, v0), SCHEME)
    _store(out, first, codes, byte, m8, left, SCHEME)
    codes = codes_of(w0, w1, w2, w3, b0, b1, b2, b3, inverse_w, factor_words(m8_w, v0), SCHEME)
    _store(out, first + BLOCKS, codes, byte_w, m8_w, left - BLOCKS, SCHEME)
