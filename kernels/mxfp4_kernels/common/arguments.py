# SPDX-License-Identifier: Apache-2.0
"""Bundles of kernel arguments, named tuples that Triton takes apart.

Those with names in capitals are compile-time constants. Numbers by which no kernel shall be specialized (seeds, row
counts) stay arguments of their own, because ``do_not_specialize`` goes by name. A function of a kernel may take bundles
but not return one with `None` in it, which Triton 3.6 does not compile.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class SchemeConstants(NamedTuple):
    """What is done to each block.

    Attributes:
        MACRO: elements of a macro block; of a block, without macro blocks.
        SEARCH: how their bytes are found, ``NO_MACRO`` and the like of `common/blocks.py`.
        HAS_FALLBACK: whether the residual is quantized as well.
        CARRY: the scale rule: what is added to the float32 bits of a maximum before its exponent is read.
        CLIPS: the rule lets magnitudes exceed 6 scales.
        LEAST_SQUARES: the rule tries the neighbouring scales too.
        LIMITED: byte 253 is in reach, the largest of all.
        LARGEST: the largest finite output.
        BF16: whether the input is bfloat16.
        TILES: blocks are 32 x 32.
        INTERPRETED: for Triton's interpreter.
        NATIVE: for GPUs that convert to E4M3, and whose maximum takes magnitudes and keeps NaN, by one instruction.
        CONVERTS: by the instruction that makes E2M1 codes.
    """

    MACRO: int
    SEARCH: int
    HAS_FALLBACK: bool
    CARRY: int
    CLIPS: bool
    LEAST_SQUARES: bool
    LIMITED: bool
    LARGEST: float
    BF16: bool
    TILES: bool
    INTERPRETED: bool
    NATIVE: bool = False
    CONVERTS: bool = False


class SideConstants(NamedTuple):
    """What blocks along one axis have of their own: stochastic rounding, and the rotation and signs before it."""

    STOCHASTIC: bool = False
    ROTATION: int = 0
    ROTATION_SCALE: float = 1.0
    HAS_SIGNS: bool = False


class Sides(NamedTuple):
    """Of blocks along rows, and of those along columns. (Triton forgets the names in a plain tuple of named ones.)"""

    rows: SideConstants
    columns: SideConstants


class PackedPointers(NamedTuple):
    """Where codes, scale bytes and macro bytes are, and those of the residual; `None` for what there is not."""

    codes: Any
    scale: Any
    macro: Any
    residual_codes: Any
    residual_scale: Any


class DecodeConstants(NamedTuple):
    """How a packed weight is decoded on its way into a product.

    Attributes:
        MACRO: elements of a macro block.
        SEARCH: as in `SchemeConstants`.
        CUDA: multiply by instructions written in PTX.
        INTERPRETED: for Triton's interpreter.
        NATURAL: in the order of the weight's columns.
        ORDER: otherwise, how columns of a block are ordered, as of `gemm/decode_tile.py`.
        PIECES: bfloat16 numbers that add up to an element of the other operand.
        EVEN: steps divide the weight along its rows.
        COL_MULTIPLE: a power of two that divides the rows' length.
    """

    MACRO: int
    SEARCH: int
    CUDA: bool
    INTERPRETED: bool
    NATURAL: bool = False
    PIECES: int = 1
    EVEN: bool = False
    COL_MULTIPLE: int = 1
    ORDER: int = 0


class ProductTile(NamedTuple):
    """Compile-time sizes of the tiles of a product.

    Attributes:
        BM: rows of the left operand; of a gradient of weights, rows that are contracted.
        BN: rows of the right operand.
        BK: columns that are contracted at a time; of a gradient of weights, columns of the right operand.
        GROUP_M: rows of tiles that run at the same time.
    """

    BM: int = 0
    BN: int = 0
    BK: int = 0
    GROUP_M: int = 0


class ExpertsShape(NamedTuple):
    """Compile-time sizes of the weights ``[.., N, K]`` of experts, of which ``EXPERTS``, a power of two, are the most
    that there can be. ``EACH_ROW``: there are no more rows than slots for tiles, so that each row has its own."""

    N: int
    K: int
    EXPERTS: int = 0
    EACH_ROW: bool = False


class Strides(NamedTuple):
    """Elements between neighbours: matrices of a stack, rows, and columns (of scales: groups of 128 columns); `None`
    for those that a kernel does not ask for."""

    matrices: Any
    rows: Any
    columns: Any


class ColumnsOf(NamedTuple):
    """Some columns of a matrix: where it is, which they are, and its `Strides`."""

    pointer: Any
    columns: Any
    strides: Any


class Partial(NamedTuple):
    """Where partial sums go, and a counter for each tile."""

    sums: Any
    arrived: Any


class MacroBytes(NamedTuple):
    """Where the macro bytes of a matrix are, or go, and how many a row has."""

    pointer: Any
    n_macros: Any


class RowBytes(NamedTuple):
    """Bytes of codes, scales and macro factors in a row."""

    n_codes: Any
    n_blocks: Any
    n_macros: Any


class Lengths(NamedTuple):
    """Of rows: elements of the matrix and of those that are read, elements between rows, and the bytes of codes and
    the rest; `None` for what a kernel does not ask for."""

    n_cols: Any
    n_read: Any
    x_row_stride: Any
    row_bytes: Any


class BothLengths(NamedTuple):
    """Of a matrix that is read along rows and along columns: its shape, elements of a row of both results, and elements
    between rows and between the matrices of a stack."""

    n_rows: Any
    n_cols: Any
    out_cols: Any
    out_cols_t: Any
    x_row_stride: Any
    x_stack_stride: Any


class FoldedPointers(NamedTuple):
    """Where E4M3 elements and float32 scales are, or go."""

    elements: Any
    scale: Any


class FoldLengths(NamedTuple):
    """Of rows that are folded into E4M3: elements, those with the padding of the rotation and with that of the result,
    and elements between rows and between columns."""

    n_cols: Any
    length: Any
    padded_cols: Any
    x_row_stride: Any
    x_col_stride: Any


class FoldBothLengths(NamedTuple):
    """As `FoldLengths`, of a matrix and of its transpose."""

    n_rows: Any
    n_cols: Any
    length: Any
    length_t: Any
    padded_cols: Any
    padded_rows: Any
    x_row_stride: Any
    x_col_stride: Any


class Tile(NamedTuple):
    """Where a tile of a matrix ``[n_rows, n_cols]`` lies: its rows (int64 ``[ROWS, 1, 1, 1]``, or the first of them)
    and its first column (int64)."""

    rows: Any
    col_start: Any
    n_rows: Any
    n_cols: Any


class Random(NamedTuple):
    """Of random numbers: the number of a tensor's first row, and the halves of the seed (int32 bits)."""

    first_row: Any
    seed_low: Any
    seed_high: Any
