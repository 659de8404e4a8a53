# SPDX-License-Identifier: Apache-2.0
"""The kernel that makes values of codes and scale bytes. Tiles are as in `common/blocks.py`."""

import triton
import triton.language as tl

from ..common.blocks import (
    BLOCKWISE,
    LARGEST_FLOAT,
    NO_MACRO,
    can_divide_fast,
    clamp,
    divide_by_factor,
    macro_factor,
    mantissa_factor,
    scale_value,
)
from ..common.tile import offsets_in_tile, store_values, tile_start


@triton.jit
def _decode(codes, byte):
    """Values ``[..., 32]`` of packed codes ``[..., 16]`` and scale bytes ``[..., 1]``, cut to the finite ones."""
    wide = codes.to(tl.int32)
    code = tl.join(wide & 0xF, wide >> 4)
    code = tl.reshape(code, [codes.shape[0], codes.shape[1], codes.shape[2], 32])
    magnitude = code & 7
    # Exponent and mantissa as they stand from 1 up; 0 and 0.5, the subnormal, apart.
    bits = tl.where(magnitude > 1, (magnitude + 252) << 22, tl.where(magnitude == 1, 0x3F000000, 0))
    element = (bits | ((code & 8) << 28)).to(tl.float32, bitcast=True)
    return clamp(element * scale_value(byte.to(tl.int32)), LARGEST_FLOAT)


@triton.jit
def _load_bytes(pointer, rows, start, offsets, n_rows, n_cols):
    mask = (rows < n_rows) & (offsets < n_cols - start)
    return tl.load(pointer + start + rows * n_cols + offsets, mask=mask, other=0)


@triton.jit(do_not_specialize=["n_rows", "col_tiles"])
def dequantize_kernel(
    out_ptr,
    codes_ptr,
    scale_ptr,
    macro_ptr,
    residual_codes_ptr,
    residual_scale_ptr,
    n_rows,
    n_cols,
    n_codes,
    n_blocks,
    n_macros,
    col_tiles,
    alpha,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    MACRO: tl.constexpr,
    SEARCH: tl.constexpr,
    HAS_FALLBACK: tl.constexpr,
    LARGEST: tl.constexpr,
    OUT_BF16: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """``out[n_rows, n_cols]`` (contiguous) from what [`quantize_kernel`] writes, or any other bytes in its place. Where
    ``SEARCH`` is neither `NO_MACRO` nor `BLOCKWISE` values are divided by macro factors."""
    row_start, col_start = tile_start(col_tiles, ROWS, COLS)
    rows = row_start + tl.arange(0, ROWS)[:, None, None, None]
    at_codes = offsets_in_tile(COLS, MACRO, 32, 16)
    at_blocks = offsets_in_tile(COLS, MACRO, 32, 1)
    codes = _load_bytes(codes_ptr, rows, col_start // 2, at_codes, n_rows, n_codes)
    byte = _load_bytes(scale_ptr, rows, col_start // 32, at_blocks, n_rows, n_blocks)
    value = _decode(codes, byte)
    if HAS_FALLBACK:
        codes = _load_bytes(residual_codes_ptr, rows, col_start // 2, at_codes, n_rows, n_codes)
        byte = _load_bytes(residual_scale_ptr, rows, col_start // 32, at_blocks, n_rows, n_blocks)
        value = value + _decode(codes, byte) * alpha
    if SEARCH != NO_MACRO:
        at_macros = offsets_in_tile(COLS, MACRO, MACRO, 1)
        m8 = _load_bytes(macro_ptr, rows, col_start // MACRO, at_macros, n_rows, n_macros)
        m8 = m8.to(tl.int32)
        if SEARCH == BLOCKWISE:
            value = value * mantissa_factor((m8 >> (2 * tl.arange(0, 4)[None, None, :, None])) & 3)
        else:
            value = divide_by_factor(value, macro_factor(m8), can_divide_fast(value), INTERPRETED)
    value = clamp(value, LARGEST)
    offsets = offsets_in_tile(COLS, MACRO, 32, 32)
    store_values(out_ptr, rows, col_start, offsets, n_rows, n_cols, value, OUT_BF16, INTERPRETED)
