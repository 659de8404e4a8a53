# SPDX-License-Identifier: Apache-2.0
"""Block-diagonal Hadamard rotation of a tile in registers, bit for bit that of ``hf_mxfp4.numerics.hadamard``."""

import triton
import triton.language as tl


@triton.jit
def rotate_tile(x, SIZE: tl.constexpr, SCALE: tl.constexpr):
    """A float32 tile ``[ROWS, macro blocks, blocks, 32]`` with every ``SIZE`` (16, 32, 64 or 128) consecutive elements
    of a row multiplied by Sylvester's matrix: sums and differences of neighbours first, ``SCALE`` last."""
    shape: tl.constexpr = x.shape
    y = x
    for stage in tl.static_range(7):
        if (1 << stage) < SIZE:
            pairs = tl.permute(tl.reshape(y, [x.numel // (2 << stage), 2, 1 << stage]), (0, 2, 1))
            first, second = tl.split(pairs)
            y = tl.permute(tl.join(first + second, first - second), (0, 2, 1))
    return tl.reshape(y, shape) * SCALE
