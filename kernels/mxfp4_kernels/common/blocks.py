# SPDX-License-Identifier: Apache-2.0
"""Blocks of a tile on their way through quantization, in registers: scales, rounding, divisions.

A tile is ``[ROWS, macro blocks, blocks, 32]``; what belongs to a block has a last axis of 1, what belongs to a macro
block two of them. With ``TILES`` the rows of a tile share their blocks (32 x 32), and what belongs to those has a first
axis of 1 as well.

The results are those of the definition evaluated with one correctly rounded float32 operation after the other. This
asks three things of the compiler, and the tests look for them in the generated code:

* subnormals are not flushed (Triton's default): scale byte 0 stands for ``2**-127``, and inputs may be subnormal;
* multiplies and adds are not contracted (``enable_fp_fusion=False`` at launch): ``f * x`` is used by the residual
  ``f * x - v``, and ``alpha * v2`` by the sum ``v + alpha * v2``, where both products are inexact;
* ``tl.div_rn`` is a correctly rounded division.

``tl.fma`` is written out where a single rounding is what is wanted: see [`round_to_grid`] and [`divide_by_factor`].

Triton's interpreter has no fused ``tl.fma``, and its conversion to bfloat16 truncates: ``INTERPRETED`` replaces them by
float64 and by integer arithmetic with the same results.
"""

import triton
import triton.language as tl


EXPONENT_FIELD = tl.constexpr(0x7F800000)
MAGNITUDE_FIELD = tl.constexpr(0x7FFFFFFF)
ONE_BITS = tl.constexpr(0x3F800000)
NAN_BYTE = tl.constexpr(255)
# 2**-60: block maxima from which on [`divide_by_factor`] can take its fast way with the values of their blocks.
FAST_DIVISION_BITS = tl.constexpr(67 << 23)
#: How the byte of a macro block is found.
NO_MACRO = tl.constexpr(0)
STATIC = tl.constexpr(1)
DYNAMIC = tl.constexpr(2)
BLOCKWISE = tl.constexpr(3)
#: It was found before, and is read.
GIVEN = tl.constexpr(4)

_NAN_BITS = tl.constexpr(0x7FC00000)
# 2**-127, the value of scale byte 0: a float32 subnormal.
BYTE_ZERO_BITS = tl.constexpr(0x00400000)
# 2**127: from here on, a macro factor could carry its product out of float32.
TOO_LARGE_TO_SCALE_BITS = tl.constexpr(0x7F000000)
# Half of 1.5 * 2**23. Times the start of a value's binade it pushes the last digit on the E2M1 grid into the last
# mantissa bit, where adding it rounds to nearest, ties to even.
_HALF_ROUND_MAGIC = tl.constexpr(0.75 * 2.0**23)
_NO_FRACTION = tl.constexpr(2.0**23)
# Squared errors are cut to multiples of 2**-23.
_SQUARE_UNITS = tl.constexpr(2.0**23)
LARGEST_FLOAT = tl.constexpr(3.4028234663852886e38)
# 2**-108 as bits.
_FAST_VALUE_BITS = tl.constexpr(19 << 23)


@triton.jit
def _fma(a, b, c, INTERPRETED: tl.constexpr):
    """``a * b + c`` with one rounding.

    Interpreted, the sum is rounded to float64 first: harmless here, where no exact result is so close to the middle
    between two float32 numbers, but short of exact in general.
    """
    if INTERPRETED:
        return (a.to(tl.float64) * b.to(tl.float64) + c.to(tl.float64)).to(tl.float32)
    else:
        return tl.fma(a, b, c)


@triton.jit
def clamp(values, largest: tl.constexpr):
    """Values cut to ``-largest..largest``; NaN stays NaN."""
    return tl.clamp(values, -largest, largest, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def max_bits(z, TILES: tl.constexpr, NATIVE: tl.constexpr = False):
    """Bits of the largest magnitude of each block. As integers, NaN > infinity > every finite magnitude. ``NATIVE`` is
    for GPUs whose maximum takes magnitudes and keeps NaN in one instruction."""
    if NATIVE:
        bits = tl.reduce(tl.abs(z), 3, _larger, keep_dims=True).to(tl.int32, bitcast=True)
    else:
        bits = tl.max(z.to(tl.int32, bitcast=True) & MAGNITUDE_FIELD, axis=3, keep_dims=True)
    if TILES:
        bits = tl.max(bits, axis=0, keep_dims=True)
    return bits


@triton.jit
def lowered(bits):
    """Bits of magnitudes less one; the largest for zero, which any division leaves alone."""
    return (bits - 1) & MAGNITUDE_FIELD


@triton.jit
def all_at_least(bits, LEAST: tl.constexpr):
    """Whether every magnitude, given as float32 bits, is zero or at least the one with the bits ``LEAST``: a scalar."""
    return none_below(lowered(bits), LEAST)


@triton.jit
def none_below(less, LEAST: tl.constexpr):
    """[`all_at_least`] of what [`lowered`] gives."""
    return tl.min(tl.min(tl.min(tl.min(less, axis=3), axis=2), axis=1), axis=0) >= LEAST - 1


@triton.jit
def all_below(bits, LIMIT: tl.constexpr):
    """Whether every magnitude, given as float32 bits, is less than the one with the bits ``LIMIT``: a scalar."""
    return tl.max(tl.max(tl.max(tl.max(bits, axis=3), axis=2), axis=1), axis=0) < LIMIT


@triton.jit
def round_to_grid(y, one_bits):
    """Float32 values in [-6, 6] to the nearest E2M1 value, ties to the even code. A zero result is +0. Values and grid
    may be those times a power of two from 2**-40 to 2**6, whose float32 bits ``one_bits`` are.

    The products are powers of two times 0.75 * 2**23, hence exact: fused or not, the two sums are the same.
    """
    binade = tl.maximum(y.to(tl.int32, bitcast=True) & EXPONENT_FIELD, one_bits).to(tl.float32, bitcast=True)
    return tl.fma(binade, -_HALF_ROUND_MAGIC, tl.fma(binade, _HALF_ROUND_MAGIC, y))


@triton.jit
def scale_value(byte):
    """Float32 ``2**(byte - 127)`` of scale bytes (int32); NaN for byte 255."""
    bits = tl.where(byte == 0, BYTE_ZERO_BITS, byte << 23)
    return tl.where(byte == NAN_BYTE, _NAN_BITS, bits).to(tl.float32, bitcast=True)


@triton.jit
def macro_factor(m8):
    """Float32 ``1 + m8 / 256`` of macro bytes (int32)."""
    return ((m8 << 15) | ONE_BITS).to(tl.float32, bitcast=True)


@triton.jit
def mantissa_factor(mantissa):
    """Float32 ``1 + m / 4`` of two-bit block mantissas (int32)."""
    return ((mantissa << 21) | ONE_BITS).to(tl.float32, bitcast=True)


@triton.jit
def inverse_power_of_two(amax_bits):
    """``2**-floor(log2 amax)``, its exponent cut to -126..127."""
    return (tl.minimum(tl.maximum(254 - (amax_bits >> 23), 1), 254) << 23).to(tl.float32, bitcast=True)


@triton.jit
def sum_of_squares(error, TILES: tl.constexpr):
    """Integer sums over blocks of ``error**2`` in units of 2**-23. Errors are below 1.25, hence those of 32 elements
    are less than 2**29; of a whole tile they need int64."""
    units = (error * error * _SQUARE_UNITS).to(tl.int32)
    total = tl.sum(units, axis=3, keep_dims=True)
    if TILES:
        total = tl.sum(total.to(tl.int64), axis=0, keep_dims=True)
    return total


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
        return round_stochastically(y, noise)
    else:
        return round_to_grid(y, ONE_BITS)


@triton.jit
def round_stochastically(y, noise):
    """Float32 values in [-6, 6] to one of their two neighbours on the grid, away from zero where ``noise`` (uniform in
    [0, 1)) is at least the distance to that one. A zero result is +0."""
    binade = tl.maximum(y.to(tl.int32, bitcast=True) & EXPONENT_FIELD, ONE_BITS)
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
def scale_bytes(z, amax_bits, SCHEME: tl.constexpr):
    """Scale bytes (int32) of blocks, given the float32 bits of their maxima; 255 for those with NaN or infinity."""
    byte = tl.maximum(((tl.minimum(amax_bits, EXPONENT_FIELD) + SCHEME.CARRY) >> 23) - 2, 0)
    byte = tl.where(amax_bits < EXPONENT_FIELD, byte, NAN_BYTE)
    if SCHEME.LEAST_SQUARES:
        first = byte
        unit = inverse_power_of_two(amax_bits)
        error = (_grid_values(z, first, 0.0, False, SCHEME) * scale_value(first) - z) * unit
        best_error = sum_of_squares(error, SCHEME.TILES)
        for step in tl.static_range(2):
            other = tl.where(first == NAN_BYTE, first, tl.maximum(first + (1 - 2 * step), 0))
            error = (_grid_values(z, other, 0.0, False, SCHEME) * scale_value(other) - z) * unit
            sum_error = sum_of_squares(error, SCHEME.TILES)
            byte = tl.where(sum_error < best_error, other, byte)
            best_error = tl.minimum(sum_error, best_error)
    return byte


@triton.jit
def quantize_pass(z, amax_bits, noise, STOCHASTIC: tl.constexpr, SCHEME: tl.constexpr):
    """One quantization: E2M1 values (float32) of blocks, and their [`scale_bytes`]. The values of blocks with byte 255
    mean nothing. ``noise`` is what ``STOCHASTIC`` rounding takes; a search for the scale rounds to nearest.
    """
    byte = scale_bytes(z, amax_bits, SCHEME)
    return _grid_values(z, byte, noise, STOCHASTIC, SCHEME), byte


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
def can_divide_fast(values):
    """Whether any values at all allow [`divide_by_factor`] its fast way: a scalar."""
    bits = values.to(tl.int32, bitcast=True) & MAGNITUDE_FIELD
    return all_at_least(tl.where(bits == EXPONENT_FIELD, 1, bits), _FAST_VALUE_BITS)
