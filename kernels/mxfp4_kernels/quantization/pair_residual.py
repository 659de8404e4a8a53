# SPDX-License-Identifier: Apache-2.0
"""What rounding leaves of bfloat16 in pairs, and its codes.

It has no more digits than what was rounded: those of bfloat16 without macro factors, where pairs hold it, and 17 behind
them, where only float32 does.
"""

import triton
import triton.language as tl

from ..common.blocks import EXPONENT_FIELD, NAN_BYTE, macro_factor
from ..common.pairs import floats, larger, magnitudes, multiply, multiply_add, permute
from .pair_codes import MAGNITUDE_CODES, grid_values, minus_scales, residual_scales, signed


# 2**-21: the exponents of steps are 128 then, and the next two.
_UNIT = tl.constexpr(2.0**-21)
_UNIT_BITS = tl.constexpr(106 << 23)
_ANCHOR = tl.constexpr(2.0**22)
# Both halves of a word: the signs, 2**-127 and 32 of bfloat16.
_SIGNS = tl.constexpr(-0x7FFF8000)
_BYTE_ZERO = tl.constexpr(0x00400040)
_THIRTY_TWO = tl.constexpr(0x42004200)


@triton.jit
def scale_words(byte, INTERPRETED: tl.constexpr):
    """The scales of bytes up to 254 in both halves of words, as bfloat16."""
    return larger(byte << 7, tl.full(byte.shape, _BYTE_ZERO, tl.int32), INTERPRETED)


@triton.jit
def residual_of_words(w, steps, binade, scale, SCHEME: tl.constexpr):
    """Words of two bfloat16 less their values on the grid, given what [`rounded`] made of their magnitudes."""
    m = magnitudes(w, SCHEME.INTERPRETED)
    value = multiply(grid_values(steps, binade, SCHEME), tl.full(w.shape, _THIRTY_TWO, tl.int32), SCHEME.INTERPRETED)
    return multiply_add(value, scale | _SIGNS, m, SCHEME.INTERPRETED) ^ (w & _SIGNS)


@triton.jit
def _residuals(m, steps, binade, minus_scale, factor, SCHEME: tl.constexpr):
    """Two magnitudes times the macro factor, less their values on the grid, as float32. All of it is exact."""
    low, high = floats(m, False, SCHEME.INTERPRETED)
    q_low, q_high = floats(grid_values(steps, binade, SCHEME), True, SCHEME.INTERPRETED)
    return tl.fma(low, factor, q_low * minus_scale), tl.fma(high, factor, q_high * minus_scale)


@triton.jit
def _larger_of(a, b):
    return tl.maximum(tl.abs(a), tl.abs(b))


@triton.jit
def _step_words(r, inverse):
    """Of float32 residuals, words whose lowest byte is the code without sign; times ``2**-21`` over the scale."""
    y = tl.abs(r) * inverse
    binade = tl.maximum(y.to(tl.int32, bitcast=True) & EXPONENT_FIELD, _UNIT_BITS).to(tl.float32, bitcast=True)
    # The product is a power of two: fused or not, the sum is the same.
    steps = tl.fma(binade, tl.full(y.shape, _ANCHOR, tl.float32), y).to(tl.int32, bitcast=True)
    return steps + (steps >> 22)


@triton.jit
def _four_bytes(a, b, c, d, SELECT: tl.constexpr, INTERPRETED: tl.constexpr):
    a, c = permute(a, b, SELECT, INTERPRETED), permute(c, d, SELECT, INTERPRETED)
    return permute(a, c, 0x5410, INTERPRETED)


@triton.jit
def _bits(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def residual_codes(m, steps, binades, signs, byte, m8, SCHEME: tl.constexpr):
    """Words of eight codes of the residual of one half, behind macro factors, and its scale bytes; zero
    in blocks with NaN. Of the half, magnitudes, what [`rounded`] made of them, and [`sign_bytes`]; of its blocks, scale
    bytes and macro bytes."""
    INTERPRETED: tl.constexpr = SCHEME.INTERPRETED
    scale = tl.broadcast_to(minus_scales(byte), m[0].shape)
    factor = tl.broadcast_to(macro_factor(m8), m[0].shape)
    r0, r1 = _residuals(m[0], steps[0], binades[0], scale, factor, SCHEME)
    r2, r3 = _residuals(m[1], steps[1], binades[1], scale, factor, SCHEME)
    r4, r5 = _residuals(m[2], steps[2], binades[2], scale, factor, SCHEME)
    r6, r7 = _residuals(m[3], steps[3], binades[3], scale, factor, SCHEME)
    largest = _larger_of(
        _larger_of(_larger_of(r0, r1), _larger_of(r2, r3)), _larger_of(_larger_of(r4, r5), _larger_of(r6, r7))
    )
    finite = tl.where(byte == NAN_BYTE, 0, -1)
    byte, inverse = residual_scales(tl.max(largest, axis=2, keep_dims=True), finite, SCHEME)
    inverse = tl.broadcast_to(inverse * _UNIT, m[0].shape)
    t0, t1, t2, t3 = (
        _step_words(r0, inverse),
        _step_words(r1, inverse),
        _step_words(r2, inverse),
        _step_words(r3, inverse),
    )
    t4, t5, t6, t7 = (
        _step_words(r4, inverse),
        _step_words(r5, inverse),
        _step_words(r6, inverse),
        _step_words(r7, inverse),
    )
    codes = _four_bytes(t0 + (t1 << 4), t2 + (t3 << 4), t4 + (t5 << 4), t6 + (t7 << 4), 0x0040, INTERPRETED)
    even = _four_bytes(_bits(r0), _bits(r2), _bits(r4), _bits(r6), 0x0073, INTERPRETED)
    odd = _four_bytes(_bits(r1), _bits(r3), _bits(r5), _bits(r7), 0x0073, INTERPRETED)
    codes = codes & tl.broadcast_to(finite, codes.shape) & MAGNITUDE_CODES
    return signed(codes, signs[0] ^ even, signs[1] ^ odd), byte
