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
from .e4m3_group import add_group, e4m3_operand


@triton.jit
def _places(n_rows, n_cols, TILE: tl.constexpr):
    """Rows and columns of this program's tile."""
    pid = tl.program_id(0)
    tiles_m, tiles_n = tl.cdiv(n_rows, TILE.BM), tl.cdiv(n_cols, TILE.BN)
    first = pid // (TILE.GROUP_M * tiles_n) * TILE.GROUP_M
    height = tl.minimum(tiles_m - first, TILE.GROUP_M)
    in_group = pid % (TILE.GROUP_M * tiles_n)
    rows = (first + in_group % height) * TILE.BM + tl.arange(0, TILE.BM)
    return rows, in_group // height * TILE.BN + tl.arange(0, TILE.BN)


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


@triton.jit(do_not_specialize=["n_rows"])
def matmul_e4m3_kernel(
    a,
    b,
    bias_ptr,
    out_ptr,
    n_rows,
    n_cols,
    length,
    PER_GROUP: tl.constexpr,
    TILE: tl.constexpr,
    STEPS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """``out [n_rows, n_cols]`` from elements ``[.., length]``, contiguous, ``length`` a multiple of 128, and scales
    ``[length / 128, ..]`` (``PER_GROUP``) or ``[..]``. Partial sums of 128 products leave the tensor cores, which keep
    few bits of them, and are added up in float32."""
    BM: tl.constexpr = TILE.BM
    BN: tl.constexpr = TILE.BN
    rows, cols = _places(n_rows, n_cols, TILE)
    from_rows, from_cols = tl.minimum(rows, n_rows - 1), tl.minimum(cols, n_cols - 1)
    k = tl.arange(0, 128)
    a_at = a.elements + from_rows[:, None].to(tl.int64) * length + k[None, :]
    b_at = b.elements + from_cols[None, :].to(tl.int64) * length + k[:, None]
    a_scale_at, b_scale_at = a.scale + from_rows, b.scale + from_cols
    total = tl.zeros([BM, BN], tl.float32)
    for _ in range(STEPS if INTERPRETED else length // 128):
        if PER_GROUP:
            total = add_group(total, a_at, a_scale_at, b_at, b_scale_at, INTERPRETED)
            a_scale_at += n_rows
            b_scale_at += n_cols
        else:
            left, right = e4m3_operand(tl.load(a_at), INTERPRETED), e4m3_operand(tl.load(b_at), INTERPRETED)
            total = tl.dot(left, right, total, max_num_imprecise_acc=128)
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
    a,
    b,
    bias_ptr,
    out_ptr,
    n_rows,
    n_cols,
    row_bytes,
    NATIVE: tl.constexpr,
    TILE: tl.constexpr,
    STEPS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """``out [n_rows, n_cols]`` from `PackedPointers`: codes ``[.., n_codes]``, scale bytes ``[.., n_blocks]`` and, if
    any, macro bytes ``[.., n_macros]`` of 128 elements, all contiguous. Without native instructions (``NATIVE``) values
    are unpacked to bfloat16, which holds them; macro factors divide partial sums of 128 products either way."""
    BM: tl.constexpr = TILE.BM
    BN: tl.constexpr = TILE.BN
    rows, cols = _places(n_rows, n_cols, TILE)
    n_codes, n_blocks = row_bytes.n_codes, row_bytes.n_blocks
    from_rows = tl.minimum(rows, n_rows - 1)[:, None].to(tl.int64)
    from_cols = tl.minimum(cols, n_cols - 1)[:, None].to(tl.int64)
    total = tl.zeros([BM, BN], tl.float32)
    for step in range(STEPS if INTERPRETED else tl.cdiv(n_codes, 64)):
        at, at_scale = step * 64 + tl.arange(0, 64)[None, :], step * 4 + tl.arange(0, 4)[None, :]
        a_code = tl.load(a.codes + from_rows * n_codes + at, mask=at < n_codes, other=0)
        b_code = tl.load(b.codes + from_cols * n_codes + at, mask=at < n_codes, other=0)
        a_byte = tl.load(a.scale + from_rows * n_blocks + at_scale, mask=at_scale < n_blocks, other=0)
        b_byte = tl.load(b.scale + from_cols * n_blocks + at_scale, mask=at_scale < n_blocks, other=0)
        start = total
        if a.macro is not None:
            # Never true; a plain zero in the loop is more than Triton 3.7 can place in the tensor memory of sm_100.
            start = tl.where(step < 0, total, 0.0)
        if NATIVE:
            part = tl.dot_scaled(a_code, a_byte, "e2m1", tl.trans(b_code), b_byte, "e2m1", start)
        else:
            left, right = _mxfp4_values(a_code, a_byte, INTERPRETED), _mxfp4_values(b_code, b_byte, INTERPRETED)
            part = tl.dot(left, tl.trans(right), start, input_precision="ieee")
        if a.macro is not None:
            a_factor = macro_factor(tl.load(a.macro + from_rows * row_bytes.n_macros + step).to(tl.int32))
            b_factor = macro_factor(tl.load(b.macro + from_cols * row_bytes.n_macros + step).to(tl.int32))
            total += part * (1.0 / a_factor) * tl.trans(1.0 / b_factor)
        else:
            total = part
    _store(out_ptr, bias_ptr, total, rows, cols, n_rows, n_cols, INTERPRETED)
