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
from ..common.elements import e2m1_values
from ..common.tile import offsets_in_tile, store, tile_start


@triton.jit
def _decode(codes, byte):
    """Values ``[..., 32]`` of packed codes ``[..., 16]`` and scale bytes ``[..., 1]``, cut to the finite ones."""
    element = tl.reshape(e2m1_values(codes), [codes.shape[0], codes.shape[1], codes.shape[2], 32])
    return clamp(element * scale_value(byte.to(tl.int32)), LARGEST_FLOAT)


@triton.jit
def _load_bytes(pointer, rows, start, offsets, n_rows, n_cols):
    mask = (rows < n_rows) & (offsets < n_cols - start)
    return tl.load(pointer + start + rows * n_cols + offsets, mask=mask, other=0)


@triton.jit(do_not_specialize=["n_rows", "col_tiles"])
def dequantize_kernel(
    out_ptr, packed, n_rows, lengths, col_tiles, alpha, ROWS: tl.constexpr, COLS: tl.constexpr, SCHEME: tl.constexpr
):
    """``out[n_rows, n_cols]`` (contiguous) from what [`pack_tile`] writes, or any other bytes in its place. Where
    ``SEARCH`` is neither `NO_MACRO` nor `BLOCKWISE` values are divided by macro factors."""
    row_start, col_start = tile_start(col_tiles, ROWS, COLS)
    rows = row_start + tl.arange(0, ROWS)[:, None, None, None]
    n_codes, n_blocks = lengths.row_bytes.n_codes, lengths.row_bytes.n_blocks
    at_codes = offsets_in_tile(COLS, SCHEME.MACRO, 32, 16)
    at_blocks = offsets_in_tile(COLS, SCHEME.MACRO, 32, 1)
    codes = _load_bytes(packed.codes, rows, col_start // 2, at_codes, n_rows, n_codes)
    byte = _load_bytes(packed.scale, rows, col_start // 32, at_blocks, n_rows, n_blocks)
    value = _decode(codes, byte)
    if SCHEME.HAS_FALLBACK:
        codes = _load_bytes(packed.residual_codes, rows, col_start // 2, at_codes, n_rows, n_codes)
        byte = _load_bytes(packed.residual_scale, rows, col_start // 32, at_blocks, n_rows, n_blocks)
        value = value + _decode(codes, byte) * alpha
    if SCHEME.SEARCH != NO_MACRO:
        at_macros = offsets_in_tile(COLS, SCHEME.MACRO, SCHEME.MACRO, 1)
        m8 = _load_bytes(packed.macro, rows, col_start // SCHEME.MACRO, at_macros, n_rows, lengths.row_bytes.n_macros)
        m8 = m8.to(tl.int32)
        if SCHEME.SEARCH == BLOCKWISE:
            value = value * mantissa_factor((m8 >> (2 * tl.arange(0, 4)[None, None, :, None])) & 3)
        else:
            value = divide_by_factor(value, macro_factor(m8), can_divide_fast(value), SCHEME.INTERPRETED)
    value = clamp(value, SCHEME.LARGEST)
    offsets = offsets_in_tile(COLS, SCHEME.MACRO, 32, 32)
    store(out_ptr, rows, col_start, offsets, n_rows, lengths.n_cols, value, SCHEME.INTERPRETED)
