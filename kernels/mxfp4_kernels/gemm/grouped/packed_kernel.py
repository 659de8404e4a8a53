# SPDX-License-Identifier: Apache-2.0
"""The grouped product with packed weights, for few rows per expert: codes are read once and decoded in registers.

The weight is the left operand, whose tile is tall, and the rows of ``x`` the right one: 16 of them suffice for a tile.
Macro factors divide the partial sums of a macro block, so that a weight is never rounded.
"""

import triton
import triton.language as tl

from ...common.blocks import BLOCKWISE, NO_MACRO, macro_factor
from ...common.elements import to_float
from ..decode_tile import NARROW_BYTE, decoded_product, load_inside
from .tiles import find_tile, store_tile


@triton.jit
def _accumulate(
    x_ptr,
    packed,
    places,
    columns,
    rows,
    end,
    x_row_stride,
    alpha,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
    WIDE: tl.constexpr,
    WEIGHT: tl.constexpr,
):
    """Sums ``[BN, BM]`` over K, and the largest scale byte met: above `NARROW_BYTE`, they are right with ``WIDE``
    alone. ``places`` are rows of the weights of all experts."""
    N: tl.constexpr = SHAPE.N
    K: tl.constexpr = SHAPE.K
    BM: tl.constexpr = TILE.BM
    BN: tl.constexpr = TILE.BN
    BK: tl.constexpr = TILE.BK
    EVEN: tl.constexpr = WEIGHT.EVEN
    blocks_per_row: tl.constexpr = (K + 31) // 32
    macros_per_row: tl.constexpr = (K + WEIGHT.MACRO - 1) // WEIGHT.MACRO
    words_at, blocks_at, ks = tl.arange(0, BK // 8), tl.arange(0, BK // 32), tl.arange(0, BK)
    x_tile = x_ptr + rows.to(tl.int64)[:, None] * x_row_stride + ks[None, :]
    words_tile = places[:, None] * (K // 8) + words_at[None, :]
    blocks_tile = places[:, None] * blocks_per_row + blocks_at[None, :]
    total = tl.zeros((BN, BM), tl.float32)
    largest = tl.zeros((BN, BK // 32), tl.int32)
    LAST: tl.constexpr = (K - 1) // BK * BK
    exists = (columns < N)[:, None]
    byte = load_inside(packed.scale + blocks_tile, exists & (blocks_at < blocks_per_row)[None, :], EVEN).to(tl.int32)
    m8 = tl.zeros((BN,), tl.int32)
    if WEIGHT.SEARCH != NO_MACRO:
        m8 = load_inside(packed.macro + places * macros_per_row, columns < N, EVEN).to(tl.int32)
    for k in range(0, K, BK):
        has_words = exists & (words_at < K // 8 - k // 8)[None, :]
        has_blocks = exists & (blocks_at < blocks_per_row - k // 32)[None, :]
        x = tl.load(x_tile + k, mask=(rows < end)[:, None] & (ks < K - k)[None, :], other=0)
        mantissa = byte
        if WEIGHT.SEARCH == BLOCKWISE:
            mantissa = (m8[:, None] >> (2 * blocks_at)[None, :]) & 3
        words = load_inside(packed.codes + words_tile + k // 8, has_words, EVEN)
        at_residual, at_residual_scale = None, None
        if packed.residual_codes is not None:
            at_residual = packed.residual_codes + words_tile + k // 8
            at_residual_scale = packed.residual_scale + blocks_tile + k // 32
        part, largest = decoded_product(
            x,
            words,
            byte,
            mantissa,
            at_residual,
            at_residual_scale,
            has_words,
            has_blocks,
            largest,
            alpha,
            WIDE,
            WEIGHT,
        )
        if WEIGHT.SEARCH != NO_MACRO and WEIGHT.SEARCH != BLOCKWISE:
            part *= (1.0 / macro_factor(m8))[:, None]
        total += part
        # Bytes are too short to be copied ahead by the compiler: those of the next step are loaded here.
        following = tl.minimum(k + BK, LAST)
        has_blocks = exists & (blocks_at < blocks_per_row - following // 32)[None, :]
        byte = load_inside(packed.scale + blocks_tile + following // 32, has_blocks, EVEN).to(tl.int32)
        if WEIGHT.SEARCH != NO_MACRO:
            m8 = load_inside(packed.macro + places * macros_per_row + following // WEIGHT.MACRO, columns < N, EVEN).to(
                tl.int32
            )
    return total, tl.max(tl.max(largest, axis=1), axis=0)


@triton.jit(do_not_specialize=["n_experts"])
def grouped_packed_kernel(
    x_ptr,
    packed,
    bias_ptr,
    out_ptr,
    offsets_ptr,
    n_experts,
    x_row_stride,
    alpha,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
    WEIGHT: tl.constexpr,
):
    """``out[rows, N] = x[rows, K] weight[e, N, K]^T + bias[e, N]`` in bfloat16, with weights as [`quantize_kernel`]
    writes them, codes as int32 words: K is a multiple of 8. ``x`` has unit stride along K. ``BK`` is a multiple of 32
    and a part of a macro block (all of one, of block mantissas)."""
    N: tl.constexpr = SHAPE.N
    BM: tl.constexpr = TILE.BM
    BN: tl.constexpr = TILE.BN
    n_tiles: tl.constexpr = (N + BN - 1) // BN
    pid = tl.program_id(0)
    expert, first, end = find_tile(offsets_ptr, pid // n_tiles, n_experts, SHAPE, TILE)
    if expert >= n_experts:
        return
    rows = first + tl.arange(0, BM)
    columns = (pid % n_tiles) * BN + tl.arange(0, BN)
    # Rows of the weights of all experts.
    places = expert.to(tl.int64) * N + columns
    total, largest = _accumulate(
        x_ptr, packed, places, columns, rows, end, x_row_stride, alpha, SHAPE, TILE, False, WEIGHT
    )
    if largest > NARROW_BYTE:
        # Seldom: for blocks whose largest magnitude is 12 or more, or NaN.
        total, _ = _accumulate(
            x_ptr, packed, places, columns, rows, end, x_row_stride, alpha, SHAPE, TILE, True, WEIGHT
        )
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + places, mask=columns < N, other=0)
        total += to_float(bias, WEIGHT.INTERPRETED)[:, None]
    mask = (columns < N)[:, None] & (rows < end)[None, :]
    store_tile(out_ptr + rows.to(tl.int64)[None, :] * N + columns[:, None], total, mask, WEIGHT.INTERPRETED)
