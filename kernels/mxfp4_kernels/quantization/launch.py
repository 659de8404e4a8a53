# SPDX-License-Identifier: Apache-2.0
"""The launches of the fused kernels, on validated arguments."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import triton

from ..common.arguments import BothLengths, Lengths, MacroBytes, PackedPointers, RowBytes, Sides
from ..common.plan import (
    BLOCK,
    INTERPRETED,
    MANTISSAS_TILE,
    PAIRS_BOTH_STRIP,
    PAIRS_BOTH_TILE,
    PAIRS_OPTIONS,
    PAIRS_TILE,
    PLAIN,
    Packed,
    Scheme,
    Side,
    alpha,
    as_stored,
    bits,
    both_tile,
    check_device,
    empty_packed,
    has_e2m1,
    has_pairs,
    launch,
    options,
    plan,
    scheme_constants,
    takes_mantissas,
    takes_pairs,
    unit_of,
)
from .both import quantize_both_kernel
from .dequantize import dequantize_kernel
from .mantissas import fake_mantissas_kernel, quantize_mantissas_kernel
from .pairs import quantize_pairs_kernel
from .pairs_both import quantize_pairs_both_kernel
from .pairs_values import pairs_values_kernel
from .rows import quantize_kernel


def fake_quantize(
    x: torch.Tensor,
    scheme: Scheme,
    side: Side = PLAIN,
    dtype: torch.dtype | None = None,
    limit: torch.dtype | None = None,
    macro: torch.Tensor | None = None,
) -> torch.Tensor:
    """See [`mxfp4_kernels.fake_quantize`]; into ``macro``, if it is given, macro bytes are written, or read from it
    where the search is ``"given"``."""
    check_device(x)
    # Macro bytes lie in the order of rows.
    x = x if macro is None else x.contiguous()
    columns, scheme, shape = _read_as(x.shape, x.stride(), scheme, side.rotation)
    if columns:
        return fake_quantize_both(x.mT, scheme, None, side, dtype, limit)[1]
    out = torch.empty(shape, dtype=dtype or x.dtype, device=x.device)
    if x.numel() and macro is None and takes_mantissas(scheme, side, x.dtype, x.shape[-1], out.dtype):
        if limit in (None, out.dtype) and _lies_in_words(x) and has_pairs(x.device):
            _launch_fake_mantissas(x, out, scheme)
            return out
    for first_row, matrix, target, of_macros in _matrices(x, scheme, out, macro):
        _launch_rows(matrix, as_stored(target), None, scheme, side, first_row, out.dtype, limit, of_macros)
    return out


def fake_quantize_with_macro(
    x: torch.Tensor, scheme: Scheme, dtype: torch.dtype | None = None, limit: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """See [`mxfp4_kernels.fake_quantize_with_macro`]."""
    shape = *x.shape[:-1], triton.cdiv(x.shape[-1], scheme.macro_block)
    macro = torch.empty(shape, dtype=torch.uint8, device=x.device)
    return fake_quantize(x, scheme, PLAIN, dtype, limit, macro), macro


def quantize(x: torch.Tensor, scheme: Scheme, side: Side = PLAIN, converts: bool = True) -> Packed:
    """See [`mxfp4_kernels.quantize`]."""
    check_device(x)
    columns, scheme, shape = _read_as(x.shape, x.stride(), scheme, side.rotation)
    if columns:
        return quantize_both(x.mT, scheme, None, side)[1]
    packed = empty_packed(x.device, shape, scheme)
    if x.numel() and _lies_in_words(x) and has_pairs(x.device):
        if takes_pairs(scheme, side, x.dtype, x.shape[-1]):
            _launch_pairs(x, packed, scheme, converts and has_e2m1(x.device))
            return packed
        if takes_mantissas(scheme, side, x.dtype, x.shape[-1]):
            _launch_mantissas(x, packed, scheme)
            return packed
    for first_row, matrix, *parts in _matrices(x, scheme, *packed):
        _launch_rows(matrix, None, PackedPointers(*parts), scheme, side, first_row, None)
    return packed


def quantize_with_values(x: torch.Tensor, scheme: Scheme) -> tuple[Packed, torch.Tensor]:
    """See [`mxfp4_kernels.quantize_with_values`]."""
    check_device(x)
    x, scheme = x.detach().contiguous(), scheme.along(x.shape[-1])
    packed, values = empty_packed(x.device, x.shape, scheme), torch.empty_like(x)
    if x.numel() and takes_pairs(scheme, PLAIN, x.dtype, x.shape[-1]) and _lies_in_words(x) and has_pairs(x.device):
        _launch_pairs_values(x, packed, values, scheme)
        return packed, values
    for first_row, matrix, target, codes, scale, macro, *_ in _matrices(x, scheme, values, *packed):
        parts = PackedPointers(codes, scale, None, None, None)
        _launch_rows(matrix, as_stored(target), parts, scheme, PLAIN, first_row, x.dtype, macro=macro)
    return packed, values


def fake_quantize_both(
    x: torch.Tensor,
    scheme: Scheme,
    side: Side | None,
    side_t: Side,
    dtype: torch.dtype | None = None,
    limit: torch.dtype | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """See [`mxfp4_kernels.fake_quantize_both`]; without ``side``, of the transpose alone."""
    check_device(x)
    if scheme.macro_block == "row":
        return fake_quantize(x, scheme, side, dtype), fake_quantize(x.mT, scheme, side_t, dtype)
    *stack, rows, cols = x.shape
    dtype = dtype or x.dtype
    out_t = torch.empty(*stack, cols, side_t.padded(rows), dtype=dtype, device=x.device)
    out = None if side is None else torch.empty(*stack, rows, side.padded(cols), dtype=dtype, device=x.device)
    if x.numel():
        target = None if out is None else as_stored(out)
        _launch_both(x, target, as_stored(out_t), scheme, side, side_t, dtype, limit)
    return out, out_t


def quantize_both(x: torch.Tensor, scheme: Scheme, side: Side | None, side_t: Side) -> tuple[Packed | None, Packed]:
    """See [`mxfp4_kernels.quantize_both`]; without ``side``, of the transpose alone."""
    check_device(x)
    if scheme.macro_block == "row":
        return quantize(x, scheme, side), quantize(x.mT, scheme, side_t)
    *stack, rows, cols = x.shape
    packed_t = empty_packed(x.device, (*stack, cols, side_t.padded(rows)), scheme)
    packed = None if side is None else empty_packed(x.device, (*stack, rows, side.padded(cols)), scheme)
    if x.dim() == 2 and x.numel() and _in_pairs_both(x, scheme, side, side_t):
        _launch_pairs_both(x, packed, packed_t, scheme)
    elif x.numel():
        pointers = None if packed is None else PackedPointers(*packed)
        _launch_both(x, pointers, PackedPointers(*packed_t), scheme, side, side_t, x.dtype)
    return packed, packed_t


def dequantize(packed: Packed, length: int, scheme: Scheme, dtype: torch.dtype) -> torch.Tensor:
    """See [`mxfp4_kernels.dequantize`]."""
    check_device(packed.codes)
    out = torch.empty(*packed.codes.shape[:-1], length, dtype=dtype, device=packed.codes.device)
    if out.numel() == 0:
        return out
    constants = scheme_constants(dtype, scheme.along(length))
    at = plan(out.numel() // length, length, length, constants.MACRO)
    parts = PackedPointers(*packed.contiguous())
    lengths = Lengths(at.n_cols, None, None, _row_bytes(at.n_cols, constants.MACRO))
    arguments = (as_stored(out), parts, at.n_rows, lengths, at.col_tiles, alpha(scheme))
    tile = at.tile_rows, at.tile_cols
    launch(dequantize_kernel, (at.tiles,), out.device, *arguments, *tile, constants, **options(*tile, constants))
    return out


@functools.lru_cache(maxsize=4096)
def _read_as(
    shape: torch.Size, stride: tuple[int, ...], scheme: Scheme, rotation: int | None
) -> tuple[bool, Scheme, tuple[int, ...]]:
    """Whether a tensor is read along its columns, because neighbours in memory are neighbours there: the transpose of
    a matrix, or of a stack of them. If not, the scheme for its last axis, and the shape of the result."""
    columns = len(shape) in (2, 3) and shape[-1] > 1 and stride[-1] != 1 and stride[-2] == 1 and shape[-2] > 1
    if columns and scheme.macro_block != "row":
        return True, scheme, ()
    length = Side(rotation=rotation).padded(shape[-1])
    return False, scheme.along(length), (*shape[:-1], length)


def _matrices(x: torch.Tensor, scheme: Scheme, *outputs: torch.Tensor | None) -> Iterable[tuple]:
    """The number of the first row, and ``x`` and the (contiguous) outputs as matrices of the same rows: one of all
    rows, unless rows that share blocks would then reach into the next matrix. Empty for an empty ``x``."""
    if x.numel() == 0:
        return ()
    x = x.detach()
    rows = x.shape[-2] if x.dim() > 1 and x.shape[-2] % scheme.block_rows else x.numel() // x.shape[-1]
    count = x.numel() // x.shape[-1] // rows
    matrices = x.reshape(count, rows, x.shape[-1])
    if x.shape[-1] > 1 and matrices.stride(2) != 1:
        matrices = x.contiguous().view(matrices.shape)
    found = [matrices.unbind()]
    for out in outputs:
        found.append((None,) * count if out is None else out.reshape(count, rows, out.shape[-1]).unbind())
    return zip(range(0, count * rows, rows), *found, strict=True)


class _Rows(NamedTuple):
    """How [`quantize_kernel`] is launched: programs, sizes, what comes after the numbers of the launch, and options of
    the compiler."""

    grid: tuple[int]
    n_rows: int
    lengths: Lengths
    col_tiles: int
    constants: tuple
    options: dict[str, int | bool]


@functools.lru_cache(maxsize=4096)
def _rows(
    shape: torch.Size,
    row_stride: int,
    dtype: torch.dtype,
    scheme: Scheme,
    rotation: int | None,
    drawn: bool,
    has_signs: bool,
    packs: bool,
    out: torch.dtype | None,
    limit: torch.dtype | None,
) -> _Rows:
    """For a matrix of a layout; ``drawn`` random numbers; whether it ``packs`` codes; ``out`` is the dtype of values,
    `None` for codes alone; ``limit`` as of [`scheme_constants`]."""
    side = Side(0 if drawn else None, rotation)
    rows, length = shape
    padded = side.padded(length)
    flat = padded == length and not has_signs
    at = plan(rows, padded, row_stride, unit_of(scheme, side), scheme.block_rows, flat)
    constants = scheme_constants(dtype, scheme, out, limit=limit)
    lengths = Lengths(
        n_cols=at.n_cols,
        n_read=length if at.n_cols == padded else at.n_cols,
        x_row_stride=at.row_stride,
        row_bytes=_row_bytes(at.n_cols, constants.MACRO) if packs else None,
    )
    tile = at.tile_rows, at.tile_cols
    of_side = side.constants._replace(HAS_SIGNS=has_signs)
    last = (None if out is None else alpha(scheme), *tile, constants, of_side)
    return _Rows((at.tiles,), at.n_rows, lengths, at.col_tiles, last, options(*tile, constants))


def _launch_rows(
    matrix: torch.Tensor,
    out: torch.Tensor | None,
    packed: PackedPointers | None,
    scheme: Scheme,
    side: Side,
    first_row: int,
    dtype: torch.dtype | None,
    limit: torch.dtype | None = None,
    macro: torch.Tensor | None = None,
) -> None:
    """Values of a ``dtype`` to ``out``, codes to ``packed``, or both; ``macro``: as of [`fake_quantize`]."""
    seed, rotation, signs = side
    drawn, has_signs = seed is not None, signs is not None
    packs = packed is not None
    at = _rows(matrix.shape, matrix.stride(0), matrix.dtype, scheme, rotation, drawn, has_signs, packs, dtype, limit)
    numbers = (at.n_rows, at.lengths, at.col_tiles, first_row, *side.halves)
    if macro is not None:
        macro = MacroBytes(macro, triton.cdiv(at.lengths.n_cols, scheme.macro_block))
    arguments = (bits(matrix), out, packed, macro, signs, *numbers, *at.constants)
    launch(quantize_kernel, at.grid, matrix.device, *arguments, **at.options)


def _lies_in_words(x: torch.Tensor) -> bool:
    """Whether elements lie side by side, from the first one's word of 32 bits on."""
    return x.is_contiguous() and x.storage_offset() % 2 == 0 and x.data_ptr() % 4 == 0


def _in_words(packed: Packed) -> PackedPointers:
    """Parts of results whose codes are written as words of eight."""
    codes, residual_codes = (
        p if p is None else p.view(-1).view(torch.int32) for p in (packed.codes, packed.residual_codes)
    )
    return PackedPointers(codes, packed.scale, packed.macro, residual_codes, packed.residual_scale)


def _launch_pairs(x: torch.Tensor, packed: Packed, scheme: Scheme, converts: bool) -> None:
    n_blocks, blocks = x.numel() // BLOCK, PAIRS_TILE // (2 * BLOCK)
    words, out = x.detach().reshape(-1).view(torch.int32), _in_words(packed)
    grid = (triton.cdiv(n_blocks, 2 * blocks),)
    constants = scheme_constants(x.dtype, scheme, converts=converts)
    launch(quantize_pairs_kernel, grid, x.device, words, out, n_blocks, blocks, constants, **PAIRS_OPTIONS)


def _launch_pairs_values(x: torch.Tensor, packed: Packed, values: torch.Tensor, scheme: Scheme) -> None:
    n_blocks, blocks = x.numel() // BLOCK, PAIRS_TILE // (2 * BLOCK)
    words, out = (tensor.view(-1).view(torch.int32) for tensor in (x, values))
    grid = (triton.cdiv(n_blocks, blocks),)
    arguments = (words, _in_words(packed), out, n_blocks, blocks, scheme_constants(x.dtype, scheme))
    launch(pairs_values_kernel, grid, x.device, *arguments, **PAIRS_OPTIONS)


def _launch_mantissas(x: torch.Tensor, packed: Packed, scheme: Scheme) -> None:
    _launch_of_mantissas(quantize_mantissas_kernel, x, _in_words(packed), scheme)


def _launch_fake_mantissas(x: torch.Tensor, out: torch.Tensor, scheme: Scheme) -> None:
    _launch_of_mantissas(fake_mantissas_kernel, x, out.view(-1).view(torch.int32), scheme)


def _launch_of_mantissas(kernel: Any, x: torch.Tensor, out: Any, scheme: Scheme) -> None:
    n_blocks, macros = x.numel() // BLOCK, MANTISSAS_TILE // scheme.macro_block
    words, constants = x.detach().reshape(-1).view(torch.int32), scheme_constants(x.dtype, scheme)
    grid = (triton.cdiv(n_blocks, 4 * macros),)
    launch(kernel, grid, x.device, words, out, n_blocks, macros, constants, **PAIRS_OPTIONS)


def _in_pairs_both(x: torch.Tensor, scheme: Scheme, side: Side | None, side_t: Side) -> bool:
    """Whether `quantization/pairs_both.py` takes a matrix: both axes of whole blocks, in tiles that offsets of 32 bits
    reach."""
    plain = side_t == PLAIN and side in (None, PLAIN) and scheme.outlier_fallback is None
    if not plain or scheme.macro_block not in (None, PAIRS_BOTH_TILE):
        return False
    if not all(takes_pairs(scheme, PLAIN, x.dtype, length) for length in x.shape):
        return False
    row_stride, col_stride = x.stride()
    in_words = col_stride == 1 and row_stride % 2 == 0 and x.data_ptr() % 4 == 0
    return in_words and has_pairs(x.device) and max(row_stride, *x.shape) < 2**31 // PAIRS_BOTH_TILE


def _launch_pairs_both(x: torch.Tensor, packed: Packed | None, packed_t: Packed, scheme: Scheme) -> None:
    rows, cols = x.shape
    tile = PAIRS_BOTH_TILE
    # Interpreted, fewer operations on more numbers.
    strip = tile if INTERPRETED else PAIRS_BOTH_STRIP
    out = [
        None if p is None else PackedPointers(p.codes.view(torch.int32), p.scale, p.macro, None, None)
        for p in (packed, packed_t)
    ]
    col_tiles = triton.cdiv(cols, strip if packed is None else tile)
    grid = (triton.cdiv(rows, tile) * col_tiles,)
    arguments = (bits(x.detach()), *out, rows, cols, x.stride(0), col_tiles, strip, packed is not None)
    launch(quantize_pairs_both_kernel, grid, x.device, *arguments, scheme_constants(x.dtype, scheme), **PAIRS_OPTIONS)


def _launch_both(
    x: torch.Tensor,
    out: torch.Tensor | PackedPointers | None,
    out_t: torch.Tensor | PackedPointers,
    scheme: Scheme,
    side: Side | None,
    side_t: Side,
    dtype: torch.dtype,
    limit: torch.dtype | None = None,
) -> None:
    x = x.detach()
    if x.stride(-1) != 1 and x.shape[-1] > 1 or x.dim() > 3:
        x = x.contiguous()
    x = x.reshape(-1, *x.shape[-2:])
    stack, rows, cols = x.shape
    by_rows = side is not None
    side = side or PLAIN
    out_cols, out_cols_t = side.padded(cols), side_t.padded(rows)
    lengths = BothLengths(rows, cols, out_cols, out_cols_t, x.stride(1), x.stride(0))
    tile, strip = both_tile(scheme)
    constants = scheme_constants(x.dtype, scheme, dtype, limit=limit)
    row_bytes = None
    if isinstance(out_t, PackedPointers):
        row_bytes = _row_bytes(out_cols, constants.MACRO), _row_bytes(out_cols_t, constants.MACRO)
    col_tiles = triton.cdiv(cols, tile if by_rows else strip)
    launch(
        quantize_both_kernel,
        (triton.cdiv(rows, tile) * col_tiles, stack),
        x.device,
        bits(x),
        out,
        out_t,
        (side.signs, side_t.signs),
        lengths,
        row_bytes,
        col_tiles,
        *side.halves,
        *side_t.halves,
        alpha(scheme) if row_bytes is None else None,
        TILE=tile,
        STRIP=strip,
        BY_ROWS=by_rows,
        SCHEME=constants,
        SIDES=Sides(side.constants, side_t.constants),
        **options(tile, strip, constants),
    )


@functools.lru_cache(maxsize=1024)
def _row_bytes(n_cols: int, macro: int) -> RowBytes:
    return RowBytes(*(triton.cdiv(n_cols, elements) for elements in (2, BLOCK, macro)))
