# SPDX-License-Identifier: Apache-2.0
"""Blocks of a tile on their way through quantization, in registers: scales, rounding, macro factors, divisions.

A tile is ``[ROWS, macro blocks, blocks, 32]``. Values of a block have a last axis of 1, values of a macro block two of
them. With ``TILES`` the rows of a tile share their blocks (32 x 32), whose values have a first axis of 1 as well.

The results are those of the definition, evaluated with one correctly rounded float32 operation after the other. This
needs three things from the compiler:

* subnormals are not flushed (Triton's default): scale byte 0 stands for ``2**-127``, and inputs may be subnormal;
* multiplies and adds are not contracted (``enable_fp_fusion=False`` at launch): ``f * x`` is used by the residual
  ``f * x - v``, and ``alpha * v2`` by the sum ``v + alpha * v2``, where both products are inexact;
* ``tl.div_rn`` is a correctly rounded division.

``tl.fma`` is written out where a single rounding is wanted: see [`round_to_grid`] and [`divide_by_factor`].

Triton's interpreter has no fused ``tl.fma``, no bfloat16 arithmetic, and truncates when it converts to bfloat16. With
``INTERPRETED``, float64 and integer arithmetic give the same results, and bfloat16 passes as int16 bits.
"""

import triton
import triton.language as tl


EXPONENT_FIELD = tl.constexpr(0x7F800000)
MAGNITUDE_FIELD = tl.constexpr(0x7FFFFFFF)
NAN_BITS = tl.constexpr(0x7FC00000)
NAN_BYTE = tl.constexpr(255)
#: How the byte of a macro block is found.
NO_MACRO = tl.constexpr(0)
STATIC = tl.constexpr(1)
DYNAMIC = tl.constexpr(2)
BLOCK_MANTISSAS = tl.constexpr(3)

LARGEST_FLOAT = tl.constexpr(3.4028234663852886e38)
_ONE_BITS = tl.constexpr(0x3F800000)
# 2**-127, the value of scale byte 0: a float32 subnormal.
_BYTE_ZERO_BITS = tl.constexpr(0x00400000)
# 2**127: from here on, a macro factor could carry its product out of float32.
_TOO_LARGE_TO_SCALE_BITS = tl.constexpr(0x7F000000)
# Half of 1.5 * 2**23. Times the start of a value's binade it pushes the last digit on the E2M1 grid into the last
# mantissa bit, where adding it rounds to nearest, ties to even.
_HALF_ROUND_MAGIC = tl.constexpr(0.75 * 2.0**23)
_NO_FRACTION = tl.constexpr(2.0**23)
# Squared errors are cut to multiples of 2**-23.
_SQUARE_UNITS = tl.constexpr(2.0**23)
# 2**-108 as bits.
_FAST_DIVISION_BITS = tl.constexpr(19 << 23)
_FACTORS = tl.constexpr(16)


@triton.jit
def to_float(x, BF16: tl.constexpr):
    """Float32 of loaded elements; with ``BF16`` these are int16 bits of bfloat16."""
    if BF16:
        return (x.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def as_stored(values, out_ptr, INTERPRETED: tl.constexpr):
    """Float32 values as the output holds them; interpreted, int16 is bfloat16, whose NaN is 0x7FC0."""
    if INTERPRETED and out_ptr.dtype.element_ty == tl.int16:
        bits = values.to(tl.int32, bitcast=True)
        values = tl.where(values == values, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16, 0x7FC0)
    return values.to(out_ptr.dtype.element_ty)


@triton.jit
def clamp(values, largest: tl.constexpr):
    """Values cut to ``-largest..largest``; NaN stays NaN."""
    return tl.clamp(values, -largest, largest, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def max_bits(z, TILES: tl.constexpr):
    """Bits of the largest magnitude of each block. As integers, NaN > infinity > every finite magnitude."""
    bits = tl.max(z.to(tl.int32, bitcast=True) & MAGNITUDE_FIELD, axis=3, keep_dims=True)
    if TILES:
        bits = tl.max(bits, axis=0, keep_dims=True)
    return bits


@triton.jit
def scale_value(byte):
    """Float32 ``2**(byte - 127)`` of scale bytes (int32); NaN for byte 255."""
    bits = tl.where(byte == 0, _BYTE_ZERO_BITS, byte << 23)
    return tl.where(byte == NAN_BYTE, NAN_BITS, bits).to(tl.float32, bitcast=True)


@triton.jit
def macro_factor(m8):
    """Float32 ``1 + m8 / 256`` of macro bytes (int32)."""
    return ((m8 << 15) | _ONE_BITS).to(tl.float32, bitcast=True)


@triton.jit
def mantissa_factor(mantissa):
    """Float32 ``1 + m / 4`` of two-bit block mantissas (int32)."""
    return ((mantissa << 21) | _ONE_BITS).to(tl.float32, bitcast=True)


@triton.jit
def round_to_grid(y):
    """Float32 values in [-6, 6] to the nearest E2M1 value, ties to the even code. A zero result is +0.

    The products are powers of two times 0.75 * 2**23, hence exact: fused or not, the two sums are the same.
    """
    binade = tl.maximum(y.to(tl.int32, bitcast=True) & EXPONENT_FIELD, _ONE_BITS).to(tl.float32, bitcast=True)
    return tl.fma(binade, -_HALF_ROUND_MAGIC, tl.fma(binade, _HALF_ROUND_MAGIC, y))


@triton.jit
def _round_stochastically(y, noise):
    """Float32 values in [-6, 6] to one of their two neighbours on the grid, away from zero where ``noise`` (uniform in
    [0, 1)) is at least the distance to that one. A zero result is +0."""
    binade = tl.maximum(y.to(tl.int32, bitcast=True) & EXPONENT_FIELD, _ONE_BITS)
    step = (binade - (1 << 23)).to(tl.float32, bitcast=True)
    # Powers of two: the product is the quotient by the step.
    position = tl.abs(y) * ((255 << 23) - binade).to(tl.float32, bitcast=True)
    # Adding 2**23 leaves no digits for a fraction: the nearest integer, without the slow unit that has floor.
    near = (position + _NO_FRACTION) - _NO_FRACTION
    below = tl.where(near > position, near - 1.0, near)
    up = (noise >= 1.0 - (position - below)).to(tl.float32)
    magnitude = (below + up) * step
    return tl.where(y < 0, 0.0 - magnitude, magnitude)


@triton.jit
def _grid_values(z, byte, noise, STOCHASTIC: tl.constexpr, SCHEME: tl.constexpr):
    """E2M1 values of blocks at scale bytes 0..253; of blocks with byte 255, anything."""
    y = z * ((254 - byte) << 23).to(tl.float32, bitcast=True)
    if SCHEME.LIMITED:
        # 4 * 2**126 is not finite.
        limit = tl.where(byte == 253, 3.0, 6.0)
        y = tl.minimum(tl.maximum(y, -limit), limit)
    elif SCHEME.CLIPS:
        y = tl.clamp(y, -6.0, 6.0)
    if STOCHASTIC:
        return _round_stochastically(y, noise)
    else:
        return round_to_grid(y)


@triton.jit
def _inverse_power_of_two(amax_bits):
    """``2**-floor(log2 amax)``, its exponent cut to -126..127."""
    return (tl.minimum(tl.maximum(254 - (amax_bits >> 23), 1), 254) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _sum_of_squares(error, TILES: tl.constexpr):
    """Integer sums over blocks of ``error**2`` in units of 2**-23. Errors are below 1.25, hence the sums of 32 elements
    are less than 2**29; those of a whole tile need int64."""
    units = (error * error * _SQUARE_UNITS).to(tl.int32)
    total = tl.sum(units, axis=3, keep_dims=True)
    if TILES:
        total = tl.sum(total.to(tl.int64), axis=0, keep_dims=True)
    return total


@triton.jit
def _scale_bytes(z, amax_bits, SCHEME: tl.constexpr):
    """Scale bytes (int32) of blocks, given the float32 bits of their maxima; 255 for those with NaN or infinity."""
    byte = tl.maximum(((tl.minimum(amax_bits, EXPONENT_FIELD) + SCHEME.CARRY) >> 23) - 2, 0)
    byte = tl.where(amax_bits < EXPONENT_FIELD, byte, NAN_BYTE)
    if SCHEME.LEAST_SQUARES:
        first = byte
        unit = _inverse_power_of_two(amax_bits)
        error = (_grid_values(z, first, 0.0, False, SCHEME) * scale_value(first) - z) * unit
        best_error = _sum_of_squares(error, SCHEME.TILES)
        for step in tl.static_range(2):
            other = tl.where(first == NAN_BYTE, first, tl.maximum(first + (1 - 2 * step), 0))
            error = (_grid_values(z, other, 0.0, False, SCHEME) * scale_value(other) - z) * unit
            sum_error = _sum_of_squares(error, SCHEME.TILES)
            byte = tl.where(sum_error < best_error, other, byte)
            best_error = tl.minimum(sum_error, best_error)
    return byte


@triton.jit
def quantize_pass(z, amax_bits, noise, STOCHASTIC: tl.constexpr, SCHEME: tl.constexpr):
    """One quantization: E2M1 values (float32) and scale bytes of blocks. The values of blocks with byte 255 mean
    nothing. ``STOCHASTIC`` rounding uses ``noise``; a search for the scale rounds to nearest."""
    byte = _scale_bytes(z, amax_bits, SCHEME)
    return _grid_values(z, byte, noise, STOCHASTIC, SCHEME), byte


@triton.jit
def _fma(a, b, c, INTERPRETED: tl.constexpr):
    """Return ``a * b + c`` with one rounding. Interpreted, the sum is rounded to float64 first, which is harmless here:
    no exact result is so close to the middle between two float32 numbers."""
    if INTERPRETED:
        return (a.to(tl.float64) * b.to(tl.float64) + c.to(tl.float64)).to(tl.float32)
    else:
        return tl.fma(a, b, c)


@triton.jit
def can_divide_fast(values):
    """Whether all values allow [`divide_by_factor`] its fast way: a scalar."""
    bits = values.to(tl.int32, bitcast=True) & MAGNITUDE_FIELD
    # Zero becomes the largest integer, infinity the smallest.
    less = (tl.where(bits == EXPONENT_FIELD, 1, bits) - 1) & MAGNITUDE_FIELD
    return tl.min(tl.min(tl.min(tl.min(less, axis=3), axis=2), axis=1), axis=0) >= _FAST_DIVISION_BITS - 1


@triton.jit
def divide_by_factor(value, factor, fast, INTERPRETED: tl.constexpr):
    """``value / factor``, correctly rounded, for factors ``1 + m8 / 256`` (float32, broadcastable).

    ``fast`` (a scalar) promises that every value is zero, NaN, or finite and at least ``2**-108``. Then a reciprocal in
    two parts replaces the division, many times its cost, by a multiply and an fma. With ``v / f`` scaled into [1, 2),
    whose float32 numbers are ``2**-23`` apart:

    * before the final rounding the error is below ``2**-39``: high is off by ``2**-22`` at most (a fast division, of
      two units), high + low by ``2**-43``, and rounding ``v * low`` costs ``2**-46`` of v, or unscaled ``2**-150``
      where that product is subnormal;
    * the middle M between two neighbours is never nearer than ``2**-33``: M is an odd multiple of ``2**-24`` and f one
      of ``2**-8``, so ``v - M * f`` is a multiple of ``2**-32``, and not zero because ``M * f`` has more significant
      bits than v.
    """
    if fast:
        high = 1.0 / factor
        low = _fma(-high, factor, tl.full(factor.shape, 1.0, tl.float32), INTERPRETED) * high
        quotient = _fma(value, tl.broadcast_to(high, value.shape), value * low, INTERPRETED)
    else:
        quotient = tl.div_rn(value, tl.broadcast_to(factor, value.shape))
    return quotient


@triton.jit
def _search_mantissas(x, amax_bits, fast, SCHEME: tl.constexpr):
    """Two-bit mantissas of blocks with the least squared error; the smallest wins a tie."""
    unit = _inverse_power_of_two(amax_bits)
    amax = amax_bits.to(tl.float32, bitcast=True)
    factor = tl.full([1, 1, 1, 1], 1.0, tl.float32)
    mantissa = tl.full([1, 1, 1, 1], 0, tl.int32)
    best = tl.zeros_like(amax_bits)
    wide: tl.constexpr = SCHEME.TILES
    best_error = tl.full(amax_bits.shape, 0x7FFFFFFFFFFFFFFF if wide else 0x7FFFFFFF, tl.int64 if wide else tl.int32)
    for _ in range(SCHEME.MANTISSAS):
        bits = tl.div_rn(amax, tl.broadcast_to(factor, amax.shape)).to(tl.int32, bitcast=True) & MAGNITUDE_FIELD
        z = divide_by_factor(x, factor, fast, SCHEME.INTERPRETED)
        q, byte = quantize_pass(z, bits, 0.0, False, SCHEME)
        error = (clamp(q * scale_value(byte) * factor, LARGEST_FLOAT) - x) * unit
        sum_error = _sum_of_squares(error, SCHEME.TILES)
        better = sum_error < best_error
        best = tl.where(better, mantissa, best)
        best_error = tl.where(better, sum_error, best_error)
        factor += 0.25
        mantissa += 1
    return best


@triton.jit
def _search_factors(x, amax_bits, macro_bits, SCHEME: tl.constexpr):
    """Macro bytes of the candidate ``16 * j``, ``j`` in 0..15, with the least squared error; the smallest wins a tie.

    Each error is below 1/2, so that the int32 sum over a macro block of 256 elements is less than 2**29.
    """
    wide: tl.constexpr = SCHEME.TILES
    unit = _inverse_power_of_two(macro_bits)
    amax = amax_bits.to(tl.float32, bitcast=True)
    factor = tl.full([1, 1, 1, 1], 1.0, tl.float32)
    m8 = tl.full([1, 1, 1, 1], 0, tl.int32)
    best = tl.zeros_like(macro_bits)
    best_error = tl.full(macro_bits.shape, 0x7FFFFFFFFFFFFFFF if wide else 0x7FFFFFFF, tl.int64 if wide else tl.int32)
    for _ in range(_FACTORS):
        bits = (amax * factor).to(tl.int32, bitcast=True) & MAGNITUDE_FIELD
        q, byte = quantize_pass(x * factor, bits, 0.0, False, SCHEME)
        value = q * scale_value(byte)
        value = divide_by_factor(value, factor, can_divide_fast(value), SCHEME.INTERPRETED)
        error = tl.sum(_sum_of_squares((value - x) * unit, SCHEME.TILES), axis=2, keep_dims=True)
        better = error < best_error
        best = tl.where(better, m8, best)
        best_error = tl.where(better, error, best_error)
        factor += 0.0625
        m8 += 16
    return best


@triton.jit
def apply_macro(x, SCHEME: tl.constexpr):
    """Return the values to quantize, the bits of their block maxima, the factor in them (of macro blocks; of blocks
    with `BLOCK_MANTISSAS`) and the macro bytes. Without macro blocks the last two mean nothing."""
    amax_bits = max_bits(x, SCHEME.TILES)
    macro_bits = tl.max(amax_bits, axis=2, keep_dims=True)
    m8 = tl.zeros_like(macro_bits)
    factor = macro_factor(m8)
    z = x
    if SCHEME.SEARCH == BLOCK_MANTISSAS:
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
            # The 8 digits after the leading one of 6 / maximum.
            ratio = tl.div_rn(6.0, macro_bits.to(tl.float32, bitcast=True))
            m8 = (ratio.to(tl.int32, bitcast=True) >> 15) & 0xFF
        else:
            m8 = _search_factors(x, amax_bits, macro_bits, SCHEME)
        m8 = tl.where(macro_bits < _TOO_LARGE_TO_SCALE_BITS, m8, 0)
        factor = macro_factor(m8)
        # Rounding is monotonic: the maximum of the products is the product of the maximum.
        amax_bits = (amax_bits.to(tl.float32, bitcast=True) * factor).to(tl.int32, bitcast=True) & MAGNITUDE_FIELD
        z = x * factor
    return z, amax_bits, factor, m8


@triton.jit
def without_factor(value, factor, SCHEME: tl.constexpr):
    """Dequantized values, given the factors that [`apply_macro`] put into them, cut to what the output holds."""
    if SCHEME.SEARCH == BLOCK_MANTISSAS:
        value = value * factor
    elif SCHEME.SEARCH != NO_MACRO:
        value = divide_by_factor(value, factor, can_divide_fast(value), SCHEME.INTERPRETED)
    return clamp(value, SCHEME.LARGEST)
