# SPDX-License-Identifier: Apache-2.0
"""The launches of the fused kernels, on validated arguments."""

from __future__ import annotations

import torch
import triton

from ..common.arguments import BothLengths, Lengths, PackedPointers, RowBytes, SchemeConstants, Sides
from ..common.plan import (
    BLOCK,
    PLAIN,
    Packed,
    Scheme,
    Side,
    alpha,
    as_stored,
    bits,
    both_tile,
    check_device,
    launch,
    options,
    plan,
    scheme_constants,
    unit_of,
)
from .both import quantize_both_kernel
from .dequantize import dequantize_kernel
from .rows import quantize_kernel


def fake_quantize(
    x: torch.Tensor, scheme: Scheme, side: Side = PLAIN, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """See [`mxfp4_kernels.fake_quantize`]."""
    check_device(x)
    if _lies_along_columns(x) and scheme.macro_block != "row":
        return fake_quantize_both(x.mT, scheme, None, side, dtype)[1]
    scheme = scheme.along(side.padded(x.shape[-1]))
    out = torch.empty(*x.shape[:-1], side.padded(x.shape[-1]), dtype=dtype or x.dtype, device=x.device)
    constants = scheme_constants(x.dtype, scheme, out.dtype)
    for first_row, (matrix, target) in _matrices(x, scheme, out):
        _launch_rows(matrix, as_stored(target), scheme, side, first_row, constants)
    return out


def quantize(x: torch.Tensor, scheme: Scheme, side: Side = PLAIN) -> Packed:
    """See [`mxfp4_kernels.quantize`]."""
    check_device(x)
    if _lies_along_columns(x) and scheme.macro_block != "row":
        return quantize_both(x.mT, scheme, None, side)[1]
    scheme = scheme.along(side.padded(x.shape[-1]))
    packed = _empty_packed(x, x.shape[:-1], side.padded(x.shape[-1]), scheme)
    constants = scheme_constants(x.dtype, scheme)
    for first_row, (matrix, *parts) in _matrices(x, scheme, *packed):
        _launch_rows(matrix, PackedPointers(*parts), scheme, side, first_row, constants)
    return packed


def fake_quantize_both(
    x: torch.Tensor, scheme: Scheme, side: Side | None, side_t: Side, dtype: torch.dtype | None = None
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
        _launch_both(x, target, as_stored(out_t), scheme, side, side_t, dtype)
    return out, out_t


def quantize_both(x: torch.Tensor, scheme: Scheme, side: Side | None, side_t: Side) -> tuple[Packed | None, Packed]:
    """See [`mxfp4_kernels.quantize_both`]; without ``side``, of the transpose alone."""
    check_device(x)
    if scheme.macro_block == "row":
        return quantize(x, scheme, side), quantize(x.mT, scheme, side_t)
    *stack, rows, cols = x.shape
    packed_t = _empty_packed(x, (*stack, cols), side_t.padded(rows), scheme)
    packed = None if side is None else _empty_packed(x, (*stack, rows), side.padded(cols), scheme)
    if x.numel():
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
    parts = PackedPointers(*(None if part is None else part.contiguous() for part in packed))
    lengths = Lengths(at.n_cols, None, None, _row_bytes(at.n_cols, constants.MACRO))
    arguments = (as_stored(out), parts, at.n_rows, lengths, at.col_tiles, alpha(scheme))
    tile = at.tile_rows, at.tile_cols
    launch(dequantize_kernel, (at.tiles,), out.device, *arguments, *tile, constants, **options(*tile, constants))
    return out


def _lies_along_columns(x: torch.Tensor) -> bool:
    """Whether neighbours in memory are neighbours in a column: the transpose of a matrix, or of a stack of them."""
    return x.dim() in (2, 3) and x.shape[-1] > 1 and x.stride(-1) != 1 and x.stride(-2) == 1 and x.shape[-2] > 1


def _empty_packed(x: torch.Tensor, rows: tuple[int, ...], length: int, scheme: Scheme) -> Packed:
    def empty(per_byte: int | None) -> torch.Tensor | None:
        if per_byte is None:
            return None
        return torch.empty(*rows, -(-length // per_byte), dtype=torch.uint8, device=x.device)

    residual = scheme.outlier_fallback is not None
    return Packed(
        codes=empty(2),
        scale=empty(BLOCK),
        macro=empty(scheme.macro_block),
        residual_codes=empty(2 if residual else None),
        residual_scale=empty(BLOCK if residual else None),
    )


def _matrices(x: torch.Tensor, scheme: Scheme, *outputs: torch.Tensor | None) -> list[tuple[int, tuple]]:
    """``x`` and the (contiguous) outputs as matrices of the same rows, and the number of the first row: one of all
    rows, unless rows that share blocks would then reach into the next matrix. Empty for an empty ``x``."""
    if x.numel() == 0:
        return []
    x = x.detach()
    rows = x.shape[-2] if x.dim() > 1 and x.shape[-2] % scheme.block_rows else x.numel() // x.shape[-1]

    count = x.numel() // x.shape[-1] // rows

    def split(tensor: torch.Tensor | None) -> tuple:
        return (None,) * count if tensor is None else tensor.reshape(count, rows, tensor.shape[-1]).unbind()

    matrices = split(x)
    if x.shape[-1] > 1 and matrices[0].stride(1) != 1:
        matrices = split(x.contiguous())
    return list(zip(range(0, count * rows, rows), zip(matrices, *map(split, outputs), strict=True), strict=True))


def _launch_rows(
    matrix: torch.Tensor,
    out: torch.Tensor | PackedPointers,
    scheme: Scheme,
    side: Side,
    first_row: int,
    constants: SchemeConstants,
) -> None:
    rows, length = matrix.shape
    padded = side.padded(length)
    flat = padded == length and side.signs is None
    at = plan(rows, padded, matrix.stride(0), unit_of(scheme, side), scheme.block_rows, flat)
    packs = isinstance(out, PackedPointers)
    lengths = Lengths(
        n_cols=at.n_cols,
        n_read=length if at.n_cols == padded else at.n_cols,
        x_row_stride=at.row_stride,
        row_bytes=_row_bytes(at.n_cols, constants.MACRO) if packs else None,
    )
    arguments = (bits(matrix), out, side.signs, at.n_rows, lengths, at.col_tiles, first_row, *side.halves)
    tile = at.tile_rows, at.tile_cols
    launch(
        quantize_kernel,
        (at.tiles,),
        matrix.device,
        *arguments,
        None if packs else alpha(scheme),
        *tile,
        constants,
        side.constants,
        **options(*tile, constants),
    )


def _launch_both(
    x: torch.Tensor,
    out: torch.Tensor | PackedPointers | None,
    out_t: torch.Tensor | PackedPointers,
    scheme: Scheme,
    side: Side | None,
    side_t: Side,
    dtype: torch.dtype,
) -> None:
    x = x.detach()
    if x.stride(-1) != 1 and x.shape[-1] > 1 or x.dim() > 3:
        x = x.contiguous()
    x = x.reshape(-1, *x.shape[-2:])
    stack, rows, cols = x.shape
    sides = (side or PLAIN, side_t)
    out_cols, out_cols_t = sides[0].padded(cols), side_t.padded(rows)
    lengths = BothLengths(rows, cols, out_cols, out_cols_t, x.stride(1), x.stride(0))
    tile, strip = both_tile(scheme)
    constants = scheme_constants(x.dtype, scheme, dtype)
    packs = isinstance(out_t, PackedPointers)
    col_tiles = triton.cdiv(cols, strip if side is None else tile)
    launch(
        quantize_both_kernel,
        (triton.cdiv(rows, tile) * col_tiles, stack),
        x.device,
        bits(x),
        out,
        out_t,
        tuple(one.signs for one in sides),
        lengths,
        tuple(_row_bytes(length, constants.MACRO) for length in (out_cols, out_cols_t)) if packs else None,
        col_tiles,
        *sides[0].halves,
        *side_t.halves,
        None if packs else alpha(scheme),
        TILE=tile,
        STRIP=strip,
        BY_ROWS=side is not None,
        SCHEME=constants,
        SIDES=Sides(*(one.constants for one in sides)),
        **options(tile, strip, constants),
    )


def _row_bytes(n_cols: int, macro: int) -> RowBytes:
    return RowBytes(*(triton.cdiv(n_cols, elements) for elements in (2, BLOCK, macro)))
