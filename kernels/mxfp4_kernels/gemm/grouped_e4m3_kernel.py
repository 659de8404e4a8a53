# SPDX-License-Identifier: Apache-2.0
"""Grouped products of E4M3 operands with float32 scales of 128 elements along the contraction, or of whole rows.

Partial sums of 128 products leave the tensor cores, which keep few bits of them, and are added up in float32.
"""

import triton
import triton.language as tl

from ..common.elements import to_float
from .grouped_tiles import find_tile, rows_of, store_tile
from .matmul_kernel import e4m3_values


@triton.jit
def _partial_sums(left, right, INTERPRETED: tl.constexpr):
    """Products of 128 elements."""
    if INTERPRETED:
        return tl.dot(e4m3_values(left), e4m3_values(right))
    else:
        return tl.dot(left, right)


@triton.jit(do_not_specialize=["n_experts"])
def grouped_matmul_e4m3_kernel(
    x_ptr,
    x_scale_ptr,
    weight_ptr,
    weight_scale_ptr,
    bias_ptr,
    out_ptr,
    offsets_ptr,
    rows_ptr,
    n_experts,
    x_scale_row_stride,
    x_scale_group_stride,
    weight_expert_stride,
    weight_row_stride,
    weight_scale_expert_stride,
    weight_scale_row_stride,
    weight_scale_group_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    EXPERTS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    OUT_BF16: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """``out[row, N] = x[rows[row], K] weight[e, N, K]^T + bias[e, N]``, K a multiple of 128; weights have unit stride
    along K, and all but them and the scales is contiguous. Without ``rows`` each row is its own."""
    n_tiles: tl.constexpr = (N + BN - 1) // BN
    pid = tl.program_id(0)
    expert, first, end = find_tile(offsets_ptr, pid // n_tiles, n_experts, EXPERTS, BM)
    if expert >= n_experts:
        return
    rows = first + tl.arange(0, BM)
    columns = (pid % n_tiles) * BN + tl.arange(0, BN)
    # What is read beyond the last row or column is not stored.
    x_rows = tl.minimum(rows, end - 1).to(tl.int64)
    if rows_ptr is not None:
        x_rows = tl.load(rows_ptr + x_rows)
    weight_rows = tl.minimum(columns, N - 1).to(tl.int64)
    weight_ptr += expert.to(tl.int64) * weight_expert_stride
    weight_scale_ptr += expert.to(tl.int64) * weight_scale_expert_stride
    ks = tl.arange(0, 128)
    x_at = x_ptr + x_rows[:, None] * K + ks[None, :]
    weight_at = weight_ptr + weight_rows[None, :] * weight_row_stride + ks[:, None]
    x_scale_at = x_scale_ptr + x_rows * x_scale_row_stride
    weight_scale_at = weight_scale_ptr + weight_rows * weight_scale_row_stride
    total = tl.zeros((BM, BN), tl.float32)
    for _ in range(0, K, 128):
        scale = tl.load(x_scale_at)[:, None] * tl.load(weight_scale_at)[None, :]
        total += _partial_sums(tl.load(x_at), tl.load(weight_at), INTERPRETED) * scale
        x_at += 128
        weight_at += 128
        x_scale_at += x_scale_group_stride
        weight_scale_at += weight_scale_group_stride
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + expert.to(tl.int64) * N + columns, mask=columns < N, other=0)
        total += to_float(bias, OUT_BF16 and INTERPRETED)[None, :]
    mask = (rows < end)[:, None] & (columns < N)[None, :]
    store_tile(out_ptr + rows.to(tl.int64)[:, None] * N + columns[None, :], total, mask, INTERPRETED)


@triton.jit
def _add_group(
    total,
    left_at,
    left_scale_at,
    right_at,
    right_scale_at,
    group,
    left_scale_stride,
    right_scale_stride,
    INTERPRETED: tl.constexpr,
):
    """``total`` and the products of the 128 tokens of a group."""
    group = group.to(tl.int64)
    scale = tl.load(left_scale_at + group * left_scale_stride)[:, None]
    scale = scale * tl.load(right_scale_at + group * right_scale_stride)[None, :]
    return total + _partial_sums(tl.load(left_at + group * 128), tl.load(right_at + group * 128), INTERPRETED) * scale


@triton.jit
def grouped_wgrad_e4m3_kernel(
    left_ptr,
    left_scale_ptr,
    right_ptr,
    right_scale_ptr,
    out_ptr,
    offsets_ptr,
    left_row_stride,
    right_row_stride,
    left_scale_row_stride,
    left_scale_group_stride,
    right_scale_row_stride,
    right_scale_group_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """``out[e, N, K] = left[N, tokens] right[K, tokens]^T`` over each expert's tokens, of which every group of 128
    belongs to one expert; zeros for an expert without tokens."""
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
    left_at = left_ptr + left_rows[:, None] * left_row_stride + tokens[None, :]
    right_at = right_ptr + right_rows[None, :] * right_row_stride + tokens[:, None]
    left_scale_at = left_scale_ptr + left_rows * left_scale_row_stride
    right_scale_at = right_scale_ptr + right_rows * right_scale_row_stride
    total = tl.zeros((BN, BK), tl.float32)
    if INTERPRETED:
        # As in `grouped_wgrad_kernel`.
        group = start // 128
        while group < end // 128:
            total = _add_group(
                total,
                left_at,
                left_scale_at,
                right_at,
                right_scale_at,
                group,
                left_scale_group_stride,
                right_scale_group_stride,
                INTERPRETED,
            )
            group += 1
    else:
        for group in range(start // 128, end // 128):
            total = _add_group(
                total,
                left_at,
                left_scale_at,
                right_at,
                right_scale_at,
                group,
                left_scale_group_stride,
                right_scale_group_stride,
                INTERPRETED,
            )
    pointers = out_ptr + (expert.to(tl.int64) * N + left_columns)[:, None] * K + right_columns[None, :]
    mask = (left_columns < N)[:, None] & (right_columns < K)[None, :]
    store_tile(pointers, total, mask, INTERPRETED)
