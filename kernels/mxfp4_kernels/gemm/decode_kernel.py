# SPDX-License-Identifier: Apache-2.0
"""The product of a few (or not so few) rows with a packed weight, decoded on its way to the tensor cores.

A program owns ``BN`` rows of the weight and a part of its columns, for ``BM`` rows of ``x``. The weight is the left
operand: its codes are decoded in the very registers that the tensor cores read. Where rows of ``x`` are few, ``x`` is
put in the order in which codes are decoded, rather than the codes in that of ``x``.

Scales and block mantissas are exact in the bfloat16 operand; macro factors and the weight of the residual multiply
float32 sums. float16 and float32 ``x`` are cut into two or three bfloat16 that add up to them, so that every product is
exact and only sums are rounded, to float32.
"""

import triton
import triton.language as tl

from ..common.arguments import PackedPointers, RowBytes
from ..common.blocks import BLOCKWISE, NO_MACRO
from .decode_tile import NARROW_BYTE, decoded_product, inverse_of_macro, load_inside
from .splits import arrives_last, sum_of_splits


@triton.jit
def _mantissas(macro, start, BLOCKS: tl.constexpr):
    """Two bits for each block, of the macro bytes ``[ROWS, BLOCKS]`` that hold those of four."""
    return (macro >> (2 * ((start // 32 + tl.arange(0, BLOCKS)) % 4))[None, :]) & 3


@triton.jit
def _accumulate(
    x_ptr,
    packed,
    rows,
    tokens,
    first,
    last,
    n_cols,
    row_bytes,
    x_row_stride,
    alpha,
    TILE: tl.constexpr,
    WIDE: tl.constexpr,
    WEIGHT: tl.constexpr,
):
    """Sums ``[BN, BM]`` over steps ``first..last`` of ``BK`` columns, and the largest scale byte met. Pointers are to
    the tile's first rows, ``rows`` and ``tokens`` offsets from there."""
    BM: tl.constexpr = TILE.BM
    BN: tl.constexpr = TILE.BN
    BK: tl.constexpr = TILE.BK
    EVEN: tl.constexpr = WEIGHT.EVEN
    BLOCKS: tl.constexpr = BK // 32
    cols = tl.arange(0, BK)[None, :]
    words = tl.arange(0, BK // 8)[None, :]
    blocks = tl.arange(0, BLOCKS)[None, :]
    at_codes = rows[:, None] * row_bytes.n_codes + words
    at_scale = rows[:, None] * row_bytes.n_blocks + blocks
    at_x = tokens[:, None] * x_row_stride + cols
    total = tl.zeros([BN, BM], tl.float32)
    largest = tl.zeros([BN, BLOCKS], tl.int32)
    byte_of_factor = tl.zeros([BN], tl.int32)
    HAS_FACTOR: tl.constexpr = WEIGHT.SEARCH != NO_MACRO and WEIGHT.SEARCH != BLOCKWISE
    if HAS_FACTOR:
        byte_of_factor = tl.load(packed.macro + rows * row_bytes.n_macros + first * BK // WEIGHT.MACRO).to(tl.int32)
    for step in range(first, last):
        col = step * BK
        has_words = words < row_bytes.n_codes - col // 8
        has_blocks = blocks < row_bytes.n_blocks - col // 32
        code = load_inside(packed.codes + step * (BK // 8) + at_codes, has_words, EVEN)
        byte = load_inside(packed.scale + step * (BK // 32) + at_scale, has_blocks, EVEN).to(tl.int32)
        x = load_inside(x_ptr + col + at_x, cols < n_cols - col, EVEN)
        if WEIGHT.PIECES > 1:
            x = x.to(tl.float32)
        mantissa = byte
        if WEIGHT.SEARCH == BLOCKWISE:
            at_macro = rows[:, None] * row_bytes.n_macros + (col // 32 + blocks) // 4
            mantissa = _mantissas(load_inside(packed.macro + at_macro, has_blocks, EVEN).to(tl.int32), col, BLOCKS)
        at_residual, at_residual_scale = None, None
        if packed.residual_codes is not None:
            at_residual = packed.residual_codes + step * (BK // 8) + at_codes
            at_residual_scale = packed.residual_scale + step * (BK // 32) + at_scale
        part, largest = decoded_product(
            x, code, byte, mantissa, at_residual, at_residual_scale, has_words, has_blocks, largest, alpha, WIDE, WEIGHT
        )
        if HAS_FACTOR:
            part *= inverse_of_macro(byte_of_factor, WEIGHT)[:, None]
            # Ahead of its use, so that nothing waits for it.
            following = tl.minimum(col + BK, n_cols - 1) // WEIGHT.MACRO
            byte_of_factor = tl.load(packed.macro + rows * row_bytes.n_macros + following).to(tl.int32)
        total += part
    return total, tl.max(tl.max(largest, axis=1), axis=0)


@triton.jit
def _store(out_ptr, bias_ptr, total, row, rows, tokens, n_rows, n_tokens):
    """Sums ``[BN, BM]``, and the bias, to their places in ``out[n_tokens, n_rows]``."""
    inside = (rows < n_rows - row)[:, None] & (tokens < n_tokens)[None, :]
    if bias_ptr is not None:
        total += tl.load(bias_ptr + row + rows, mask=rows < n_rows - row, other=0.0).to(tl.float32)[:, None]
    at = tokens.to(tl.int64)[None, :] * n_rows + row + rows[:, None]
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["n_tokens", "n_rows", "split_steps", "n_splits"])
def linear_kernel(
    x_ptr,
    packed,
    bias_ptr,
    out_ptr,
    partial,
    n_tokens,
    n_rows,
    n_cols,
    x_row_stride,
    split_steps,
    n_splits,
    alpha,
    TILE: tl.constexpr,
    WEIGHT: tl.constexpr,
):
    """``out[n_tokens, n_rows]`` from ``x[n_tokens, n_cols]`` (unit stride along columns) and a packed weight
    ``[n_rows, n_cols]``. The grid is tiles of rows, splits of ``split_steps`` times ``BK``
    columns, tiles of tokens.

    With several splits (``partial``) the last program of a tile to arrive adds up all of them, in their order: the sum
    does not depend on which one that is. ``partial.sums`` is ``[n_splits, n_tokens, n_rows]`` float32, ``arrived`` one
    zero for each tile, and zero again afterwards.
    """
    BM: tl.constexpr = TILE.BM
    BN: tl.constexpr = TILE.BN
    tile = tl.program_id(0)
    split = tl.program_id(1)
    row = tile.to(tl.int64) * BN
    token = tl.program_id(2).to(tl.int64) * BM
    # What lies outside of the matrices is computed from their last row, and not stored.
    rows = tl.minimum(tl.arange(0, BN), n_rows - row - 1).to(tl.int32)
    tokens = tl.minimum(tl.arange(0, BM), n_tokens - token - 1).to(tl.int32)
    n_words = (n_cols + 7) // 8
    n_blocks = (n_cols + 31) // 32
    n_macros = (n_cols + WEIGHT.MACRO - 1) // WEIGHT.MACRO
    # What wide loads need to know; tl.cdiv, a function, would lose it.
    if WEIGHT.COL_MULTIPLE >= 16:
        n_words = tl.multiple_of(n_words, WEIGHT.COL_MULTIPLE // 8)
    if WEIGHT.COL_MULTIPLE >= 64:
        n_blocks = tl.multiple_of(n_blocks, WEIGHT.COL_MULTIPLE // 32)
    x_ptr += token * x_row_stride
    here = PackedPointers(
        packed.codes + row * n_words,
        packed.scale + row * n_blocks,
        packed.macro + row * n_macros if WEIGHT.SEARCH != NO_MACRO else None,
        packed.residual_codes + row * n_words if packed.residual_codes is not None else None,
        packed.residual_scale + row * n_blocks if packed.residual_codes is not None else None,
    )
    row_bytes = RowBytes(n_words, n_blocks, n_macros)
    first = split * split_steps
    last = tl.minimum(first + split_steps, tl.cdiv(n_cols, TILE.BK))
    total, largest = _accumulate(
        x_ptr, here, rows, tokens, first, last, n_cols, row_bytes, x_row_stride, alpha, TILE, False, WEIGHT
    )
    if largest > NARROW_BYTE:
        # Rare: a block with magnitudes of 12 and more, or NaN.
        total, _ = _accumulate(
            x_ptr, here, rows, tokens, first, last, n_cols, row_bytes, x_row_stride, alpha, TILE, True, WEIGHT
        )

    rows = tl.arange(0, BN)
    tokens = tl.arange(0, BM)
    out_ptr += token * n_rows
    n_tokens_here = (n_tokens - token).to(tl.int32)
    if partial is None:
        _store(out_ptr, bias_ptr, total, row, rows, tokens, n_rows, n_tokens_here)
    else:
        sums_ptr = partial.sums + token * n_rows
        size = n_tokens.to(tl.int64) * n_rows
        _store(sums_ptr + split * size, None, total, row, rows, tokens, n_rows, n_tokens_here)
        arrived_ptr = partial.arrived + (tl.program_id(2) * tl.num_programs(0) + tile)
        if arrives_last(arrived_ptr, n_splits, tokens, WEIGHT):
            at = tokens.to(tl.int64)[None, :] * n_rows + row + rows[:, None]
            inside = (rows < n_rows - row)[:, None] & (tokens < n_tokens_here)[None, :]
            total = sum_of_splits(sums_ptr + at, inside, size, n_splits)
            _store(out_ptr, bias_ptr, total, row, rows, tokens, n_rows, n_tokens_here)
            tl.store(arrived_ptr, 0)
