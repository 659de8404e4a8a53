# SPDX-License-Identifier: Apache-2.0
"""The fused quantize-dequantize kernel: one read of a matrix, one write of its MXFP4 values.

Each program owns a tile of ``ROWS x COLS`` elements, held as ``[ROWS, macro blocks, blocks, 32]`` so that block and macro
maxima are plain reductions and the innermost axis is contiguous in memory.

Every float32 operation is one correctly rounded IEEE operation with subnormals, in the order of the definition. That
needs three things from the compiler, and the tests look for each of them in the generated code:

* no flushing of subnormals (Triton's default): scale byte 0 stands for ``2**-127``, and inputs may be subnormal;
* no contraction of a multiply and an add (``enable_fp_fusion=False`` at launch): ``f * x`` is used by the residual
  ``f * x - v`` and ``alpha * v2`` by the sum ``v + alpha * v2``, and both products are inexact;
* a correctly rounded division (``tl.div_rn``) by the macro factor.

The two ``tl.fma`` of the grid rounding are the only fused operations: their product is a power of two times 1.5, exact,
so that they equal a multiply followed by an add.
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


@triton.jit
def _round_to_grid(y):
    """Float32 values in [-6, 6] to the nearest E2M1 value, ties to the even code. A zero result is +0."""
    binade = tl.maximum(y.to(tl.int32, bitcast=True) & _EXPONENT_FIELD, _ONE_BITS).to(tl.float32, bitcast=True)
    return tl.fma(binade, -_HALF_ROUND_MAGIC, tl.fma(binade, _HALF_ROUND_MAGIC, y))


@triton.jit
def _quantize_dequantize(z, amax_bits, CARRY: tl.constexpr, CLAMP: tl.constexpr, CAN_OVERFLOW: tl.constexpr):
    """One pass: the MXFP4 values of blocks ``[..., 32]``, given the float32 bits of their maxima ``[...]``.

    ``CARRY`` is the scale rule: what is added to the bits of the maximum before its exponent is read. ``CLAMP``: values
    beyond the grid may occur. ``CAN_OVERFLOW``: so may a block whose ``4 * scale`` leaves float32 (byte 253; bytes above
    it cannot, the largest finite maximum gives 253). A block with NaN or infinity becomes NaN through its scale.
    """
    byte = tl.maximum(((tl.minimum(amax_bits, _EXPONENT_FIELD) + CARRY) >> 23) - 2, 0)
    scale_bits = tl.where(byte == 0, _BYTE_ZERO_BITS, byte << 23)
    scale_bits = tl.where(amax_bits < _EXPONENT_FIELD, scale_bits, _NAN_BITS)
    scale = tl.expand_dims(scale_bits.to(tl.float32, bitcast=True), -1)
    inverse = tl.expand_dims(((254 - byte) << 23).to(tl.float32, bitcast=True), -1)
    y = z * inverse
    if CAN_OVERFLOW:
        limit = tl.expand_dims(tl.where(byte < 253, 6.0, 3.0), -1)
        y = tl.minimum(tl.maximum(y, -limit), limit)
    elif CLAMP:
        y = tl.minimum(tl.maximum(y, -6.0), 6.0)
    return _round_to_grid(y) * scale


@triton.jit
def _max_bits(z):
    """Bits of the largest magnitude along the last axis. As integers, NaN > infinity > every finite magnitude."""
    return tl.max(z.to(tl.int32, bitcast=True) & _MAGNITUDE_FIELD, axis=-1)


@triton.jit
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
    BF16_ROUND_BY_HAND: tl.constexpr,
):
    """``out[n_rows, n_cols]`` (contiguous) from ``x`` with unit stride along columns; one program per tile.

    bfloat16 arrives as int16 bits (``BF16``). ``LARGEST`` is the largest finite output. ``BF16_ROUND_BY_HAND`` is for
    the interpreter, whose own conversion to bfloat16 truncates: ``out`` is then int16 as well.
    """
    pid = tl.program_id(0)
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
        m8 = (tl.div_rn(6.0, macro_bits.to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True) >> 15) & 0xFF
        m8 = tl.where(macro_bits < _TOO_LARGE_TO_SCALE_BITS, m8, 0)
        factor = tl.expand_dims((_ONE_BITS | (m8 << 15)).to(tl.float32, bitcast=True), -1)
        amax_bits = (amax_bits.to(tl.float32, bitcast=True) * factor).to(tl.int32, bitcast=True) & _MAGNITUDE_FIELD
        factor = tl.expand_dims(factor, -1)
        z = z * factor

    # Only the rules that round up reach byte 253, and only from magnitudes that float16 does not have.
    CAN_OVERFLOW: tl.constexpr = CARRY > 0 and LARGEST > 65504.0
    value = _quantize_dequantize(z, amax_bits, CARRY, CLIPS, CAN_OVERFLOW)
    if HAS_FALLBACK:
        residual = z - value
        value = value + _quantize_dequantize(residual, _max_bits(residual), CARRY, CLIPS, False) * alpha
    if HAS_MACRO:
        value = tl.div_rn(value, tl.broadcast_to(factor, value.shape))
    if HAS_FALLBACK or LARGEST <= 65504.0:
        value = tl.clamp(value, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)

    if BF16_ROUND_BY_HAND:
        bits = value.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        out = tl.where(value == value, rounded, 0x7FC0).to(tl.int16)
    else:
        out = value.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + col_start + rows * n_cols + offsets, out, mask=mask)
