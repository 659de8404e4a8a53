# SPDX-License-Identifier: Apache-2.0
"""Quantization to MXFP4: values, or codes and scales, of a matrix along its rows, along its columns, or both.

What it computes: the bits of the eager definition (`hf_mxfp4.numerics`), block by block; see `common/blocks.py`, and
`common/bf16x2_blocks.py` for what takes two elements of bfloat16 at a time.

Tile: a program owns ``HEIGHT x WIDTH`` elements and goes over them in strips. A strip of rows is read as it is. A strip
of columns is transposed on the way into registers; from there on it is like any strip of rows. For both directions a
program goes over its elements twice, the second time out of the caches, so that it needs no more registers than for
one.

Launch: the first axis of the grid runs over the tiles of a matrix, the second one over the matrices of a stack, up to
`_MOST_MATRICES` at a time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .common.arguments import Lengths, PackedPointers, Random, Sides, Tile, TileShape
from .common.bf16x2 import read_words, words_of
from .common.blocks import to_float
from .common.packed import Packed, output_packed, row_bytes
from .common.scheme import BLOCK, NEAREST, PLAIN, Scheme, Side, has_bf16x2, scheme_constants
from .common.tensors import INTERPRETED, bits, check_input, check_output, on, output_bits, output_tensor
from .common.tile import rotated, store_packed, store_pair_codes, store_pair_values, store_values


# AMD's warps have 64 threads, and programs 1024 at most.
_MOST_WARPS = 16
#: Programs along the second axis of a grid on GPUs of NVIDIA and AMD.
_MOST_MATRICES = 2**16 - 1
_NO_OUTPUTS = Sides(None, None)


@triton.jit
def _read(x_ptr, row_start, col_start, n_rows, n_cols, x_row_stride, ROWS: tl.constexpr, COLS: tl.constexpr):
    """``[ROWS, COLS]`` as they are stored, zero outside of the matrix."""
    rows = row_start + tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, COLS)[None, :]
    mask = (rows < n_rows) & (cols < n_cols - col_start)
    return tl.load(x_ptr + col_start + rows * x_row_stride + cols, mask=mask, other=0)


@triton.jit
def _transposed(x):
    """``[COLS, ROWS]`` of ``[ROWS, COLS]``, with eight neighbours of a row in one thread.

    Taking eight neighbours apart and joining them again makes the compiler move them there, through shared memory and
    in their narrow type. Without it the columns of a block would stay in different threads, and each maximum would take
    shuffles and shared memory of its own.
    """
    y = tl.reshape(tl.trans(x), [x.numel // 8, 2, 2, 2])
    a, b = tl.split(y)
    a0, a1 = tl.split(a)
    b0, b1 = tl.split(b)
    a00, a01 = tl.split(a0)
    a10, a11 = tl.split(a1)
    b00, b01 = tl.split(b0)
    b10, b11 = tl.split(b1)
    a = tl.join(tl.join(a00, a01), tl.join(a10, a11))
    b = tl.join(tl.join(b00, b01), tl.join(b10, b11))
    return tl.reshape(tl.join(a, b), [x.shape[1], x.shape[0]])


@triton.jit
def _quantize_strip(
    y, out, signs_ptr, at, row_bytes, alpha, stack, seed_low, seed_high, SCHEME: tl.constexpr, SIDE: tl.constexpr
):
    """Write stored elements ``[ROWS, COLS]``, quantized, to their place in matrix number ``stack`` of ``out``: values,
    or codes and scales if there are ``row_bytes``."""
    ROWS: tl.constexpr = y[0].shape[0] if SIDE.BF16X2 else y.shape[0]
    if not SIDE.BF16X2:
        y = tl.reshape(y, [y.shape[0], y.shape[1] // SCHEME.MACRO, SCHEME.MACRO // 32, 32])
        y = rotated(to_float(y, SCHEME.BF16), at.col_start, at.n_cols, signs_ptr, SIDE)
    before = stack * at.n_rows
    random = Random(before, seed_low, seed_high)
    rows = at.rows + tl.arange(0, ROWS)[:, None, None, None]
    place = Tile(rows, at.col_start, at.n_rows, at.n_cols)
    if row_bytes is None:
        if SIDE.BF16X2:
            store_pair_values(y, out + before * at.n_cols, place, SCHEME)
        else:
            store_values(y, out + before * at.n_cols, place, alpha, random, SCHEME, SIDE)
    else:
        n_codes, n_blocks = row_bytes.n_codes, row_bytes.n_blocks
        out = PackedPointers(
            out.codes + before * n_codes,
            out.scale + before * n_blocks,
            out.macro + before * row_bytes.n_macros if SCHEME.SEARCH > 0 else None,
            out.residual_codes + before * n_codes if SCHEME.HAS_FALLBACK else None,
            out.residual_scale + before * n_blocks if SCHEME.HAS_FALLBACK else None,
        )
        if SIDE.BF16X2:
            store_pair_codes(y, out, place, row_bytes, SCHEME)
        else:
            store_packed(y, out, place, row_bytes, random, SCHEME, SIDE)


@triton.jit(do_not_specialize=["col_tiles", "first_matrix", "seed_low", "seed_high", "seed_low_t", "seed_high_t"])
def quantize_kernel(
    x_ptr,
    out,
    signs,
    lengths,
    row_bytes,
    col_tiles,
    first_matrix,
    seed_low,
    seed_high,
    seed_low_t,
    seed_high_t,
    alpha,
    TILE: tl.constexpr,
    SCHEME: tl.constexpr,
    SIDES: tl.constexpr,
):
    """Values of ``x[n_rows, n_cols]`` (unit stride along columns) to ``out.rows[n_rows, out_cols]`` and
    ``out.columns[n_cols, out_cols_t]``, each contiguous; or what [`store_packed`] writes, with ``row_bytes``. A side of
    ``SIDES`` is `None` where nothing is wanted of it."""
    # Triton 3.6 passes no part of a constant on, but a constant.
    SIDE: tl.constexpr = SIDES.rows
    SIDE_T: tl.constexpr = SIDES.columns
    n_rows, n_cols, stride = lengths.n_rows, lengths.n_cols, lengths.x_row_stride
    pid = tl.program_id(0)
    row_start = (pid // col_tiles).to(tl.int64) * TILE.HEIGHT
    col_start = (pid % col_tiles).to(tl.int64) * TILE.WIDTH
    stack = first_matrix + tl.program_id(1).to(tl.int64)
    x_ptr += stack * lengths.x_stack_stride
    if SIDE_T is not None:
        for strip in range(TILE.WIDTH // TILE.STRIP):
            start = col_start + strip * TILE.STRIP
            y = _transposed(_read(x_ptr, row_start, start, n_rows, n_cols, stride, TILE.HEIGHT, TILE.STRIP))
            if SIDE_T.BF16X2:
                y = words_of(y, SCHEME.MACRO // 32)
            at = Tile(start, row_start, n_cols, lengths.out_cols_t)
            _quantize_strip(
                y,
                out.columns,
                signs.columns,
                at,
                row_bytes.columns,
                alpha,
                stack,
                seed_low_t,
                seed_high_t,
                SCHEME,
                SIDE_T,
            )
    if SIDE is not None:
        for strip in range(TILE.HEIGHT // TILE.STRIP):
            start = row_start + strip * TILE.STRIP
            if SIDE.BF16X2:
                y = read_words(
                    x_ptr, start, col_start, n_rows, n_cols, stride, TILE.STRIP, TILE.WIDTH, SCHEME.MACRO // 32
                )
            else:
                y = _read(x_ptr, start, col_start, n_rows, n_cols, stride, TILE.STRIP, TILE.WIDTH)
            at = Tile(start, col_start, n_rows, lengths.out_cols)
            _quantize_strip(
                y, out.rows, signs.rows, at, row_bytes.rows, alpha, stack, seed_low, seed_high, SCHEME, SIDE
            )


def fake_quantize(
    x: torch.Tensor,
    scheme: Scheme = PLAIN,
    side: Side = NEAREST,
    dtype: torch.dtype | None = None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the MXFP4 values of ``x``: blocks of 32 along the last axis. No gradient flows.

    The bits are those of the eager definition in the ``hf_mxfp4`` package. An axis that is not a multiple of 32 behaves
    as if padded with zeros, a block holding NaN or infinity becomes NaN, and a finite input never becomes infinite.

    Args:
        x: float32, bfloat16 or float16 tensor ``[..., K]`` on a GPU. A matrix may have any row stride, and a matrix or
            stack of them may be a transpose (``x.mT``); other layouts are copied first.
        scheme: how blocks are quantized.
        side: random numbers and rotation.
        dtype: of the result, float32, bfloat16 or float16; by default that of ``x``. Values saturate at its largest.
        out: contiguous tensor that the result is written to, instead of a new one. It shares no memory with ``x``.

    Returns:
        ``out``, or a contiguous tensor of the shape of ``x``, with K' columns (K padded to a multiple) under a
        rotation.

    Raises:
        TypeError: ``x`` is not a tensor, another dtype, or a seed that is not an integer.
        ValueError: too few axes, not on a GPU, a seed, rotation or signs that are not supported, or an ``out`` of
            another shape, device or layout.
    """
    x, by_columns, side = _oriented("fake_quantize", x, scheme, side)
    if by_columns:
        _, values = _values(x, scheme, Sides(None, side), dtype, Sides(None, out))
    else:
        values, _ = _values(x, scheme, Sides(side, None), dtype, Sides(out, None))
    return values


def fake_quantize_rows_and_columns(
    x: torch.Tensor,
    scheme: Scheme = PLAIN,
    rows: Side = NEAREST,
    columns: Side = NEAREST,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``fake_quantize(x, scheme, rows)`` and ``fake_quantize(x.mT, scheme, columns)`` from one read of ``x``.

    Arguments and errors as in [`fake_quantize`]. Contiguous tensors ``[..., M, K]`` and ``[..., K, M]``.
    """
    sides = _checked_sides("fake_quantize_rows_and_columns", x, rows, columns)
    return _values(x.detach(), scheme, sides, dtype)


def quantize(x: torch.Tensor, scheme: Scheme = PLAIN, side: Side = NEAREST, *, out: Packed | None = None) -> Packed:
    """Return codes and scales of ``x``, of which `dequantize` makes the bits of [`fake_quantize`]. Arguments and errors
    as there. Under a rotation K of the result is the padded length."""
    x, by_columns, side = _oriented("quantize", x, scheme, side)
    if by_columns:
        _, packed = _packed(x, scheme, Sides(None, side), Sides(None, out))
    else:
        packed, _ = _packed(x, scheme, Sides(side, None), Sides(out, None))
    return packed


def quantize_rows_and_columns(
    x: torch.Tensor, scheme: Scheme = PLAIN, rows: Side = NEAREST, columns: Side = NEAREST
) -> tuple[Packed, Packed]:
    """Return ``quantize(x, scheme, rows)`` and ``quantize(x.mT, scheme, columns)`` from one read of ``x``."""
    sides = _checked_sides("quantize_rows_and_columns", x, rows, columns)
    return _packed(x.detach(), scheme, sides)


def _oriented(name: str, x: torch.Tensor, scheme: Scheme, side: Side) -> tuple[torch.Tensor, bool, Side]:
    """Return ``x`` as it is in memory, whether blocks then run along its columns, and the checked side.

    A transpose is read as the matrix that it was made of, because neighbours in its rows are not neighbours in memory.
    """
    check_input(name, x, 1 if scheme.block_rows == 1 else 2)
    side = side.checked(x, x.shape[-1])
    x = x.detach()
    if x.dim() in (2, 3) and min(x.shape[-2:]) > 1 and x.stride(-1) != 1 and x.stride(-2) == 1:
        return x.mT, True, side
    return x, False, side


def _checked_sides(name: str, x: torch.Tensor, rows: Side, columns: Side) -> Sides:
    """Check ``x`` and what both of its directions ask for."""
    check_input(name, x, 2)
    return Sides(rows.checked(x, x.shape[-1]), columns.checked(x, x.shape[-2]))


def _values(
    x: torch.Tensor, scheme: Scheme, sides: Sides, dtype: torch.dtype | None, outputs: Sides = _NO_OUTPUTS
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return values for each side that is wanted, written to ``outputs`` where these are given."""
    dtype = dtype or x.dtype
    check_output(dtype)
    rows = None
    if sides.rows is not None:
        rows = output_tensor(outputs.rows, _shape_by_rows(x, sides.rows), dtype, x.device)
    columns = None
    if sides.columns is not None:
        columns = output_tensor(outputs.columns, _shape_by_columns(x, sides.columns), dtype, x.device)
    _launch(x, Sides(output_bits(rows), output_bits(columns)), scheme, sides, dtype, packs=False)
    return rows, columns


def _packed(
    x: torch.Tensor, scheme: Scheme, sides: Sides, outputs: Sides = _NO_OUTPUTS
) -> tuple[Packed | None, Packed | None]:
    """Return codes and scales for each side that is wanted, written to ``outputs`` where these are given."""
    rows = row_pointers = None
    if sides.rows is not None:
        rows = output_packed(outputs.rows, _shape_by_rows(x, sides.rows), scheme, x.device)
        row_pointers = rows.pointers()
    columns = column_pointers = None
    if sides.columns is not None:
        columns = output_packed(outputs.columns, _shape_by_columns(x, sides.columns), scheme, x.device)
        column_pointers = columns.pointers()
    _launch(x, Sides(row_pointers, column_pointers), scheme, sides, x.dtype, packs=True)
    return rows, columns


def _shape_by_rows(x: torch.Tensor, side: Side) -> tuple[int, ...]:
    """Return the shape of the result for ``x``."""
    return (*x.shape[:-1], side.padded(x.shape[-1]))


def _shape_by_columns(x: torch.Tensor, side: Side) -> tuple[int, ...]:
    """Return the shape of the result for the transpose of ``x``."""
    *stack, rows, cols = x.shape
    return (*stack, cols, side.padded(rows))


def _launch(x: torch.Tensor, out: Sides, scheme: Scheme, sides: Sides, dtype: torch.dtype, packs: bool) -> None:
    """Start the kernel on all matrices of ``x``: it writes values to ``out``, or codes and scales if it ``packs``."""
    if x.numel() == 0:
        return
    x = _as_stack(x, scheme, sides)
    stack, n_rows, n_cols = x.shape
    constants = scheme_constants(x.dtype, scheme, dtype)
    tile = tile_shape(scheme, sides)
    # A side that is not wanted has no padding: tiles then cover the matrix as it is.
    rows = sides.rows or NEAREST
    columns = sides.columns or NEAREST
    out_cols = rows.padded(n_cols)
    out_cols_t = columns.padded(n_rows)
    col_tiles = triton.cdiv(out_cols, tile.WIDTH)
    row_tiles = triton.cdiv(out_cols_t, tile.HEIGHT)
    n_bytes = Sides(None, None)
    alpha = None
    if packs:
        n_bytes = Sides(row_bytes(out_cols, scheme), row_bytes(out_cols_t, scheme))
    else:
        alpha = scheme.alpha
    with on(x.device):
        for first in range(0, stack, _MOST_MATRICES):
            quantize_kernel[(row_tiles * col_tiles, min(stack - first, _MOST_MATRICES))](
                bits(x),
                out,
                Sides(rows.signs, columns.signs),
                Lengths(n_rows, n_cols, out_cols, out_cols_t, x.stride(1), x.stride(0)),
                n_bytes,
                col_tiles,
                first,
                *rows.halves,
                *columns.halves,
                alpha,
                TILE=tile,
                SCHEME=constants,
                SIDES=_side_constants(x, scheme, sides, dtype, packs),
                **compile_options(tile),
            )


def _side_constants(x: torch.Tensor, scheme: Scheme, sides: Sides, dtype: torch.dtype, packs: bool) -> Sides:
    """Return the compile-time arguments of both sides of ``x [stack, rows, columns]``.

    Pairs of bfloat16 elements need whole blocks, and an NVIDIA GPU from sm_80 on. Pairs of rows are read as words of 32
    bits, so that each row must begin at one.
    """
    has_pairs = dtype == x.dtype and has_bf16x2(x.dtype, scheme, packs)
    if has_pairs and not INTERPRETED:
        has_pairs = torch.version.hip is None and torch.cuda.get_device_capability(x.device) >= (8, 0)
    rows = None
    if sides.rows is not None:
        begins_at_words = x.stride(0) % 2 == x.stride(1) % 2 == x.data_ptr() // 2 % 2 == 0
        rows = sides.rows.constants(has_pairs and begins_at_words and x.shape[2] % BLOCK == 0)
    columns = None
    if sides.columns is not None:
        columns = sides.columns.constants(has_pairs and x.shape[1] % BLOCK == 0)
    return Sides(rows, columns)


def _as_stack(x: torch.Tensor, scheme: Scheme, sides: Sides) -> torch.Tensor:
    """Return ``x`` as matrices ``[stack, rows, columns]`` with unit stride along columns."""
    if x.stride(-1) != 1 and x.shape[-1] > 1 or x.dim() > 3:
        x = x.contiguous()
    if x.dim() == 1:
        return x.view(1, 1, -1)
    # Rows alone do not care which matrix they are of, unless rows that share blocks would reach into the next one.
    if sides.columns is None and x.shape[-2] % scheme.block_rows == 0:
        return x.reshape(1, -1, x.shape[-1])
    return x.reshape(-1, *x.shape[-2:])


def tile_shape(scheme: Scheme, sides: Sides) -> TileShape:
    """Return the tile of a program, whose sides are multiples of macro blocks and rotations."""
    unit = 128
    if scheme.macro_block == 256:
        unit = 256
    if sides.columns is None:
        # Nothing is transposed: a tile is one strip.
        if scheme.block_rows == 1:
            return TileShape(16, 256, 16)
        return TileShape(scheme.block_rows, unit, scheme.block_rows)
    strip = 32
    # A residual needs more registers per element than half of the threads of a multiprocessor have.
    if scheme.block_rows == 1 and scheme.outlier_fallback is None and unit == 128:
        strip = 64
    if sides.rows is None:
        return TileShape(unit, strip, strip)
    return TileShape(unit, unit, strip)


def compile_options(tile: TileShape) -> dict[str, int | bool]:
    """Return how to compile for a tile. Contracting a multiply and an add would change bits; see `common/blocks.py`."""
    elements = max(tile.HEIGHT, tile.WIDTH) * tile.STRIP
    return {"num_warps": min(elements // 1024, _MOST_WARPS), "enable_fp_fusion": False}
