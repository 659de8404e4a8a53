# SPDX-License-Identifier: Apache-2.0
"""What the grouped kernels share: which tile of which expert a program owns, and elements on their way in and out.

Rows are sorted by expert; ``offsets`` says where the rows of each end. Tiles never straddle experts. How many tiles
there are is known on the device alone, so the grid has the most that there can be ([`tile_slots`]) and programs without
a tile leave at once: nothing is read back, and one CUDA graph serves every routing.
"""

import triton
import triton.language as tl

from ...common.elements import as_stored, to_float


def tile_slots(n_rows: int, n_experts: int, tile_rows: int) -> int:
    """Tiles of ``tile_rows`` rows that ``n_rows`` rows of ``n_experts`` experts need at most, whatever the counts: at
    most one of each expert that has rows is not full, and each has a row."""
    return min(n_rows // tile_rows + min(n_rows, n_experts), n_rows)


@triton.jit
def find_tile(offsets_ptr, slot, n_experts, SHAPE: tl.constexpr, TILE: tl.constexpr):
    """Expert, first row and end of the expert's rows of tile ``slot``; the expert is ``n_experts`` where there are
    fewer tiles."""
    BM: tl.constexpr = TILE.BM
    ids = tl.arange(0, SHAPE.EXPERTS)
    # Past the last expert the counts are zero.
    ends = tl.load(offsets_ptr + tl.minimum(ids, n_experts - 1))
    if SHAPE.EACH_ROW:
        # The tile that begins with row ``slot``, if one does.
        expert = tl.minimum(tl.sum((ends <= slot).to(tl.int32), 0), n_experts)
        first, end = rows_of(offsets_ptr, tl.minimum(expert, n_experts - 1))
        expert = tl.where((slot - first) % BM == 0, expert, n_experts)
        first = slot
    else:
        starts = tl.load(offsets_ptr + tl.minimum(ids, n_experts) - 1, mask=ids > 0, other=0)
        tiles = (ends - starts + BM - 1) // BM
        after = tl.cumsum(tiles, 0)
        done = after <= slot
        expert = tl.sum(done.to(tl.int32), 0)
        before = tl.sum(tl.where(done, tiles, 0), 0)
        expert = tl.minimum(expert, n_experts)
        start, end = rows_of(offsets_ptr, tl.minimum(expert, n_experts - 1))
        first = start + (slot - before) * BM
    return expert, first, end


@triton.jit
def rows_of(offsets_ptr, expert):
    """First row and end of the rows of an expert (int32 scalars)."""
    start = tl.load(offsets_ptr + expert - 1, mask=expert > 0, other=0)
    return start, tl.load(offsets_ptr + expert)


@triton.jit
def as_operand(x, BF16: tl.constexpr, INTERPRETED: tl.constexpr):
    """Loaded elements as a matrix product takes them."""
    if INTERPRETED:
        return to_float(x, BF16)
    else:
        return x


@triton.jit
def store_tile(pointers, value, mask, INTERPRETED: tl.constexpr):
    """Store float32 values in the dtype of the output; see [`as_stored`]."""
    tl.store(pointers, as_stored(value, pointers, INTERPRETED), mask=mask)
