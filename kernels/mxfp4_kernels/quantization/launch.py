# SPDX-License-Identifier: Apache-2.0
"""The launches of the fused kernels, on validated arguments."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import triton

from ..common.plan import (
    BLOCK,
    INTERPRETED,
    PLAIN,
    Packed,
    Plan,
    Scheme,
    Side,
    both_tile,
    compile_constants,
    options,
    plan,
    unit_of,
)
from .both import fake_quantize_both_kernel, quantize_both_kernel
from .dequantize import dequantize_kernel
from .rows import fake_quantize_kernel, quantize_kernel


def fake_quantize(
    x: torch.Tensor, scheme: Scheme, side: Side = PLAIN, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """See [`mxfp4_kernels.fake_quantize`]."""
    check_device(x)
    if _lies_along_columns(x) and scheme.macro_block != "row":
        return fake_quantize_both(x.mT, scheme, None, side, dtype)[1]
    scheme = scheme.along(side.padded(x.shape[-1]))
    out = torch.empty(*x.shape[:-1], side.padded(x.shape[-1]), dtype=dtype or x.dtype, device=x.device)
    constants = compile_constants(x.dtype, scheme, side, out=out.dtype)
    for first_row, (matrix, target) in _matrices(x, scheme, out):
        arguments = _row_arguments(matrix, scheme, side, first_row, constants)
        launch(fake_quantize_kernel, arguments | {"out_ptr": as_stored(target), "alpha": alpha(scheme)})
    return out


def quantize(x: torch.Tensor, scheme: Scheme, side: Side = PLAIN) -> Packed:
    """See [`mxfp4_kernels.quantize`]."""
    check_device(x)
    if _lies_along_columns(x) and scheme.macro_block != "row":
        return quantize_both(x.mT, scheme, None, side)[1]
    scheme = scheme.along(side.padded(x.shape[-1]))
    packed = empty_packed(x, x.shape[:-1], side.padded(x.shape[-1]), scheme)
    constants = compile_constants(x.dtype, scheme, side)
    for first_row, (matrix, *parts) in _matrices(x, scheme, *packed):
        arguments = _row_arguments(matrix, scheme, side, first_row, constants)
        arguments |= named(parts) | sizes(arguments["n_cols"], constants["MACRO"])
        launch(quantize_kernel, arguments)
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
        arguments = _both_arguments(x, scheme, side, side_t, dtype)
        arguments |= {"out_ptr": None if out is None else as_stored(out), "out_t_ptr": as_stored(out_t)}
        launch(fake_quantize_both_kernel, arguments | {"alpha": alpha(scheme)})
    return out, out_t


def quantize_both(x: torch.Tensor, scheme: Scheme, side: Side | None, side_t: Side) -> tuple[Packed | None, Packed]:
    """See [`mxfp4_kernels.quantize_both`]; without ``side``, of the transpose alone."""
    check_device(x)
    if scheme.macro_block == "row":
        return quantize(x, scheme, side), quantize(x.mT, scheme, side_t)
    *stack, rows, cols = x.shape
    packed_t = empty_packed(x, (*stack, cols), side_t.padded(rows), scheme)
    packed = None if side is None else empty_packed(x, (*stack, rows), side.padded(cols), scheme)
    if x.numel():
        arguments = _both_arguments(x, scheme, side, side_t, x.dtype)
        arguments |= named(packed or (None,) * 5) | named(packed_t, "_t")
        arguments |= sizes(arguments["out_cols"], arguments["MACRO"])
        arguments |= sizes(arguments["out_cols_t"], arguments["MACRO"], "_t")
        launch(quantize_both_kernel, arguments)
    return packed, packed_t


def dequantize(packed: Packed, length: int, scheme: Scheme, dtype: torch.dtype) -> torch.Tensor:
    """See [`mxfp4_kernels.dequantize`]."""
    check_device(packed.codes)
    out = torch.empty(*packed.codes.shape[:-1], length, dtype=dtype, device=packed.codes.device)
    if out.numel() == 0:
        return out
    constants = compile_constants(dtype, scheme.along(length))
    at = plan(out.numel() // length, length, length, constants["MACRO"])
    arguments = tiled(at, constants) | named([None if part is None else part.contiguous() for part in packed])
    arguments |= sizes(at.n_cols, constants["MACRO"])
    launch(dequantize_kernel, arguments | {"out_ptr": as_stored(out), "alpha": alpha(scheme)})
    return out


def check_device(x: torch.Tensor) -> None:
    if x.device.type == "cpu" and not INTERPRETED:
        raise ValueError("the Triton kernel needs a GPU tensor, got one on the CPU")


def _lies_along_columns(x: torch.Tensor) -> bool:
    """Whether neighbours in memory are neighbours in a column: the transpose of a matrix, or of a stack of them."""
    return x.dim() in (2, 3) and x.shape[-1] > 1 and x.stride(-1) != 1 and x.stride(-2) == 1 and x.shape[-2] > 1


def empty_packed(x: torch.Tensor, rows: tuple[int, ...], length: int, scheme: Scheme) -> Packed:
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


def _row_arguments(
    matrix: torch.Tensor, scheme: Scheme, side: Side, first_row: int, constants: dict[str, Any]
) -> dict[str, Any]:
    """Arguments of the kernels along rows, apart from the outputs."""
    rows, length = matrix.shape
    padded = side.padded(length)
    flat = padded == length and side.signs is None
    at = plan(rows, padded, matrix.stride(0), unit_of(scheme, side), scheme.block_rows, flat)
    seed_low, seed_high = side.halves
    return tiled(at, constants) | {
        "x_ptr": bits(matrix),
        "signs_ptr": side.signs,
        "n_read": length if at.n_cols == padded else at.n_cols,
        "x_row_stride": at.row_stride,
        "first_row": first_row,
        "seed_low": seed_low,
        "seed_high": seed_high,
    }


def _both_arguments(
    x: torch.Tensor, scheme: Scheme, side: Side | None, side_t: Side, dtype: torch.dtype
) -> dict[str, Any]:
    """Arguments of the kernels of `quantization/both.py`, apart from the outputs."""
    x = x.detach()
    if x.stride(-1) != 1 and x.shape[-1] > 1 or x.dim() > 3:
        x = x.contiguous()
    x = x.reshape(-1, *x.shape[-2:])
    _, rows, cols = x.shape
    by_rows = side or PLAIN
    tile, strip = both_tile(scheme)
    constants = compile_constants(x.dtype, scheme, by_rows, side_t, dtype)
    at = Plan(rows, cols, x.stride(1), tile, tile if side is not None else strip)
    arguments = tiled(at, constants)
    seed_low, seed_high = by_rows.halves
    seed_low_t, seed_high_t = side_t.halves
    return arguments | {
        "grid": (*arguments["grid"], x.shape[0]),
        "x_ptr": bits(x),
        "signs_ptr": by_rows.signs,
        "signs_t_ptr": side_t.signs,
        "out_cols": by_rows.padded(cols),
        "out_cols_t": side_t.padded(rows),
        "x_row_stride": x.stride(1),
        "x_stack_stride": x.stride(0),
        "seed_low": seed_low,
        "seed_high": seed_high,
        "seed_low_t": seed_low_t,
        "seed_high_t": seed_high_t,
        "TILE": tile,
        "STRIP": strip,
        "BY_ROWS": side is not None,
    }


def tiled(at: Plan, constants: dict[str, Any]) -> dict[str, Any]:
    """The matrix, its tiles and the options to compile for those."""
    col_tiles = triton.cdiv(at.n_cols, at.tile_cols)
    return {
        "grid": (triton.cdiv(at.n_rows, at.tile_rows) * col_tiles,),
        "n_rows": at.n_rows,
        "n_cols": at.n_cols,
        "col_tiles": col_tiles,
        "ROWS": at.tile_rows,
        "COLS": at.tile_cols,
        **constants,
    }


def alpha(scheme: Scheme) -> float:
    return 1.0 if scheme.outlier_fallback is None else float(scheme.outlier_fallback)


def named(parts: Any, suffix: str = "") -> dict[str, torch.Tensor | None]:
    return {f"{name}{suffix}_ptr": part for name, part in zip(Packed._fields, parts, strict=True)}


def sizes(n_cols: int, macro: int, suffix: str = "") -> dict[str, int]:
    """Bytes of codes, scale bytes and macro bytes for a row of ``n_cols`` elements."""
    per_byte = {"n_codes": 2, "n_blocks": BLOCK, "n_macros": macro}
    return {name + suffix: triton.cdiv(n_cols, elements) for name, elements in per_byte.items()}


def bits(matrix: torch.Tensor) -> torch.Tensor:
    """bfloat16 goes in as int16 bits."""
    return matrix.view(torch.int16) if matrix.dtype == torch.bfloat16 else matrix


def as_stored(out: torch.Tensor) -> torch.Tensor:
    """Interpreted, bfloat16 comes out as int16 bits."""
    return bits(out) if INTERPRETED else out


def launch(kernel: Any, arguments: dict[str, Any]) -> None:
    """Start a kernel on those of the arguments that it has."""
    grid, device = arguments["grid"], next(a.device for a in arguments.values() if isinstance(a, torch.Tensor))
    known = {name: value for name, value in arguments.items() if name in kernel.arg_names}
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        tile = (known[name] for name in (("TILE", "STRIP") if "TILE" in known else ("ROWS", "COLS")))
        kernel[grid](**known, **options(*tile, known))
