# SPDX-License-Identifier: Apache-2.0
"""Products ``a [M, K] b [N, K]^T`` of quantized operands: folded E4M3 and packed MXFP4.

Tiles of the output are visited in groups of ``GROUP_M`` rows of tiles, so that those that run at the same time read the
same operands from the second-level cache. Rows beyond the last are read as the last; only stores are masked.

``STEPS`` is the number of steps along the contraction for the interpreter, which in Triton 3.6 cannot loop up to an
argument; compiled code, which is to serve all lengths, computes it.
"""

import triton
import triton.language as tl

from ..common.blocks import macro_factor, scale_value
from ..common.elements import as_stored, e2m1_values


@triton.jit
def _tile(n_rows, n_cols, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """Row and column of this program's tile."""
    pid = tl.program_id(0)
    tiles_m, tiles_n = tl.cdiv(n_rows, BLOCK_M), tl.cdiv(n_cols, BLOCK_N)
    first = pid // (GROUP_M * tiles_n) * GROUP_M
    height = tl.minimum(tiles_m - first, GROUP_M)
    in_group = pid % (GROUP_M * tiles_n)
    return first + in_group % height, in_group // height


@triton.jit
def _store(
    out_ptr,
    bias_ptr,
    values,
    rows,
    cols,
    n_rows,
    n_cols,
    INTERPRETED: tl.constexpr,
):
    """Add the bias in float32 and store in the output's dtype; interpreted, bfloat16 leaves as bits (int16)."""
    if bias_ptr is not None:
        values += tl.load(bias_ptr + cols, mask=cols < n_cols, other=0).to(tl.float32)[None, :]
    mask = (rows[:, None] < n_rows) & (cols[None, :] < n_cols)
    at = out_ptr + rows[:, None].to(tl.int64) * n_cols + cols[None, :]
    tl.store(at, as_stored(values, out_ptr, INTERPRETED), mask=mask)


@triton.jit
def e4m3_values(bits):
    """Float32 values of E4M3 bytes, for the interpreter."""
    wide = bits.to(tl.int32)
    magnitude = wide & 0x7F
    normal = ((magnitude + 960) << 20).to(tl.float32, bitcast=True)
    value = tl.where(magnitude >= 8, normal, magnitude.to(tl.float32) * 0.001953125)
    value = tl.where(magnitude == 0x7F, float("nan"), value)
    return tl.where(wide >= 0x80, -value, value)


@triton.jit(do_not_specialize=["n_rows"])
def matmul_e4m3_kernel(
    a_ptr,
    a_scale_ptr,
    b_ptr,
    b_scale_ptr,
    bias_ptr,
    out_ptr,
    n_rows,
    n_cols,
    length,
    PER_GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP_M: tl.constexpr,
    STEPS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """``out [n_rows, n_cols]`` from elements ``[.., length]``, contiguous, ``length`` a multiple of 128, and scales
    ``[length / 128, ..]`` (``PER_GROUP``) or ``[..]``. Partial sums of 128 products leave the tensor cores, which keep
    few bits of them, and are added up in float32."""
    tile_m, tile_n = _tile(n_rows, n_cols, BLOCK_M, BLOCK_N, GROUP_M)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    from_rows, from_cols = tl.minimum(rows, n_rows - 1), tl.minimum(cols, n_cols - 1)
    k = tl.arange(0, 128)
    a_at = a_ptr + from_rows[:, None].to(tl.int64) * length + k[None, :]
    b_at = b_ptr + from_cols[None, :].to(tl.int64) * length + k[:, None]
    a_scale_at, b_scale_at = a_scale_ptr + from_rows, b_scale_ptr + from_cols
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for _ in range(STEPS if INTERPRETED else length // 128):
        a, b = tl.load(a_at), tl.load(b_at)
        if INTERPRETED:
            a, b = e4m3_values(a), e4m3_values(b)
        if PER_GROUP:
            scale = tl.load(a_scale_at)[:, None] * tl.load(b_scale_at)[None, :]
            total += tl.dot(a, b) * scale
            a_scale_at += n_rows
            b_scale_at += n_cols
        else:
            total = tl.dot(a, b, total, max_num_imprecise_acc=128)
        a_at += 128
        b_at += 128
    if not PER_GROUP:
        total = total * tl.load(a_scale_at)[:, None] * tl.load(b_scale_at)[None, :]
    _store(out_ptr, bias_ptr, total, rows, cols, n_rows, n_cols, INTERPRETED)


@triton.jit
def _mxfp4_values(codes, byte, FLOAT32: tl.constexpr):
    """Values ``[R, 128]`` of packed codes ``[R, 64]`` and scale bytes ``[R, 4]``: all of them bfloat16 numbers."""
    element = tl.reshape(e2m1_values(codes), [codes.shape[0], 4, 32])
    value = tl.reshape(element * scale_value(byte.to(tl.int32))[:, :, None], [codes.shape[0], 128])
    return value if FLOAT32 else value.to(tl.bfloat16)


@triton.jit(do_not_specialize=["n_rows"])
def matmul_mxf4_kernel(
    a_ptr,
    a_scale_ptr,
    a_macro_ptr,
    b_ptr,
    b_scale_ptr,
    b_macro_ptr,
    bias_ptr,
    out_ptr,
    n_rows,
    n_cols,
    n_codes,
    n_blocks,
    n_macros,
    MACRO: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP_M: tl.constexpr,
    NATIVE: tl.constexpr,
    STEPS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """``out [n_rows, n_cols]`` from packed codes ``[.., n_codes]``, scale bytes ``[.., n_blocks]`` and, with ``MACRO``,
    macro bytes ``[.., n_macros]`` of 128 elements, all contiguous. Without native instructions (``NATIVE``) values are
    unpacked to bfloat16, which holds them; macro factors divide partial sums of 128 products either way."""
    tile_m, tile_n = _tile(n_rows, n_cols, BLOCK_M, BLOCK_N, GROUP_M)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    from_rows = tl.minimum(rows, n_rows - 1)[:, None].to(tl.int64)
    from_cols = tl.minimum(cols, n_cols - 1)[:, None].to(tl.int64)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(STEPS if INTERPRETED else tl.cdiv(n_codes, 64)):
        at, at_scale = step * 64 + tl.arange(0, 64)[None, :], step * 4 + tl.arange(0, 4)[None, :]
        a = tl.load(a_ptr + from_rows * n_codes + at, mask=at < n_codes, other=0)
        b = tl.load(b_ptr + from_cols * n_codes + at, mask=at < n_codes, other=0)
        a_byte = tl.load(a_scale_ptr + from_rows * n_blocks + at_scale, mask=at_scale < n_blocks, other=0)
        b_byte = tl.load(b_scale_ptr + from_cols * n_blocks + at_scale, mask=at_scale < n_blocks, other=0)
        start = total
        if MACRO:
            # Never true; a plain zero in the loop is more than Triton 3.7 can place in the tensor memory of sm_100.
            start = tl.where(step < 0, total, 0.0)
        if NATIVE:
            part = tl.dot_scaled(a, a_byte, "e2m1", tl.trans(b), b_byte, "e2m1", start)
        else:
            left, right = _mxfp4_values(a, a_byte, INTERPRETED), _mxfp4_values(b, b_byte, INTERPRETED)
            part = tl.dot(left, tl.trans(right), start, input_precision="ieee")
        if MACRO:
            a_factor = macro_factor(tl.load(a_macro_ptr + from_rows * n_macros + step).to(tl.int32))
            b_factor = macro_factor(tl.load(b_macro_ptr + from_cols * n_macros + step).to(tl.int32))
            total += part * (1.0 / a_factor) * tl.trans(1.0 / b_factor)
        else:
            total = part
    _store(out_ptr, bias_ptr, total, rows, cols, n_rows, n_cols, INTERPRETED)
