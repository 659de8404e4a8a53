# SPDX-License-Identifier: Apache-2.0
"""The grouped product with packed weights, for few rows per expert: codes are read once and decoded in registers.

The weight is the left operand, whose tile is tall, and the rows of ``x`` the right one: 16 of them suffice for a tile.
Macro factors divide the partial sums of a macro block, so that a weight is never rounded.
"""

import triton
import triton.language as tl

from ...common.blocks import BLOCKWISE, NO_MACRO
from ...common.elements import to_float
from ..decode_tile import NARROW_BYTE, decoded_product, inverse_of_macro, load_inside
from ..splits import arrives_last, sum_of_splits
from .tiles import find_tile, store_tile


@triton.jit
def _accumulate(
    x_ptr,
    packed,
    places,
    rows,
    first,
    last,
    x_row_stride,
    alpha,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
    WIDE: tl.constexpr,
    WEIGHT: tl.constexpr,
):
    """Sums ``[BN, BM]`` over columns ``first..last``, and the largest scale byte met: above `NARROW_BYTE`, they are
    right with ``WIDE`` alone. ``places`` are rows of the weights of all experts."""
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
    m8 = tl.zeros((BN,), tl.int32)
    if WEIGHT.SEARCH != NO_MACRO:
        m8 = tl.load(packed.macro + places * macros_per_row + first // WEIGHT.MACRO).to(tl.int32)
    for k in range(first, last, BK):
        has_words = (words_at < K // 8 - k // 8)[None, :]
        has_blocks = (blocks_at < blocks_per_row - k // 32)[None, :]
        x = load_inside(x_tile + k, (ks < K - k)[None, :], EVEN)
        # Not ahead, in a layout of its own, to which codes would follow it.
        byte = load_inside(packed.scale + blocks_tile + k // 32, has_blocks, EVEN).to(tl.int32)
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
            part *= inverse_of_macro(m8, WEIGHT)[:, None]
        total += part
        if WEIGHT.SEARCH != NO_MACRO:
            # Ahead of its use, so that nothing waits for it.
            following = tl.minimum(k + BK, LAST)
            m8 = tl.load(packed.macro + places * macros_per_row + following // WEIGHT.MACRO).to(tl.int32)
    return total, tl.max(tl.max(largest, axis=1), axis=0)


@triton.jit
def _store(out_ptr, bias_ptr, total, at, places, columns, inside, SHAPE: tl.constexpr, WEIGHT: tl.constexpr):
    """Sums ``[BN, BM]``, and the bias, to their places ``at`` in ``out``."""
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + places, mask=columns < SHAPE.N, other=0)
        total += to_float(bias, WEIGHT.INTERPRETED)[:, None]
    store_tile(out_ptr + at, total, inside, WEIGHT.INTERPRETED)


@triton.jit(do_not_specialize=["n_rows", "n_experts", "split_steps", "n_splits"])
def grouped_packed_kernel(
    x_ptr,
    packed,
    bias_ptr,
    out_ptr,
    partial,
    offsets_ptr,
    n_rows,
    n_experts,
    split_steps,
    n_splits,
    x_row_stride,
    alpha,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
    WEIGHT: tl.constexpr,
):
    """``out[rows, N] = x[rows, K] weight[e, N, K]^T + bias[e, N]`` in bfloat16, with weights as [`quantize_kernel`]
    writes them, codes as int32 words: K is a multiple of 8. ``x`` has unit stride along K. ``BK`` is a multiple of 32
    and a part of a macro block (all of one, of block mantissas).

    The grid is tiles, and splits of ``split_steps`` times ``BK`` columns. With several (``partial``) the last program
    of a tile to arrive adds up all of them; ``partial.sums`` is ``[n_splits, n_rows, N]`` float32, ``arrived`` one zero
    for each tile, and zero again afterwards."""
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
    # Rows of the weights of all experts. What lies outside of the tile is computed from the last row, and not stored.
    places = expert.to(tl.int64) * N + tl.minimum(columns, N - 1)
    inner_rows = tl.minimum(rows, end - 1)
    first = 0
    last = SHAPE.K
    if partial is not None:
        first = tl.program_id(1) * (split_steps * TILE.BK)
        last = tl.minimum(first + split_steps * TILE.BK, SHAPE.K)
    total, largest = _accumulate(
        x_ptr, packed, places, inner_rows, first, last, x_row_stride, alpha, SHAPE, TILE, False, WEIGHT
    )
    if largest > NARROW_BYTE:
        # Seldom: for blocks whose largest magnitude is 12 or more, or NaN.
        total, _ = _accumulate(
            x_ptr, packed, places, inner_rows, first, last, x_row_stride, alpha, SHAPE, TILE, True, WEIGHT
        )
    inside = (columns < N)[:, None] & (rows < end)[None, :]
    at = rows.to(tl.int64)[None, :] * N + columns[:, None]
    if partial is None:
        _store(out_ptr, bias_ptr, total, at, places, columns, inside, SHAPE, WEIGHT)
    else:
        size = n_rows.to(tl.int64) * N
        tl.store(partial.sums + tl.program_id(1) * size + at, total, mask=inside)
        if arrives_last(partial.arrived + pid, n_splits, columns, WEIGHT):
            total = sum_of_splits(partial.sums + at, inside, size, n_splits)
            _store(out_ptr, bias_ptr, total, at, places, columns, inside, SHAPE, WEIGHT)
            tl.store(partial.arrived + pid, 0)
