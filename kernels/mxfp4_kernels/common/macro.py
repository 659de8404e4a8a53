# SPDX-License-Identifier: Apache-2.0
"""Macro factors and block mantissas: computed or searched, and applied. Tiles and the rest are as in `blocks.py`."""

import triton
import triton.language as tl

from .blocks import (
    BLOCKWISE,
    EXPONENT_FIELD,
    FAST_DIVISION_BITS,
    GIVEN,
    LARGEST_FLOAT,
    MAGNITUDE_FIELD,
    NO_MACRO,
    STATIC,
    TOO_LARGE_TO_SCALE_BITS,
    all_at_least,
    all_below,
    can_divide_fast,
    clamp,
    divide_by_factor,
    inverse_power_of_two,
    macro_factor,
    mantissa_factor,
    max_bits,
    quantize_pass,
    scale_value,
    sum_of_squares,
)


_DYNAMIC_CANDIDATES = tl.constexpr(16)
_BLOCK_MANTISSAS = tl.constexpr(4)
_LESS_THAN_A_STEP = tl.constexpr(2.0**-18)
# 1.5 * 2**-126, as float32 bits.
_INFINITE_RATIO = tl.constexpr(0x00C00000)


@triton.jit
def _search_macro(x, amax_bits, macro_bits, SCHEME: tl.constexpr):
    """Macro bytes of the candidate ``16 * j``, ``j`` in 0..15, with the least squared error; the smallest wins a tie.

    Each error is below 1/2, so that the int32 sum over a macro block of 256 elements is less than 2**29; those over
    whole rows need int64.
    """
    wide: tl.constexpr = SCHEME.TILES or x.shape[2] > 8
    unit = inverse_power_of_two(macro_bits)
    # Quotients are zero or at least 2**-64, and no candidate leaves float32 where one is looked for.
    fast = all_at_least(amax_bits, FAST_DIVISION_BITS) & all_below(amax_bits, TOO_LARGE_TO_SCALE_BITS)
    amax = amax_bits.to(tl.float32, bitcast=True)
    factor = tl.full([1, 1, 1, 1], 1.0, tl.float32)
    m8 = tl.full([1, 1, 1, 1], 0, tl.int32)
    best = tl.zeros_like(macro_bits)
    best_error = tl.full(macro_bits.shape, 0x7FFFFFFFFFFFFFFF if wide else 0x7FFFFFFF, tl.int64 if wide else tl.int32)
    for _ in range(_DYNAMIC_CANDIDATES):
        bits = (amax * factor).to(tl.int32, bitcast=True) & MAGNITUDE_FIELD
        q, byte = quantize_pass(x * factor, bits, 0.0, False, SCHEME)
        value = divide_by_factor(q * scale_value(byte), factor, fast, SCHEME.INTERPRETED)
        error = sum_of_squares((value - x) * unit, SCHEME.TILES)
        if wide:
            error = error.to(tl.int64)
        error = tl.sum(error, axis=2, keep_dims=True)
        better = error < best_error
        best = tl.where(better, m8, best)
        best_error = tl.where(better, error, best_error)
        factor += 0.0625
        m8 += 16
    return best


@triton.jit
def _search_mantissas(x, amax_bits, fast, SCHEME: tl.constexpr):
    """Two-bit mantissas of blocks with the least squared error; the smallest wins a tie."""
    unit = inverse_power_of_two(amax_bits)
    amax = amax_bits.to(tl.float32, bitcast=True)
    factor = tl.full([1, 1, 1, 1], 1.0, tl.float32)
    mantissa = tl.full([1, 1, 1, 1], 0, tl.int32)
    best = tl.zeros_like(amax_bits)
    wide: tl.constexpr = SCHEME.TILES
    best_error = tl.full(amax_bits.shape, 0x7FFFFFFFFFFFFFFF if wide else 0x7FFFFFFF, tl.int64 if wide else tl.int32)
    for _ in range(_BLOCK_MANTISSAS):
        bits = tl.div_rn(amax, tl.broadcast_to(factor, amax.shape)).to(tl.int32, bitcast=True) & MAGNITUDE_FIELD
        z = divide_by_factor(x, factor, fast, SCHEME.INTERPRETED)
        q, byte = quantize_pass(z, bits, 0.0, False, SCHEME)
        error = (clamp(q * scale_value(byte) * factor, LARGEST_FLOAT) - x) * unit
        sum_error = sum_of_squares(error, SCHEME.TILES)
        better = sum_error < best_error
        best = tl.where(better, mantissa, best)
        best_error = tl.where(better, sum_error, best_error)
        factor += 0.25
        mantissa += 1
    return best


@triton.jit
def _static_bytes(macro_bits, BF16: tl.constexpr):
    """Static macro bytes of macro maxima: the 8 digits after the leading one of ``6 / maximum``, correctly rounded; of
    maxima from 2**127 on, anything. ``BF16`` promises that maxima are bfloat16, ``m * 2**E`` with m in [1, 2).

    Then they are those of ``1.5 / m``, without a correctly rounded division. As m is a multiple of 2**-7, 256 times the
    mantissa of that is an integer, or below the next one by at least 2**-8: so is ``1.5 / m``, in steps of 2**-9, by
    2**-17. Adding 2**-18, which no error of the division outweighs, the digits are right. Of maxima below 1.5 * 2**-126
    (subnormal ones among them), 6 over the maximum is infinite, which has none.
    """
    if BF16:
        m = ((macro_bits & 0x007F0000) | 0x3F800000).to(tl.float32, bitcast=True)
        ratio = 1.5 / m + _LESS_THAN_A_STEP
        return tl.where(macro_bits < _INFINITE_RATIO, 0, (ratio.to(tl.int32, bitcast=True) >> 15) & 0xFF)
    else:
        ratio = tl.div_rn(6.0, macro_bits.to(tl.float32, bitcast=True))
        return (ratio.to(tl.int32, bitcast=True) >> 15) & 0xFF


@triton.jit
def apply_macro(x, SCHEME: tl.constexpr, BF16: tl.constexpr = False, given=0):
    """The values to quantize, the bits of their block maxima, the factor in them (of macro blocks; of blocks when
    ``BLOCKWISE``) and the macro bytes. Without macro blocks the last two mean nothing. ``BF16`` promises that ``x`` is
    bfloat16, not rotated; ``given`` are the macro bytes of the search `GIVEN`."""
    amax_bits = max_bits(x, SCHEME.TILES, SCHEME.NATIVE)
    macro_bits = tl.max(amax_bits, axis=2, keep_dims=True)
    m8 = tl.zeros_like(macro_bits)
    factor = macro_factor(m8)
    z = x
    if SCHEME.SEARCH == BLOCKWISE:
        fast = can_divide_fast(x)
        mantissa = _search_mantissas(x, amax_bits, fast, SCHEME)
        mantissa = tl.where(amax_bits < EXPONENT_FIELD, mantissa, 0)
        m8 = tl.sum(mantissa << (2 * tl.arange(0, 4)[None, None, :, None]), axis=2, keep_dims=True)
        factor = mantissa_factor(mantissa)
        amax_bits = tl.div_rn(amax_bits.to(tl.float32, bitcast=True), factor)
        amax_bits = amax_bits.to(tl.int32, bitcast=True) & MAGNITUDE_FIELD
        z = divide_by_factor(x, factor, fast, SCHEME.INTERPRETED)
    elif SCHEME.SEARCH != NO_MACRO:
        if SCHEME.SEARCH == STATIC:
            m8 = _static_bytes(macro_bits, BF16)
        elif SCHEME.SEARCH == GIVEN:
            m8 = given
        else:
            m8 = _search_macro(x, amax_bits, macro_bits, SCHEME)
        m8 = tl.where(macro_bits < TOO_LARGE_TO_SCALE_BITS, m8, 0)
        factor = macro_factor(m8)
        # Rounding is monotonic: the maximum of the products is the product of the maximum.
        amax_bits = (amax_bits.to(tl.float32, bitcast=True) * factor).to(tl.int32, bitcast=True) & MAGNITUDE_FIELD
        z = x * factor
    return z, amax_bits, factor, m8
