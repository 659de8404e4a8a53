# SPDX-License-Identifier: Apache-2.0
"""Bundles of kernel arguments, named tuples that Triton takes apart.

Names in capitals are compile-time constants. Numbers that must not specialize a kernel (seeds, row counts) stay
separate arguments, because ``do_not_specialize`` goes by name. A kernel function may take a bundle with `None` in it,
but Triton 3.6 cannot compile one that returns it.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class SchemeConstants(NamedTuple):
    """What is done to each block.

    Attributes:
        MACRO: elements of a macro block; of a block, without macro blocks.
        SEARCH: how macro bytes are found: ``NO_MACRO`` and the like of `common/blocks.py`.
        MANTISSAS: candidates of ``BLOCK_MANTISSAS``: 4, or 3 for values that E4M3 holds.
        HAS_FALLBACK: whether the residual is quantized as well.
        CARRY: the scale rule: what is added to the float32 bits of a maximum before its exponent is read.
        CLIPS: the rule lets magnitudes exceed 6 scales.
        LEAST_SQUARES: the rule tries the neighbouring scales too.
        LIMITED: byte 253 is in reach, the largest of all.
        LARGEST: the largest finite output.
        BF16: the input is bfloat16.
        TILES: blocks are 32 x 32.
        INTERPRETED: Triton's interpreter runs the kernel.
    """

    MACRO: int
    SEARCH: int
    MANTISSAS: int
    HAS_FALLBACK: bool
    CARRY: int
    CLIPS: bool
    LEAST_SQUARES: bool
    LIMITED: bool
    LARGEST: float
    BF16: bool
    TILES: bool
    INTERPRETED: bool


class SideConstants(NamedTuple):
    """What blocks along one axis have of their own: stochastic rounding, the rotation and signs before it, and whether
    they are quantized by `common/bf16x2_blocks.py`."""

    STOCHASTIC: bool = False
    ROTATION: int = 0
    ROTATION_SCALE: float = 1.0
    HAS_SIGNS: bool = False
    BF16X2: bool = False


class Sides(NamedTuple):
    """Blocks along rows, and blocks along columns: constants, or what is written or read for each."""

    rows: Any
    columns: Any


class PackedPointers(NamedTuple):
    """Pointers to codes, scale bytes and macro bytes, and to those of the residual; `None` for absent ones."""

    codes: Any
    scale: Any
    macro: Any
    residual_codes: Any
    residual_scale: Any


class RowBytes(NamedTuple):
    """Bytes of codes, scales and macro factors in a row."""

    n_codes: Any
    n_blocks: Any
    n_macros: Any


class Lengths(NamedTuple):
    """The shape of a matrix, the elements of a row of both results, and the elements between rows and between the
    matrices of a stack."""

    n_rows: Any
    n_cols: Any
    out_cols: Any
    out_cols_t: Any
    x_row_stride: Any
    x_stack_stride: Any


class Tile(NamedTuple):
    """Place of a tile in a matrix ``[n_rows, n_cols]``: rows (int64 ``[ROWS, 1, 1, 1]``) and first column (int64)."""

    rows: Any
    col_start: Any
    n_rows: Any
    n_cols: Any


class Random(NamedTuple):
    """For random numbers: the number of a tensor's first row, and the halves of the seed (int32 bits)."""

    first_row: Any
    seed_low: Any
    seed_high: Any


class TileShape(NamedTuple):
    """Elements of a program of the quantization kernel, and of the strips in which it reads them."""

    HEIGHT: int
    WIDTH: int
    STRIP: int


class Partial(NamedTuple):
    """Pointers to partial sums, and to a counter for each tile."""

    sums: Any
    arrived: Any


class WeightConstants(NamedTuple):
    """A packed weight ``[experts, N, K]`` and how it is decoded on its way into a product.

    Attributes:
        N, K: rows and columns.
        EXPERTS: a power of two that the number of experts does not exceed; 0 for one weight without experts.
        MACRO, SEARCH: as in `SchemeConstants`.
        BM, BN, BK: rows of the other operand, rows of the weight, and columns in a tile.
        CUDA: multiply by instructions written in PTX.
        INTERPRETED: Triton's interpreter runs the kernel.
    """

    N: int
    K: int
    EXPERTS: int
    MACRO: int
    SEARCH: int
    BM: int
    BN: int
    BK: int
    CUDA: bool
    INTERPRETED: bool
