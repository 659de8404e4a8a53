# SPDX-License-Identifier: Apache-2.0
"""The fused quantize-dequantize kernel: one read of a matrix, one write of its MXFP4 values.

Each program owns a tile of ``ROWS x COLS`` elements, held as ``[ROWS, macro blocks, blocks, 32]``: the maxima of blocks
and macro blocks are plain reductions, and the innermost axis is contiguous in memory.

The result is that of the definition evaluated with one correctly rounded float32 operation after the other. This asks
three things of the compiler, and the tests look for them in the generated code:

* subnormals are not flushed (Triton's default): scale byte 0 stands for ``2**-127``, and inputs may be subnormal;
* multiplies and adds are not contracted (``enable_fp_fusion=False`` at launch): ``f * x`` is used by the residual
  ``f * x - v``, and ``alpha * v2`` by the sum ``v + alpha * v2``, where both products are inexact;
* ``tl.div_rn`` is a correctly rounded division.

``tl.fma`` is written out where a single rounding is what is wanted: see [`_round_to_grid`] and [`_divide_by_factor`].

Triton's interpreter has no fused ``tl.fma``, and its conversion to bfloat16 truncates: ``INTERPRETED`` replaces them by
float64 and by integer arithmetic with the same results.
"""

import triton
import triton.language as tl


_EXPONENT_FIELD = tl.constexpr(0x7F800000)
_MAGNITUDE_FIELD = tl.constexpr(0x7FFFFFFF)
_ONE_BITS = tl.constexpr(0x3F800000)
_NAN_BITS = tl.constexpr(0x7FC00000)
# 2**-127, the value of scale byte 0: a float32 subnormal.
_BYTE_ZERO_BITS = tl.constexpr(0x00400000)
# 2**127: from here on, a macro factor could carry its product out of float32.
_TOO_LARGE_TO_SCALE_BITS = tl.constexpr(0x7F000000)
# Half of 1.5 * 2**23. Times the start of a value's binade it pushes the last digit on the E2M1 grid into the last
# mantissa bit, where adding it rounds to nearest, ties to even.
_HALF_ROUND_MAGIC = tl.constexpr(0.75 * 2.0**23)
# The largest value that both lies on a block's grid and is finite in float32.
_LARGEST_PRODUCT = tl.constexpr(3.0 * 2.0**126)
# 2**-60 and 2**-20: block maxima and fallback weights from which on [`_divide_by_factor`] can take its fast way.
_FAST_DIVISION_BITS = tl.constexpr(67 << 23)
_FAST_DIVISION_ALPHA = tl.constexpr(2.0**-20)


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
def _max_bits(z):
    """Bits of the largest magnitude along the last axis. As integers, NaN > infinity > every finite magnitude."""
    return tl.max(z.to(tl.int32, bitcast=True) & _MAGNITUDE_FIELD, axis=-1)


@triton.jit
def _round_to_grid(y):
    """Float32 values in [-6, 6] to the nearest E2M1 value, ties to the even code. A zero result is +0.

    The products are powers of two times 0.75 * 2**23, hence exact: fused or not, the two sums are the same.
    """
    binade = tl.maximum(y.to(tl.int32, bitcast=True) & _EXPONENT_FIELD, _ONE_BITS).to(tl.float32, bitcast=True)
    return tl.fma(binade, -_HALF_ROUND_MAGIC, tl.fma(binade, _HALF_ROUND_MAGIC, y))


@triton.jit
def _quantize_dequantize(z, amax_bits, CARRY: tl.constexpr, CLIPS: tl.constexpr):
    """One pass: the MXFP4 values of blocks ``[..., 32]``, given the float32 bits of their maxima ``[...]``.

    ``CARRY`` is the scale rule: what is added to the bits of the maximum before its exponent is read. ``CLIPS`` says
    that the rule lets magnitudes exceed 6 scales. A block with NaN or infinity becomes NaN through its scale.
    """
    # At most 253: the largest finite maximum has exponent field 254.
    byte = tl.maximum(((tl.minimum(amax_bits, _EXPONENT_FIELD) + CARRY) >> 23) - 2, 0)
    scale_bits = tl.where(byte == 0, _BYTE_ZERO_BITS, byte << 23)
    scale_bits = tl.where(amax_bits < _EXPONENT_FIELD, scale_bits, _NAN_BITS)
    y = z * tl.expand_dims(((254 - byte) << 23).to(tl.float32, bitcast=True), -1)
    if CLIPS:
        y = tl.clamp(y, -6.0, 6.0)
    return _round_to_grid(y) * tl.expand_dims(scale_bits.to(tl.float32, bitcast=True), -1)


@triton.jit
def _divide_by_factor(value, factor, fast, INTERPRETED: tl.constexpr):
    """``value / factor``, correctly rounded, for factors ``1 + m8 / 256`` (float32, broadcastable) and finite values.

    ``fast`` (a scalar) promises that every value is zero or at least ``2**-108``. Then a reciprocal in two parts
    replaces the division, many times its cost, by a multiply and an fma. With ``v / f`` scaled into [1, 2), whose
    float32 numbers are ``2**-23`` apart:

    * before the final rounding the error is below ``2**-39``: high + low misses ``1 / f`` by at most ``2**-48``, and
      rounding ``v * low`` costs ``2**-49`` of v, or unscaled ``2**-150`` where that product is subnormal;
    * the middle M between two neighbours is never nearer than ``2**-33``: M is an odd multiple of ``2**-24`` and f one
      of ``2**-8``, so ``v - M * f`` is a multiple of ``2**-32``, and not zero because ``M * f`` has more significant
      bits than v.
    """
    if fast:
        high = tl.div_rn(1.0, factor)
        low = _fma(-high, factor, tl.full(factor.shape, 1.0, tl.float32), INTERPRETED) * high
        quotient = _fma(value, tl.broadcast_to(high, value.shape), value * low, INTERPRETED)
    else:
        quotient = tl.div_rn(value, tl.broadcast_to(factor, value.shape))
    return quotient


@triton.jit(do_not_specialize=["n_rows", "col_tiles"])
def fake_quantize_kernel(
    x_ptr,
    out_ptr,
    n_rows,
    n_cols,
    x_row_stride,
    col_tiles,
    alpha,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    MACRO: tl.constexpr,
    HAS_MACRO: tl.constexpr,
    HAS_FALLBACK: tl.constexpr,
    CARRY: tl.constexpr,
    CLIPS: tl.constexpr,
    LARGEST: tl.constexpr,
    BF16: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """``out[n_rows, n_cols]`` (contiguous) from ``x`` with unit stride along columns, one program per tile.

    ``col_tiles`` tiles lie side by side. ``ROWS == 1`` means that the matrix is one row.

    bfloat16 arrives as int16 bits (``BF16``); interpreted, it leaves as such too. ``LARGEST`` is the largest finite
    output.
    """
    pid = tl.program_id(0)
    if ROWS == 1:
        row_start = 0
        col_start = pid.to(tl.int64) * COLS
    else:
        row_start = (pid // col_tiles).to(tl.int64) * ROWS
        col_start = (pid % col_tiles).to(tl.int64) * COLS

    # [ROWS, COLS / MACRO, MACRO / 32, 32]; offsets inside a tile row are int32, its start is int64.
    macros = tl.arange(0, COLS // MACRO)[None, :, None, None]
    blocks = tl.arange(0, MACRO // 32)[None, None, :, None]
    lanes = tl.arange(0, 32)[None, None, None, :]
    rows = row_start + tl.arange(0, ROWS)[:, None, None, None]
    offsets = macros * MACRO + blocks * 32 + lanes
    mask = (rows < n_rows) & (offsets < n_cols - col_start)

    x = tl.load(x_ptr + col_start + rows * x_row_stride + offsets, mask=mask, other=0)
    if BF16:
        z = (x.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        z = x.to(tl.float32)

    amax_bits = _max_bits(z)
    if HAS_MACRO:
        macro_bits = tl.max(amax_bits, axis=-1)
        ratio = tl.div_rn(6.0, macro_bits.to(tl.float32, bitcast=True))
        m8 = (ratio.to(tl.int32, bitcast=True) >> 15) & 0xFF
        m8 = tl.where(macro_bits < _TOO_LARGE_TO_SCALE_BITS, m8, 0)
        factor = tl.expand_dims(((m8 << 15) | _ONE_BITS).to(tl.float32, bitcast=True), -1)
        # Rounding is monotonic: the maximum of the products is the product of the maximum.
        amax_bits = (amax_bits.to(tl.float32, bitcast=True) * factor).to(tl.int32, bitcast=True) & _MAGNITUDE_FIELD
        factor = tl.expand_dims(factor, -1)
        z = z * factor

    value = _quantize_dequantize(z, amax_bits, CARRY, CLIPS)
    if CARRY > 0 and LARGEST > 65504.0:
        # Only rules that round up reach byte 253, where 4 * scale is not finite, and only beyond float16.
        value = tl.clamp(value, -_LARGEST_PRODUCT, _LARGEST_PRODUCT, propagate_nan=tl.PropagateNan.ALL)
    # Least bits of a maximum, minus one: zero, which any division leaves alone, becomes the largest.
    weakest = (amax_bits - 1) & _MAGNITUDE_FIELD
    fast = True
    if HAS_FALLBACK:
        residual = z - value
        residual_bits = _max_bits(residual)
        value = value + _quantize_dequantize(residual, residual_bits, CARRY, CLIPS) * alpha
        weakest = tl.minimum(weakest, (residual_bits - 1) & _MAGNITUDE_FIELD)
        fast = alpha >= _FAST_DIVISION_ALPHA
        if LARGEST > 65504.0:
            # Only values from a maximum of 2**127 on are cut, and its factor is 1 (a smaller maximum times its static
            # factor stays below 3.01 * 2**126): the same as clamping after the division.
            value = tl.clamp(value, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    if HAS_MACRO:
        # A nonzero value is then at least 2**-64, or a sum that is a multiple of alpha * 2**-88: no less than 2**-108.
        fast = fast & (tl.min(tl.min(tl.min(weakest, axis=2), axis=1), axis=0) >= _FAST_DIVISION_BITS - 1)
        value = _divide_by_factor(value, factor, fast, INTERPRETED)
    if LARGEST <= 65504.0:
        value = tl.clamp(value, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)

    if BF16 and INTERPRETED:
        bits = value.to(tl.int32, bitcast=True)
        out = tl.where(value == value, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16, 0x7FC0).to(tl.int16)
    else:
        out = value.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + col_start + rows * n_cols + offsets, out, mask=mask)
