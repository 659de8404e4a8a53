# SPDX-License-Identifier: Apache-2.0
"""Values of codes and scale bytes.

What it computes: ``E2M1(code) * 2**(scale - 127)``, plus the weighted residual, without the macro factor.

Tile: 8 rows x 256 columns. Launch: one program for every tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .common.blocks import (
    BLOCK_MANTISSAS,
    LARGEST_FLOAT,
    NO_MACRO,
    clamp,
    macro_factor,
    mantissa_factor,
    scale_value,
    without_factor,
)
from .common.packed import Packed, row_bytes
from .common.scheme import Scheme, scheme_constants
from .common.tensors import check_device, check_output, on, output_bits, output_tensor
from .common.tile import offsets_in_tile, store


_ROWS, _COLS = tl.constexpr(8), tl.constexpr(256)


@triton.jit
def _e2m1_values(codes):
    """Float32 values of packed codes ``[...]`` (two in each byte, the even element's in the low half), ``[..., 2]``."""
    wide = codes.to(tl.int32)
    code = tl.join(wide & 0xF, wide >> 4)
    magnitude = code & 7
    # Exponent and mantissa as they are from 1 up; 0 and 0.5, the subnormal, apart.
    bits = tl.where(magnitude > 1, (magnitude + 252) << 22, tl.where(magnitude == 1, 0x3F000000, 0))
    return (bits | ((code & 8) << 28)).to(tl.float32, bitcast=True)


@triton.jit
def _load_bytes(pointer, rows, start, offsets, n_rows, n_cols):
    mask = (rows < n_rows) & (offsets < n_cols - start)
    return tl.load(pointer + start + rows * n_cols + offsets, mask=mask, other=0)


@triton.jit
def _decoded(codes_ptr, scale_ptr, rows, col_start, n_rows, row_bytes, MACRO: tl.constexpr):
    """Float32 values ``[ROWS, macro blocks, blocks, 32]`` of codes and scale bytes, cut to the finite ones."""
    at_codes, at_blocks = offsets_in_tile(_COLS, MACRO, 32, 16), offsets_in_tile(_COLS, MACRO, 32, 1)
    codes = _load_bytes(codes_ptr, rows, col_start // 2, at_codes, n_rows, row_bytes.n_codes)
    byte = _load_bytes(scale_ptr, rows, col_start // 32, at_blocks, n_rows, row_bytes.n_blocks)
    element = tl.reshape(_e2m1_values(codes), [codes.shape[0], codes.shape[1], codes.shape[2], 32])
    return clamp(element * scale_value(byte.to(tl.int32)), LARGEST_FLOAT)


@triton.jit(do_not_specialize=["n_rows", "col_tiles"])
def dequantize_kernel(out_ptr, packed, n_rows, n_cols, row_bytes, col_tiles, alpha, SCHEME: tl.constexpr):
    """``out[n_rows, n_cols]`` (contiguous) from what `store_packed` writes, or any other bytes in its place."""
    pid = tl.program_id(0)
    rows = (pid // col_tiles).to(tl.int64) * _ROWS + tl.arange(0, _ROWS)[:, None, None, None]
    col_start = (pid % col_tiles).to(tl.int64) * _COLS
    value = _decoded(packed.codes, packed.scale, rows, col_start, n_rows, row_bytes, SCHEME.MACRO)
    if SCHEME.HAS_FALLBACK:
        residual_codes, residual_scale = packed.residual_codes, packed.residual_scale
        value += alpha * _decoded(residual_codes, residual_scale, rows, col_start, n_rows, row_bytes, SCHEME.MACRO)
    factor = tl.full([1, 1, 1, 1], 1.0, tl.float32)
    if SCHEME.SEARCH != NO_MACRO:
        at_macros = offsets_in_tile(_COLS, SCHEME.MACRO, SCHEME.MACRO, 1)
        start = col_start // SCHEME.MACRO
        m8 = _load_bytes(packed.macro, rows, start, at_macros, n_rows, row_bytes.n_macros).to(tl.int32)
        if SCHEME.SEARCH == BLOCK_MANTISSAS:
            factor = mantissa_factor((m8 >> (2 * tl.arange(0, 4)[None, None, :, None])) & 3)
        else:
            factor = macro_factor(m8)
    value = without_factor(value, factor, SCHEME)
    offsets = offsets_in_tile(_COLS, SCHEME.MACRO, 32, 32)
    store(out_ptr, rows, col_start, offsets, n_rows, n_cols, value, SCHEME.INTERPRETED)


def dequantize(
    packed: Packed, length: int, scheme: Scheme, dtype: torch.dtype, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the values ``[..., length]`` of codes and scales in float32, bfloat16 or float16. Finite ones that the
    dtype does not hold become its largest; NaN stays NaN.

    Args:
        packed: as `quantize` returns it.
        length: elements of a row.
        scheme: as given to `quantize`; scale rule and rows of blocks do not matter.
        dtype: of the result.
        out: contiguous tensor that the result is written to, instead of a new one.

    Raises:
        TypeError: another dtype, or tensors that are not uint8.
        ValueError: shapes that do not fit together, the scheme or ``out``, or tensors that are not on a GPU.
    """
    check_output(dtype)
    packed.check(length, scheme)
    check_device(packed.codes)
    out = output_tensor(out, (*packed.codes.shape[:-1], length), dtype, packed.codes.device)
    if out.numel():
        n_rows, col_tiles = out.numel() // length, triton.cdiv(length, _COLS.value)
        with on(out.device):
            dequantize_kernel[(triton.cdiv(n_rows, _ROWS.value) * col_tiles,)](
                output_bits(out),
                packed.pointers(),
                n_rows,
                length,
                row_bytes(length, scheme),
                col_tiles,
                scheme.alpha,
                SCHEME=scheme_constants(dtype, scheme, dtype),
                num_warps=4,
                enable_fp_fusion=False,
            )
    return out
