# SPDX-License-Identifier: Apache-2.0
"""Codes by the instruction that makes E2M1 of float32, on NVIDIA GPUs of compute capability 10.x and 12.x
(``cvt.rn.satfinite.e2m1x2.f32``, PTX ISA 8.6): to nearest, ties to even, magnitudes above 6 to 6, and NaN to 6.

It is given products that are exact: bfloat16, times a macro factor, over a power of two. Its codes are those of the
definition but for the sign of zero, which is taken away. The interpreter follows the description of the instruction.
"""

import triton
import triton.language as tl

from ..common.blocks import NAN_BYTE, NO_MACRO, macro_factor
from ..common.pairs import floats
from .pair_codes import LIMIT, MAGNITUDE_CODES, minus_scales, residual_scales


_SIGN_CODE = tl.constexpr(8)


@triton.jit
def _codes_of_floats(y):
    """What the instruction makes of float32 numbers, in the lowest four bits."""
    a = tl.abs(y)
    # A tie goes to the code whose last bit is zero.
    code = (a > 0.25).to(tl.int32) + (a >= 0.75).to(tl.int32) + (a > 1.25).to(tl.int32) + (a >= 1.75).to(tl.int32)
    code = code + (a > 2.5).to(tl.int32) + (a >= 3.5).to(tl.int32) + (a > 5.0).to(tl.int32)
    return tl.where(y == y, code | ((y.to(tl.int32, bitcast=True) >> 28) & _SIGN_CODE), 7)


@triton.jit
def _word_of_floats(y0, y1, y2, y3, y4, y5, y6, y7):
    word = _codes_of_floats(y0) | (_codes_of_floats(y1) << 4) | (_codes_of_floats(y2) << 8)
    word = word | (_codes_of_floats(y3) << 12) | (_codes_of_floats(y4) << 16) | (_codes_of_floats(y5) << 20)
    return word | (_codes_of_floats(y6) << 24) | (_codes_of_floats(y7) << 28)


@triton.jit
def _without_signs_of_zeros(codes):
    # Adding 7 carries a one into the bit of the sign where a code is not zero.
    return codes & (((codes & MAGNITUDE_CODES) + MAGNITUDE_CODES) | MAGNITUDE_CODES)


@triton.jit
def _limited(w):
    """Words of two bfloat16 with magnitudes cut to [`LIMIT`], as what NaN becomes; with their signs."""
    magnitudes = w & 0x7FFF7FFF
    low, high = tl.minimum(magnitudes & 0xFFFF, LIMIT & 0xFFFF), tl.minimum(magnitudes >> 16, LIMIT & 0xFFFF)
    return low | (high << 16) | (w & -0x7FFF8000)


@triton.jit
def codes_of_words(w0, w1, w2, w3, multiplier, INTERPRETED: tl.constexpr):
    """Words of the eight codes of four words of two bfloat16, times a float32 number of their block (0 where NaN is to
    become zero)."""
    if INTERPRETED:
        y0, y1 = floats(_limited(w0), False, INTERPRETED)
        y2, y3 = floats(_limited(w1), False, INTERPRETED)
        y4, y5 = floats(_limited(w2), False, INTERPRETED)
        y6, y7 = floats(_limited(w3), False, INTERPRETED)
        m = multiplier
        codes = _word_of_floats(y0 * m, y1 * m, y2 * m, y3 * m, y4 * m, y5 * m, y6 * m, y7 * m)
    else:
        codes = tl.inline_asm_elementwise(
            """{
            .reg .b32 w0, w1, w2, w3, limit;
            .reg .f32 y0, y1, y2, y3, y4, y5, y6, y7;
            .reg .b8 c0, c1, c2, c3;
            mov.b32 limit, 0x7F597F59;
            min.xorsign.abs.bf16x2 w0, $1, limit;
            min.xorsign.abs.bf16x2 w1, $2, limit;
            min.xorsign.abs.bf16x2 w2, $3, limit;
            min.xorsign.abs.bf16x2 w3, $4, limit;
            shl.b32 y0, w0, 16; and.b32 y1, w0, 0xFFFF0000;
            shl.b32 y2, w1, 16; and.b32 y3, w1, 0xFFFF0000;
            shl.b32 y4, w2, 16; and.b32 y5, w2, 0xFFFF0000;
            shl.b32 y6, w3, 16; and.b32 y7, w3, 0xFFFF0000;
            mul.rn.f32 y0, y0, $5; mul.rn.f32 y1, y1, $5; mul.rn.f32 y2, y2, $5; mul.rn.f32 y3, y3, $5;
            mul.rn.f32 y4, y4, $5; mul.rn.f32 y5, y5, $5; mul.rn.f32 y6, y6, $5; mul.rn.f32 y7, y7, $5;
            cvt.rn.satfinite.e2m1x2.f32 c0, y1, y0;
            cvt.rn.satfinite.e2m1x2.f32 c1, y3, y2;
            cvt.rn.satfinite.e2m1x2.f32 c2, y5, y4;
            cvt.rn.satfinite.e2m1x2.f32 c3, y7, y6;
            mov.b32 $0, {c0, c1, c2, c3};
            }""",
            "=r,r,r,r,r,f",
            [w0, w1, w2, w3, multiplier],
            tl.int32,
            is_pure=True,
            pack=1,
        )
    return _without_signs_of_zeros(codes)


@triton.jit
def _values_of_codes(codes, INTERPRETED: tl.constexpr):
    """Four words of two float16, the values of words of eight codes."""
    if INTERPRETED:
        v0, v1 = _two_values(codes), _two_values(codes >> 8)
        return v0, v1, _two_values(codes >> 16), _two_values(codes >> 24)
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .b8 c0, c1, c2, c3;
            mov.b32 {c0, c1, c2, c3}, $4;
            cvt.rn.f16x2.e2m1x2 $0, c0;
            cvt.rn.f16x2.e2m1x2 $1, c1;
            cvt.rn.f16x2.e2m1x2 $2, c2;
            cvt.rn.f16x2.e2m1x2 $3, c3;
            }""",
            "=r,=r,=r,=r,r",
            [codes],
            (tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )


@triton.jit
def _two_values(codes):
    """Words of two float16, the values of the lower two codes."""
    magnitudes = (codes & 7) | ((codes & 0x70) << 12)
    # From 1 on exponent and digit stand in the same order, the exponent 14 higher; 0.5 has the digit of 1.5.
    from_one = ((magnitudes >> 1) | (magnitudes >> 2)) & 0x00010001
    halves = magnitudes & ~from_one & 0x00010001
    bits = (magnitudes << 9) + from_one * 0x3800 + halves * 0x3600
    return bits | ((codes & 8) << 12) | ((codes & 0x80) << 24)


@triton.jit
def _residuals(w, values, factor, minus_scale, INTERPRETED: tl.constexpr):
    """Two bfloat16 times the macro factor, less their values, as float32. All of it is exact."""
    low, high = floats(w, False, INTERPRETED)
    q_low, q_high = floats(values, True, INTERPRETED)
    return tl.fma(low, factor, q_low * minus_scale), tl.fma(high, factor, q_high * minus_scale)


@triton.jit
def _largest_of(a, b, c, d):
    return tl.maximum(tl.maximum(tl.abs(a), tl.abs(b)), tl.maximum(tl.abs(c), tl.abs(d)))


@triton.jit
def _codes_of_eight(r0, r1, r2, r3, r4, r5, r6, r7, multiplier, INTERPRETED: tl.constexpr):
    """Words of codes of float32 numbers times one of their block."""
    m = multiplier
    if INTERPRETED:
        codes = _word_of_floats(r0 * m, r1 * m, r2 * m, r3 * m, r4 * m, r5 * m, r6 * m, r7 * m)
    else:
        codes = tl.inline_asm_elementwise(
            """{
            .reg .b8 c0, c1, c2, c3;
            cvt.rn.satfinite.e2m1x2.f32 c0, $2, $1;
            cvt.rn.satfinite.e2m1x2.f32 c1, $4, $3;
            cvt.rn.satfinite.e2m1x2.f32 c2, $6, $5;
            cvt.rn.satfinite.e2m1x2.f32 c3, $8, $7;
            mov.b32 $0, {c0, c1, c2, c3};
            }""",
            "=r,f,f,f,f,f,f,f,f",
            [r0 * m, r1 * m, r2 * m, r3 * m, r4 * m, r5 * m, r6 * m, r7 * m],
            tl.int32,
            is_pure=True,
            pack=1,
        )
    return _without_signs_of_zeros(codes)


@triton.jit
def multiplier_of(inverse, m8, SCHEME: tl.constexpr):
    """What elements of blocks are multiplied by: one over the scale, as the low half of a word of bfloat16, and the
    factor of the macro byte."""
    multiplier = (inverse << 16).to(tl.float32, bitcast=True)
    if SCHEME.SEARCH != NO_MACRO:
        multiplier = multiplier * macro_factor(m8)
    return multiplier


@triton.jit
def residual_codes_by_instruction(w, codes, byte, m8, SCHEME: tl.constexpr):
    """Words of eight codes of the residual of one half, and its scale bytes; zero in blocks with NaN. Of the half,
    words of elements and of codes; of its blocks, scale bytes and macro bytes."""
    INTERPRETED: tl.constexpr = SCHEME.INTERPRETED
    factor = tl.broadcast_to(macro_factor(m8), codes.shape)
    minus = tl.broadcast_to(minus_scales(byte), codes.shape)
    v0, v1, v2, v3 = _values_of_codes(codes, INTERPRETED)
    r0, r1 = _residuals(w[0], v0, factor, minus, INTERPRETED)
    r2, r3 = _residuals(w[1], v1, factor, minus, INTERPRETED)
    r4, r5 = _residuals(w[2], v2, factor, minus, INTERPRETED)
    r6, r7 = _residuals(w[3], v3, factor, minus, INTERPRETED)
    largest = tl.maximum(_largest_of(r0, r1, r2, r3), _largest_of(r4, r5, r6, r7))
    finite = tl.where(byte == NAN_BYTE, 0, -1)
    byte, inverse = residual_scales(tl.max(largest, axis=2, keep_dims=True), finite, SCHEME)
    inverse = tl.broadcast_to(inverse, codes.shape)
    codes = _codes_of_eight(r0, r1, r2, r3, r4, r5, r6, r7, inverse, INTERPRETED)
    return codes & tl.broadcast_to(finite, codes.shape), byte
