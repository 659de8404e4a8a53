# SPDX-License-Identifier: Apache-2.0
"""Tile shapes and the launch of the fused kernel."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import triton

from ._kernel import fake_quantize_kernel


#: Added to the float32 bits of a block maximum so that its exponent rounds up where the scale rule says.
_CARRY = {"rceil": 0x3FFFFF, "floor": 0, "even": 0x200000}
_BLOCK = 32
# Two (16-bit) or four (32-bit) vectors of 16 bytes per thread of a program with 4 warps: enough loads in flight to
# stream, few enough registers to keep the multiprocessor full. Both tiles are multiples of the largest macro block.
_FLAT_TILE = (1, 2048)
_ROW_TILE = (8, 256)
#: Whether TRITON_INTERPRET=1 was set when the kernel was defined, which is what counts.
INTERPRETED = not isinstance(fake_quantize_kernel, triton.JITFunction)
#: Contracting a multiply and an add would change bits; see the kernel's module docstring.
LAUNCH_OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}


def compile_constants(
    dtype: torch.dtype, scale_rule: str, macro_block: int | None, outlier_fallback: float | None
) -> dict[str, Any]:
    """The kernel's compile-time arguments, except the tile shape."""
    return {
        "MACRO": macro_block or _BLOCK,
        "HAS_MACRO": macro_block is not None,
        "HAS_FALLBACK": outlier_fallback is not None,
        "CARRY": _CARRY[scale_rule],
        "CLIPS": scale_rule != "rceil",
        "LARGEST": torch.finfo(dtype).max,
        "BF16": dtype == torch.bfloat16,
        "INTERPRETED": INTERPRETED,
    }


def plan(n_rows: int, n_cols: int, row_stride: int, unit: int) -> tuple[int, int, int, int, int]:
    """``rows, cols, row stride, tile rows, tile cols``: the matrix as the kernel shall see it, cut into tiles.

    A gapless matrix whose rows are whole (macro) blocks is one long row: no part of a tile is wasted then.
    """
    if n_cols % unit == 0 and (row_stride == n_cols or n_rows == 1):
        return 1, n_rows * n_cols, n_rows * n_cols, *_FLAT_TILE
    return n_rows, n_cols, row_stride, *_ROW_TILE


def fake_quantize(
    x: torch.Tensor, scale_rule: str, macro_block: int | None, outlier_fallback: float | None
) -> torch.Tensor:
    """Launch on validated arguments; see [`mxfp4_kernels.fake_quantize`]."""
    if x.device.type == "cpu" and not INTERPRETED:
        raise ValueError("the Triton kernel needs a GPU tensor, got one on the CPU")
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel() == 0:
        return out

    matrix = x.detach().reshape(-1, x.shape[-1])
    if matrix.shape[1] > 1 and matrix.stride(1) != 1:
        matrix = matrix.contiguous()
    constants = compile_constants(x.dtype, scale_rule, macro_block, outlier_fallback)
    n_rows, n_cols, row_stride, tile_rows, tile_cols = plan(*matrix.shape, matrix.stride(0), constants["MACRO"])
    target = out
    if x.dtype == torch.bfloat16:
        matrix = matrix.view(torch.int16)
        target = out.view(torch.int16) if INTERPRETED else out

    col_tiles = triton.cdiv(n_cols, tile_cols)
    grid = (triton.cdiv(n_rows, tile_rows) * col_tiles,)
    with torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext():
        fake_quantize_kernel[grid](
            matrix,
            target,
            n_rows,
            n_cols,
            row_stride,
            col_tiles,
            1.0 if outlier_fallback is None else float(outlier_fallback),
            ROWS=tile_rows,
            COLS=tile_cols,
            **constants,
            **LAUNCH_OPTIONS,
        )
    return out
