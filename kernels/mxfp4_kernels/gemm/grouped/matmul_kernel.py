# SPDX-License-Identifier: Apache-2.0
"""Grouped matrix products on dense operands: of each expert's rows with its weight, of its rows with each other (the
gradient of the weight), and their sums (the gradient of the bias). Sums are float32."""

import triton
import triton.language as tl

from ...common.arguments import ColumnsOf
from ...common.elements import to_float
from .tiles import as_operand, find_tile, rows_of, store_tile


@triton.jit(do_not_specialize=["n_experts"])
def grouped_matmul_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    offsets_ptr,
    n_experts,
    x_row_stride,
    weight_strides,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
    BF16: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """``out[rows, N] = x[rows, K] weight[e, N, K]^T + bias[e, N]``. ``x`` has unit stride along K, the weight any
    strides. The tiles along N of one tile of rows are neighbours: they share its rows through the cache."""
    N: tl.constexpr = SHAPE.N
    K: tl.constexpr = SHAPE.K
    BM: tl.constexpr = TILE.BM
    BN: tl.constexpr = TILE.BN
    BK: tl.constexpr = TILE.BK
    n_tiles: tl.constexpr = (N + BN - 1) // BN
    pid = tl.program_id(0)
    expert, first, end = find_tile(offsets_ptr, pid // n_tiles, n_experts, SHAPE, TILE)
    if expert >= n_experts:
        return
    rows = first + tl.arange(0, BM)
    columns = (pid % n_tiles) * BN + tl.arange(0, BN)
    ks = tl.arange(0, BK)
    x_tile = x_ptr + rows.to(tl.int64)[:, None] * x_row_stride + ks[None, :]
    k_stride = weight_strides.columns
    weight_tile = weight_ptr + expert.to(tl.int64) * weight_strides.matrices
    weight_tile += columns.to(tl.int64)[None, :] * weight_strides.rows + ks.to(tl.int64)[:, None] * k_stride
    accumulator = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        if K % BK == 0:
            left = tl.load(x_tile, mask=(rows < end)[:, None], other=0)
            right = tl.load(weight_tile, mask=(columns < N)[None, :], other=0)
        else:
            left = tl.load(x_tile, mask=(rows < end)[:, None] & (ks < K - k)[None, :], other=0)
            right = tl.load(weight_tile, mask=(columns < N)[None, :] & (ks < K - k)[:, None], other=0)
        left, right = as_operand(left, BF16, INTERPRETED), as_operand(right, BF16, INTERPRETED)
        accumulator = tl.dot(left, right, accumulator, input_precision="ieee")
        x_tile += BK
        weight_tile += BK * k_stride
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + expert.to(tl.int64) * N + columns, mask=columns < N, other=0)
        accumulator += to_float(bias, BF16 and INTERPRETED)[None, :]
    mask = (rows < end)[:, None] & (columns < N)[None, :]
    store_tile(out_ptr + rows.to(tl.int64)[:, None] * N + columns[None, :], accumulator, mask, INTERPRETED)


@triton.jit
def _add_product(
    accumulator,
    left,
    right,
    row,
    end,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
    BF16: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """``accumulator + left[row : row + BM, columns]^T right[row : row + BM, columns]``, rows from ``end`` on left
    out."""
    rows = row + tl.arange(0, TILE.BM)
    inside = rows < end
    left_at = left.pointer + rows.to(tl.int64)[None, :] * left.strides.rows
    left_at += left.columns.to(tl.int64)[:, None] * left.strides.columns
    left = tl.load(left_at, mask=inside[None, :] & (left.columns < SHAPE.N)[:, None], other=0)
    right_at = right.pointer + rows.to(tl.int64)[:, None] * right.strides.rows
    right_at += right.columns.to(tl.int64)[None, :] * right.strides.columns
    right = tl.load(right_at, mask=inside[:, None] & (right.columns < SHAPE.K)[None, :], other=0)
    left, right = as_operand(left, BF16, INTERPRETED), as_operand(right, BF16, INTERPRETED)
    return tl.dot(left, right, accumulator, input_precision="ieee")


@triton.jit
def grouped_wgrad_kernel(
    left_ptr,
    right_ptr,
    out_ptr,
    offsets_ptr,
    left_strides,
    right_strides,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
    BF16: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """``out[e, N, K] = left[rows, N]^T right[rows, K]``, both with any strides; zeros for an expert without rows.
    ``BM`` rows are contracted at a time."""
    N: tl.constexpr = SHAPE.N
    K: tl.constexpr = SHAPE.K
    BM: tl.constexpr = TILE.BM
    BN: tl.constexpr = TILE.BN
    BK: tl.constexpr = TILE.BK
    n_tiles: tl.constexpr = (N + BN - 1) // BN
    k_tiles: tl.constexpr = (K + BK - 1) // BK
    pid = tl.program_id(0)
    expert = pid // (n_tiles * k_tiles)
    start, end = rows_of(offsets_ptr, expert)
    left = ColumnsOf(left_ptr, (pid // k_tiles) % n_tiles * BN + tl.arange(0, BN), left_strides)
    right = ColumnsOf(right_ptr, pid % k_tiles * BK + tl.arange(0, BK), right_strides)
    accumulator = tl.zeros((BN, BK), tl.float32)
    if INTERPRETED:
        # With NumPy 2.4, Triton 3.6 interprets no loop whose bounds are not constant.
        row = start
        while row < end:
            accumulator = _add_product(accumulator, left, right, row, end, SHAPE, TILE, BF16, INTERPRETED)
            row += BM
    else:
        for row in range(start, end, BM):
            accumulator = _add_product(accumulator, left, right, row, end, SHAPE, TILE, BF16, INTERPRETED)
    pointers = out_ptr + (expert.to(tl.int64) * N + left.columns)[:, None] * K + right.columns[None, :]
    mask = (left.columns < N)[:, None] & (right.columns < K)[None, :]
    store_tile(pointers, accumulator, mask, INTERPRETED)


@triton.jit
def grouped_sum_kernel(
    x_ptr,
    out_ptr,
    offsets_ptr,
    x_row_stride,
    N: tl.constexpr,
    TILE: tl.constexpr,
    BF16: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """``out[e, N]``, the sum of each expert's rows of ``x[rows, N]`` (unit stride along N); zeros without rows."""
    BM: tl.constexpr = TILE.BM
    BN: tl.constexpr = TILE.BN
    n_tiles: tl.constexpr = (N + BN - 1) // BN
    expert = tl.program_id(0) // n_tiles
    columns = tl.program_id(0) % n_tiles * BN + tl.arange(0, BN)
    row, end = rows_of(offsets_ptr, expert)
    total = tl.zeros((BM, BN), tl.float32)
    while row < end:
        rows = row + tl.arange(0, BM)
        mask = (rows < end)[:, None] & (columns < N)[None, :]
        x = tl.load(x_ptr + rows.to(tl.int64)[:, None] * x_row_stride + columns[None, :], mask=mask, other=0)
        total += to_float(x, BF16 and INTERPRETED)
        row += BM
    pointers = out_ptr + expert.to(tl.int64) * N + columns
    store_tile(pointers, tl.sum(total, 0), columns < N, INTERPRETED)
