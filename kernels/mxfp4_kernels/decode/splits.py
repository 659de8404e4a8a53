# SPDX-License-Identifier: Apache-2.0
"""Sums of a tile that several programs share, each of which contracts a part of the columns.

Each stores its own; the last one to arrive adds up all of them, in their order, so that the result does not depend on
which one that is.
"""

import triton
import triton.language as tl


@triton.jit
def _wait_for_stores(lanes, WEIGHT: tl.constexpr):
    """Let each thread wait until its stores are where other programs see them, on AMD: the barrier there waits for
    shared memory alone, and the release of an atomic for the stores of its own wave. ``lanes`` is any int32 tensor."""
    if not WEIGHT.CUDA and not WEIGHT.INTERPRETED:
        tl.inline_asm_elementwise(
            "s_waitcnt vmcnt(0)\nv_mov_b32 $0, $1",
            "=v,v,~{memory}",
            [lanes],
            tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def arrives_last(arrived_ptr, n_splits, lanes, WEIGHT: tl.constexpr):
    """Count this program, whose sums are stored, as arrived; whether all others are. ``lanes`` is any int32 tensor. The
    last program sets the counter, zero before, back to zero."""
    # All threads' sums, before one thread says that they are there.
    _wait_for_stores(lanes, WEIGHT)
    tl.debug_barrier()
    return tl.atomic_add(arrived_ptr, 1, sem="acq_rel") == n_splits - 1


@triton.jit
def sum_of_splits(pointers, inside, size, n_splits):
    """Sums of all splits, from the places of the first one's tile (float32); ``size`` elements lie between splits."""
    total = tl.zeros(pointers.shape, tl.float32)
    for split in range(n_splits):
        # Past the first-level cache, which other multiprocessors do not write to.
        total += tl.load(pointers + split * size, mask=inside, other=0.0, cache_modifier=".cg")
    return total
