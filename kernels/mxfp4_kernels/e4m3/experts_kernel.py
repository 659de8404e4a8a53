# SPDX-License-Identifier: Apache-2.0
"""E4M3 along the tokens of each expert, for the gradients of experts' weights.

Rows are sorted by expert, and the tokens of a result too, but that those of an expert begin and end there at multiples
of 128: slots of 128 tokens belong to one expert each, with zeros after its last one ([`find_tile`]). An output gradient
has one power of two for each column of an expert (and for each row, of all experts): as in `e4m3/fp8_both_kernel.py` a
first kernel finds scale bytes, here of slots, and a second one the largest of an expert's, and what is rounded by it.
"""

import triton
import triton.language as tl

from ..common.arguments import FoldBothLengths, Random, Tile
from ..common.blocks import MAGNITUDE_FIELD, scale_value
from ..common.elements import as_stored
from ..gemm.grouped.tiles import find_tile, rows_of
from ..quantization.both import transposed
from .both_kernel import read_rows
from .fp8_both_kernel import STEP, WIDTH, bases
from .fp8_kernel import base_of_row, inverse_of_row, read_matrix, values_of_rows
from .pairs import counted_of_rows, elements_of_rows
from .tile import base_of, blocks_of, count_inexact, e4m3_bits, elements_of


#: Slots that are looked at together for the scales of an expert.
_SLOTS = tl.constexpr(16)


@triton.jit
def _store_ends(ends_ptr, offsets_ptr, n_experts, SHAPE: tl.constexpr):
    """Where the tokens of each expert end in the result."""
    ids = tl.arange(0, SHAPE.EXPERTS)
    inside = ids < n_experts
    ends = tl.load(offsets_ptr + ids, mask=inside, other=0)
    starts = tl.load(offsets_ptr + ids - 1, mask=inside & (ids > 0), other=0)
    tl.store(ends_ptr + ids, tl.cumsum((ends - starts + 127) // 128, 0) * 128, mask=inside)


@triton.jit(do_not_specialize=["n_rows", "n_experts"])
def expert_bytes_kernel(
    x_ptr,
    of_rows_ptr,
    of_slots_ptr,
    offsets_ptr,
    ends_ptr,
    n_rows,
    n_cols,
    row_stride,
    n_experts,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
    SCHEME: tl.constexpr,
):
    """Scale bytes of the columns of ``x[n_rows, n_cols]`` (unit stride along columns) in slots, ``[slots, n_cols]``;
    unless `None` is given, those of parts of the rows, ``[parts, n_rows]``, and where the tokens of each expert end in
    slots. One program for a slot and ``WIDTH`` columns."""
    col_part, slot = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if ends_ptr is not None:
        if col_part + slot == 0:
            _store_ends(ends_ptr, offsets_ptr, n_experts, SHAPE)
    expert, first, end = find_tile(offsets_ptr, slot, n_experts, SHAPE, TILE)
    if expert >= n_experts:
        return
    cols = col_part * WIDTH + tl.arange(0, WIDTH)[None, :]
    top = tl.zeros([STEP, WIDTH], tl.int32)
    for step in range(128 // STEP):
        rows = first.to(tl.int64) + step * STEP + tl.arange(0, STEP)[:, None]
        x = read_matrix(x_ptr, rows, cols, end, n_cols, row_stride, SCHEME.BF16)
        magnitudes = x.to(tl.int32, bitcast=True) & MAGNITUDE_FIELD
        if of_rows_ptr is not None:
            base = base_of_row(tl.max(magnitudes, axis=1, keep_dims=True))
            tl.store(of_rows_ptr + col_part * n_rows + rows, base.to(tl.uint8), mask=rows < end)
        top = tl.maximum(top, magnitudes)
    base = base_of_row(tl.max(top, axis=0, keep_dims=True))
    tl.store(of_slots_ptr + slot.to(tl.int64) * n_cols + cols, base.to(tl.uint8), mask=cols < n_cols)


@triton.jit
def _bases_of_expert(of_slots_ptr, offsets_ptr, slot, expert, first, cols, n_cols):
    """Scale bytes (int32) of columns of an expert, which has the row ``first`` at the beginning of a slot."""
    start, end = rows_of(offsets_ptr, expert)
    slot -= (first - start) // 128
    last = slot + (end - start + 127) // 128
    found = tl.zeros([_SLOTS, cols.shape[0]], tl.int32)
    while slot < last:
        slots = slot + tl.arange(0, _SLOTS)[:, None]
        at = slots.to(tl.int64) * n_cols + cols[None, :]
        byte = tl.load(of_slots_ptr + at, mask=(slots < last) & (cols[None, :] < n_cols), other=0)
        found = tl.maximum(found, byte.to(tl.int32))
        slot += _SLOTS
    return tl.max(found, axis=0)


@triton.jit(do_not_specialize=["n_rows", "n_col_parts", "n_experts", "col_tiles"])
def expert_elements_kernel(
    x_ptr,
    of_rows_ptr,
    of_slots_ptr,
    offsets_ptr,
    out,
    out_t,
    n_rows,
    n_cols,
    n_tokens,
    padded_cols,
    row_stride,
    n_col_parts,
    n_experts,
    col_tiles,
    COL_PARTS: tl.constexpr,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
    SCHEME: tl.constexpr,
):
    """Elements ``[n_cols, n_tokens]`` along the tokens of ``x[n_rows, n_cols]`` (unit stride along columns) and their
    scales ``[slots, n_cols]``, given what [`expert_bytes_kernel`] found; and ``[n_rows, padded_cols]`` along its rows
    with theirs, ``[n_rows]``, unless ``out`` is `None`. One program for a slot and 64 columns."""
    pid = tl.program_id(0)
    slot, col_tile = pid // col_tiles, pid % col_tiles
    expert, first, end = find_tile(offsets_ptr, slot, n_experts, SHAPE, TILE)
    if expert >= n_experts:
        return
    rows, cols = first.to(tl.int64) + tl.arange(0, 128), col_tile.to(tl.int64) * 64 + tl.arange(0, 64)
    x = read_matrix(x_ptr, rows[:, None], cols[None, :], end, n_cols, row_stride, SCHEME.BF16)
    if out is not None:
        base = bases(of_rows_ptr, rows, n_rows, n_col_parts, COL_PARTS)
        elements = e4m3_bits(x * inverse_of_row(base)[:, None], SCHEME.NATIVE)
        mask = (rows[:, None] < end) & (cols[None, :] < padded_cols)
        tl.store(out.elements + rows[:, None] * padded_cols + cols[None, :], elements, mask=mask)
        if col_tile == 0:
            tl.store(out.scale + rows, scale_value(base), mask=rows < end)
    base = _bases_of_expert(of_slots_ptr, offsets_ptr, slot, expert, first, cols, n_cols)
    elements = transposed(e4m3_bits(x * inverse_of_row(base)[None, :], SCHEME.NATIVE))
    slot = slot.to(tl.int64)
    to = out_t.elements + cols[:, None] * n_tokens + slot * 128 + tl.arange(0, 128)[None, :]
    tl.store(to, elements, mask=cols[:, None] < n_cols)
    tl.store(out_t.scale + slot * n_cols + cols, scale_value(base), mask=cols < n_cols)


@triton.jit(do_not_specialize=["n_experts", "col_tiles"])
def expert_values_kernel(
    x_ptr,
    of_slots_ptr,
    offsets_ptr,
    out_ptr,
    n_cols,
    row_stride,
    n_experts,
    col_tiles,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
    SCHEME: tl.constexpr,
):
    """The values of what [`expert_elements_kernel`] writes along the tokens, as ``x`` and contiguous."""
    pid = tl.program_id(0)
    slot, col_tile = pid // col_tiles, pid % col_tiles
    expert, first, end = find_tile(offsets_ptr, slot, n_experts, SHAPE, TILE)
    if expert >= n_experts:
        return
    rows, cols = first.to(tl.int64) + tl.arange(0, 128)[:, None], col_tile.to(tl.int64) * 64 + tl.arange(0, 64)
    base = _bases_of_expert(of_slots_ptr, offsets_ptr, slot, expert, first, cols, n_cols)[None, :]
    cols = cols[None, :]
    x = read_matrix(x_ptr, rows, cols, end, n_cols, row_stride, SCHEME.BF16)
    values = as_stored(values_of_rows(x, base, SCHEME.LARGEST), out_ptr, SCHEME.INTERPRETED)
    tl.store(out_ptr + rows * n_cols + cols, values, mask=(rows < end) & (cols < n_cols))


@triton.jit(do_not_specialize=["n_experts", "col_tiles"])
def fold_experts_kernel(
    x_ptr,
    out,
    counter_ptr,
    offsets_ptr,
    n_cols,
    n_tokens,
    row_stride,
    n_experts,
    col_tiles,
    STRIP: tl.constexpr,
    PAIRS: tl.constexpr,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
    SCHEME: tl.constexpr,
    SIDE: tl.constexpr,
):
    """Elements ``[n_cols, n_tokens]`` and scales ``[slots, n_cols]`` of values that were quantized along the rows of a
    matrix of ``n_cols`` (unit stride along them), as [`fold_both_kernel`] has them with ``REUSED``. One program for a
    slot and 128 columns."""
    pid = tl.program_id(0)
    expert, first, end = find_tile(offsets_ptr, pid // col_tiles, n_experts, SHAPE, TILE)
    if expert >= n_experts:
        return
    slot, col_start = (pid // col_tiles).to(tl.int64), (pid % col_tiles).to(tl.int64) * 128
    first, end = first.to(tl.int64), end.to(tl.int64)
    lengths = FoldBothLengths(end, n_cols, n_cols, n_cols, n_cols, n_cols, row_stride, 1)
    n_inexact = tl.cast(0, tl.int32)
    top = tl.full([STRIP, 1, 4, 1], -1, tl.int32)
    for strip in range(128 // STRIP):
        start = first + strip * STRIP
        if PAIRS:
            counted = counted_of_rows(x_ptr, start, col_start, end, n_cols, row_stride, STRIP, SCHEME)
        else:
            at = Tile(start + tl.arange(0, STRIP)[:, None, None, None], col_start, end, n_cols)
            y, noise = read_rows(x_ptr, start, at, lengths, None, Random(0, 0, 0), STRIP, SCHEME.BF16, SIDE)
            _, _, counted, _ = blocks_of(y, noise, False, SCHEME)
        top = tl.maximum(top, counted)
    base = base_of(tl.max(top, axis=0, keep_dims=True))
    for strip in range(128 // STRIP):
        start = first + strip * STRIP
        if PAIRS:
            elements, found = elements_of_rows(x_ptr, base, start, col_start, end, n_cols, row_stride, STRIP, SCHEME)
            n_inexact += tl.sum(tl.reshape(found, [found.numel], can_reorder=True), axis=0)
        else:
            at = Tile(start + tl.arange(0, STRIP)[:, None, None, None], col_start, end, n_cols)
            y, noise = read_rows(x_ptr, start, at, lengths, None, Random(0, 0, 0), STRIP, SCHEME.BF16, SIDE)
            y, byte, counted, _ = blocks_of(y, noise, False, SCHEME)
            elements, found = elements_of(y, byte, counted, base, False, SCHEME)
            elements = tl.reshape(elements, [STRIP, 128])
            n_inexact += found
        cols = col_start + tl.arange(0, 128)[:, None]
        along = slot * 128 + strip * STRIP + tl.arange(0, STRIP)[None, :]
        tl.store(out.elements + cols * n_tokens + along, transposed(elements), mask=cols < n_cols)
    cols = col_start + tl.arange(0, 4)[None, None, :, None] * 32 + tl.arange(0, 32)[None, None, None, :]
    tl.store(out.scale + slot * n_cols + cols, tl.broadcast_to(scale_value(base), cols.shape), mask=cols < n_cols)
    count_inexact(counter_ptr, n_inexact)
