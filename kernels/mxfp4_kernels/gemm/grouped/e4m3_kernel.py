# SPDX-License-Identifier: Apache-2.0
"""Grouped products of E4M3 operands with float32 scales of 128 elements along the contraction, or of whole rows.

Partial sums of 128 products leave the tensor cores, which keep few bits of them, and are added up in float32.
"""

import triton
import triton.language as tl

from ...common.arguments import FoldedPointers
from ...common.elements import to_float
from ..e4m3_group import add_group
from .tiles import find_tile, rows_of, store_tile


@triton.jit(do_not_specialize=["n_experts"])
def grouped_matmul_e4m3_kernel(
    x,
    weight,
    bias_ptr,
    out_ptr,
    offsets_ptr,
    rows_ptr,
    n_experts,
    x_scale_strides,
    weight_strides,
    weight_scale_strides,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
    OUT_BF16: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """``out[row, N] = x[rows[row], K] weight[e, N, K]^T + bias[e, N]``, K a multiple of 128; weights have unit stride
    along K, and all but them and the scales is contiguous. Without ``rows`` each row is its own."""
    N: tl.constexpr = SHAPE.N
    K: tl.constexpr = SHAPE.K
    BM: tl.constexpr = TILE.BM
    BN: tl.constexpr = TILE.BN
    n_tiles: tl.constexpr = (N + BN - 1) // BN
    pid = tl.program_id(0)
    expert, first, end = find_tile(offsets_ptr, pid // n_tiles, n_experts, SHAPE, TILE)
    if expert >= n_experts:
        return
    rows = first + tl.arange(0, BM)
    columns = (pid % n_tiles) * BN + tl.arange(0, BN)
    # What is read beyond the last row or column is not stored.
    x_rows = tl.minimum(rows, end - 1).to(tl.int64)
    if rows_ptr is not None:
        x_rows = tl.load(rows_ptr + x_rows)
    weight_rows = tl.minimum(columns, N - 1).to(tl.int64)
    of_weight = weight.elements + expert.to(tl.int64) * weight_strides.matrices
    of_scale = weight.scale + expert.to(tl.int64) * weight_scale_strides.matrices
    ks = tl.arange(0, 128)
    x_at = x.elements + x_rows[:, None] * K + ks[None, :]
    weight_at = of_weight + weight_rows[None, :] * weight_strides.rows + ks[:, None]
    x_scale_at = x.scale + x_rows * x_scale_strides.rows
    weight_scale_at = of_scale + weight_rows * weight_scale_strides.rows
    total = tl.zeros((BM, BN), tl.float32)
    for _ in range(0, K, 128):
        total = add_group(total, x_at, x_scale_at, weight_at, weight_scale_at, INTERPRETED)
        x_at += 128
        weight_at += 128
        x_scale_at += x_scale_strides.columns
        weight_scale_at += weight_scale_strides.columns
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + expert.to(tl.int64) * N + columns, mask=columns < N, other=0)
        total += to_float(bias, OUT_BF16 and INTERPRETED)[None, :]
    mask = (rows < end)[:, None] & (columns < N)[None, :]
    store_tile(out_ptr + rows.to(tl.int64)[:, None] * N + columns[None, :], total, mask, INTERPRETED)


@triton.jit
def _add_tokens(total, left, right, group, left_scale_stride, right_scale_stride, INTERPRETED: tl.constexpr):
    """``total`` and the products of the 128 tokens of a group, with pointers to the first group."""
    at = group.to(tl.int64)
    left_at, left_scale_at = left.elements + at * 128, left.scale + at * left_scale_stride
    right_at, right_scale_at = right.elements + at * 128, right.scale + at * right_scale_stride
    return add_group(total, left_at, left_scale_at, right_at, right_scale_at, INTERPRETED)


@triton.jit
def grouped_wgrad_e4m3_kernel(
    left,
    right,
    out_ptr,
    offsets_ptr,
    row_strides,
    left_scale_strides,
    right_scale_strides,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """``out[e, N, K] = left[N, tokens] right[K, tokens]^T`` over each expert's tokens, of which every group of 128
    belongs to one expert; zeros for an expert without tokens. ``row_strides`` are those of both operands."""
    N: tl.constexpr = SHAPE.N
    K: tl.constexpr = SHAPE.K
    BN: tl.constexpr = TILE.BN
    BK: tl.constexpr = TILE.BK
    n_tiles: tl.constexpr = (N + BN - 1) // BN
    k_tiles: tl.constexpr = (K + BK - 1) // BK
    pid = tl.program_id(0)
    expert = pid // (n_tiles * k_tiles)
    start, end = rows_of(offsets_ptr, expert)
    left_columns = (pid // k_tiles) % n_tiles * BN + tl.arange(0, BN)
    right_columns = pid % k_tiles * BK + tl.arange(0, BK)
    left_rows = tl.minimum(left_columns, N - 1).to(tl.int64)
    right_rows = tl.minimum(right_columns, K - 1).to(tl.int64)
    tokens = tl.arange(0, 128)
    left = FoldedPointers(
        left.elements + left_rows[:, None] * row_strides[0] + tokens[None, :],
        left.scale + left_rows * left_scale_strides.rows,
    )
    right = FoldedPointers(
        right.elements + right_rows[None, :] * row_strides[1] + tokens[:, None],
        right.scale + right_rows * right_scale_strides.rows,
    )
    left_stride, right_stride = left_scale_strides.columns, right_scale_strides.columns
    total = tl.zeros((BN, BK), tl.float32)
    if INTERPRETED:
        # As in `grouped_wgrad_kernel`.
        group = start // 128
        while group < end // 128:
            total = _add_tokens(total, left, right, group, left_stride, right_stride, INTERPRETED)
            group += 1
    else:
        for group in range(start // 128, end // 128):
            total = _add_tokens(total, left, right, group, left_stride, right_stride, INTERPRETED)
    pointers = out_ptr + (expert.to(tl.int64) * N + left_columns)[:, None] * K + right_columns[None, :]
    mask = (left_columns < N)[:, None] & (right_columns < K)[None, :]
    store_tile(pointers, total, mask, INTERPRETED)
