# SPDX-License-Identifier: Apache-2.0
"""Tile shapes and the launches of the fused kernels, on validated arguments."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import torch
import triton

from . import _blocks
from ._kernel import dequantize_kernel, fake_quantize_kernel, quantize_kernel


#: Added to the float32 bits of a block maximum so that its exponent rounds up where the scale rule says.
_CARRY = {"rceil": 0x3FFFFF, "floor": 0, "even": 0x200000, "mse": 0}
_SEARCH = {name: getattr(_blocks, name.upper()).value for name in ("static", "dynamic", "blockwise")}
_BLOCK = 32
# Two (16-bit) or four (32-bit) vectors of 16 bytes per thread of a program with 4 warps: enough loads in flight to
# stream, few enough registers to keep the multiprocessor full. Both tiles are multiples of the largest macro block.
_FLAT_TILE = (1, 2048)
_ROW_TILE = (8, 256)
#: Whether TRITON_INTERPRET=1 was set when the kernel was defined, which is what counts.
INTERPRETED = not isinstance(fake_quantize_kernel, triton.JITFunction)


class Scheme(NamedTuple):
    """What to do to each block: the arguments of [`mxfp4_kernels.fake_quantize`]."""

    scale_rule: str = "rceil"
    macro_block: int | None = None
    macro_search: str = "static"
    outlier_fallback: float | None = None
    block_rows: int = 1


class Plan(NamedTuple):
    """A matrix as the kernel shall see it, cut into tiles; columns are elements."""

    n_rows: int
    n_cols: int
    row_stride: int
    tile_rows: int
    tile_cols: int


class Packed(NamedTuple):
    """Codes, scale bytes and macro bytes, as [`mxfp4_kernels.quantize`] returns them."""

    codes: torch.Tensor
    scale: torch.Tensor
    macro: torch.Tensor | None
    residual_codes: torch.Tensor | None
    residual_scale: torch.Tensor | None


def compile_constants(dtype: torch.dtype, scheme: Scheme) -> dict[str, Any]:
    """Compile-time arguments of all three kernels, the tile shape apart."""
    least_squares = scheme.scale_rule == "mse"
    carry = _CARRY[scheme.scale_rule]
    return {
        "MACRO": scheme.macro_block or _BLOCK,
        "SEARCH": 0 if scheme.macro_block is None else _SEARCH[scheme.macro_search],
        "HAS_FALLBACK": scheme.outlier_fallback is not None,
        "CARRY": carry,
        "CLIPS": scheme.scale_rule != "rceil",
        "LEAST_SQUARES": least_squares,
        # Only scales above E - 2 reach byte 253, and only beyond float16.
        "LIMITED": dtype != torch.float16 and (carry > 0 or least_squares),
        "LARGEST": torch.finfo(dtype).max,
        "BF16": dtype == torch.bfloat16,
        "TILES": scheme.block_rows != 1,
        "INTERPRETED": INTERPRETED,
    }


def options(tile_rows: int, tile_cols: int, constants: dict[str, Any]) -> dict[str, Any]:
    """How to compile for a tile. Contracting a multiply and an add would change bits; see `_blocks.py`."""
    num_warps = tile_rows * tile_cols // 512
    if constants["SEARCH"] in (_SEARCH["dynamic"], _SEARCH["blockwise"]) and constants.get("LEAST_SQUARES"):
        # A search in a search needs more registers per element. AMD's warps have 64 threads, and blocks 1024 at most.
        num_warps = min(2 * num_warps, 16)
    return {"num_warps": num_warps, "enable_fp_fusion": False}


def plan(n_rows: int, n_cols: int, row_stride: int, unit: int, block_rows: int = 1) -> Plan:
    """The matrix cut into tiles.

    A gapless matrix whose rows are whole (macro) blocks is one long row: no part of a tile is wasted then.
    """
    if block_rows != 1:
        return Plan(n_rows, n_cols, row_stride, block_rows, max(unit, 128))
    if n_cols % unit == 0 and (row_stride == n_cols or n_rows == 1):
        return Plan(1, n_rows * n_cols, n_rows * n_cols, *_FLAT_TILE)
    return Plan(n_rows, n_cols, row_stride, *_ROW_TILE)


def fake_quantize(x: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """See [`mxfp4_kernels.fake_quantize`]."""
    _check_device(x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    constants = compile_constants(x.dtype, scheme)
    alpha = 1.0 if scheme.outlier_fallback is None else float(scheme.outlier_fallback)
    for matrix, target in _matrices(x, scheme, out):
        at = _plan(matrix, scheme)
        _launch(fake_quantize_kernel, x.device, at, constants, _bits(matrix), _as_stored(target), *at[:3], alpha=alpha)
    return out


def quantize(x: torch.Tensor, scheme: Scheme) -> Packed:
    """See [`mxfp4_kernels.quantize`]."""
    _check_device(x)
    length = x.shape[-1]

    def empty(per_byte: int) -> torch.Tensor:
        return torch.empty(*x.shape[:-1], -(-length // per_byte), dtype=torch.uint8, device=x.device)

    fallback = scheme.outlier_fallback is not None
    packed = Packed(
        codes=empty(2),
        scale=empty(_BLOCK),
        macro=None if scheme.macro_block is None else empty(scheme.macro_block),
        residual_codes=empty(2) if fallback else None,
        residual_scale=empty(_BLOCK) if fallback else None,
    )
    constants = compile_constants(x.dtype, scheme)
    for matrix, *parts in _matrices(x, scheme, *packed):
        at = _plan(matrix, scheme)
        sizes = _sizes(at.n_cols, constants["MACRO"])
        _launch(quantize_kernel, x.device, at, constants, _bits(matrix), *parts, *at[:2], *sizes, at.row_stride)
    return packed


def dequantize(packed: Packed, length: int, scheme: Scheme, dtype: torch.dtype) -> torch.Tensor:
    """See [`mxfp4_kernels.dequantize`]."""
    _check_device(packed.codes)
    device = packed.codes.device
    out = torch.empty(*packed.codes.shape[:-1], length, dtype=dtype, device=device)
    if out.numel() == 0:
        return out
    constants = compile_constants(dtype, scheme)
    n_rows = out.numel() // length
    at = plan(n_rows, length, length, constants["MACRO"])
    parts = [None if part is None else part.contiguous() for part in packed]
    alpha = 1.0 if scheme.outlier_fallback is None else float(scheme.outlier_fallback)
    sizes = _sizes(at.n_cols, constants["MACRO"])
    _launch(dequantize_kernel, device, at, constants, _as_stored(out), *parts, *at[:2], *sizes, alpha=alpha)
    return out


def _check_device(x: torch.Tensor) -> None:
    if x.device.type == "cpu" and not INTERPRETED:
        raise ValueError("the Triton kernel needs a GPU tensor, got one on the CPU")


def _matrices(x: torch.Tensor, scheme: Scheme, *outputs: torch.Tensor | None) -> list[tuple]:
    """``x`` and the (contiguous) outputs as matrices of the same rows: one of all rows, unless rows that share blocks
    would then reach into the next matrix. Empty for an empty ``x``."""
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
    return list(zip(matrices, *map(split, outputs), strict=True))


def _plan(matrix: torch.Tensor, scheme: Scheme) -> Plan:
    return plan(*matrix.shape, matrix.stride(0), scheme.macro_block or _BLOCK, scheme.block_rows)


def _sizes(n_cols: int, macro: int) -> tuple[int, int, int]:
    """Bytes of codes, scale bytes and macro bytes for a row of ``n_cols`` elements."""
    return triton.cdiv(n_cols, 2), triton.cdiv(n_cols, _BLOCK), triton.cdiv(n_cols, macro)


def _bits(matrix: torch.Tensor) -> torch.Tensor:
    """bfloat16 goes in as int16 bits."""
    return matrix.view(torch.int16) if matrix.dtype == torch.bfloat16 else matrix


def _as_stored(out: torch.Tensor) -> torch.Tensor:
    """Interpreted, bfloat16 comes out as int16 bits."""
    return _bits(out) if INTERPRETED else out


def _launch(kernel: Any, device: torch.device, at: Plan, constants: dict, *arguments: Any, **scalars: float) -> None:
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    col_tiles = triton.cdiv(at.n_cols, at.tile_cols)
    grid = (triton.cdiv(at.n_rows, at.tile_rows) * col_tiles,)
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        kernel[grid](
            *arguments,
            col_tiles=col_tiles,
            **scalars,
            ROWS=at.tile_rows,
            COLS=at.tile_cols,
            **constants,
            **options(at.tile_rows, at.tile_cols, constants),
        )
