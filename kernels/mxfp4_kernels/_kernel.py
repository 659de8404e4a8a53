# SPDX-License-Identifier: Apache-2.0
"""The fused kernels: one read of a matrix, and one write of its MXFP4 values, or of their codes and scale bytes.

Each program owns a tile of ``ROWS x COLS`` elements, held as ``[ROWS, macro blocks, blocks, 32]``: the maxima of blocks
and macro blocks are plain reductions, and the innermost axis is contiguous in memory. What becomes of a tile, and what
its arithmetic asks of the compiler, is in `_blocks.py` and `_macro.py`.
"""

import triton
import triton.language as tl

from ._blocks import (
    BLOCKWISE,
    DYNAMIC,
    FAST_DIVISION_BITS,
    LARGEST_FLOAT,
    NAN_BYTE,
    NO_MACRO,
    STATIC,
    TOO_LARGE_TO_SCALE_BITS,
    all_at_least,
    all_below,
    can_divide_fast,
    clamp,
    divide_by_factor,
    macro_factor,
    mantissa_factor,
    max_bits,
    quantize_pass,
    scale_value,
)
from ._macro import apply_macro


# The fallback weight from which on [`divide_by_factor`] can take its fast way.
_FAST_DIVISION_ALPHA = tl.constexpr(2.0**-20)


@triton.jit
def _tile_start(col_tiles, ROWS: tl.constexpr, COLS: tl.constexpr):
    """First row and first column (int64) of this program's tile; ``ROWS == 1`` means that the matrix is one row."""
    pid = tl.program_id(0)
    if ROWS == 1:
        row_start = 0
        col_start = pid.to(tl.int64) * COLS
    else:
        row_start = (pid // col_tiles).to(tl.int64) * ROWS
        col_start = (pid % col_tiles).to(tl.int64) * COLS
    return row_start, col_start


@triton.jit
def _offsets(COLS: tl.constexpr, MACRO: tl.constexpr, SIZE: tl.constexpr, EACH: tl.constexpr):
    """Offsets inside a tile row (int32), ``[1, COLS / MACRO, MACRO / SIZE, EACH]``, of what there are ``EACH`` of for
    ``SIZE`` elements."""
    macros = tl.arange(0, COLS // MACRO)[None, :, None, None]
    parts = tl.arange(0, MACRO // SIZE)[None, None, :, None]
    return (macros * (MACRO // SIZE) + parts) * EACH + tl.arange(0, EACH)[None, None, None, :]


@triton.jit
def _load(x_ptr, rows, col_start, offsets, n_rows, n_cols, x_row_stride, BF16: tl.constexpr):
    """Elements as float32, zero outside of the matrix. bfloat16 arrives as int16 bits (``BF16``)."""
    mask = (rows < n_rows) & (offsets < n_cols - col_start)
    x = tl.load(x_ptr + col_start + rows * x_row_stride + offsets, mask=mask, other=0)
    if BF16:
        return (x.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def _store(out_ptr, rows, start, offsets, n_rows, n_cols, values):
    """Store what lies inside of the matrix ``out[n_rows, n_cols]`` (contiguous), from column ``start`` on."""
    mask = (rows < n_rows) & (offsets < n_cols - start)
    pointers = out_ptr + start + rows * n_cols + offsets
    tl.store(pointers, tl.broadcast_to(values, mask.shape).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _store_values(
    out_ptr, rows, col_start, offsets, n_rows, n_cols, value, BF16: tl.constexpr, INTERPRETED: tl.constexpr
):
    """Store float32 values in the dtype of the output; interpreted, bfloat16 leaves as int16 bits."""
    if BF16 and INTERPRETED:
        bits = value.to(tl.int32, bitcast=True)
        value = tl.where(value == value, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16, 0x7FC0)
    _store(out_ptr, rows, col_start, offsets, n_rows, n_cols, value)


@triton.jit(do_not_specialize=["n_rows", "col_tiles"])
def fake_quantize_kernel(
    x_ptr,
    out_ptr,
    n_rows,
    n_cols,
    x_row_stride,
    col_tiles,
    alpha,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    MACRO: tl.constexpr,
    SEARCH: tl.constexpr,
    HAS_FALLBACK: tl.constexpr,
    CARRY: tl.constexpr,
    CLIPS: tl.constexpr,
    LEAST_SQUARES: tl.constexpr,
    LIMITED: tl.constexpr,
    LARGEST: tl.constexpr,
    BF16: tl.constexpr,
    TILES: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """``out[n_rows, n_cols]`` (contiguous) from ``x`` with unit stride along columns, one program per tile, of which
    ``col_tiles`` lie side by side. ``LARGEST`` is the largest finite output."""
    row_start, col_start = _tile_start(col_tiles, ROWS, COLS)
    rows = row_start + tl.arange(0, ROWS)[:, None, None, None]
    offsets = _offsets(COLS, MACRO, 32, 32)
    x = _load(x_ptr, rows, col_start, offsets, n_rows, n_cols, x_row_stride, BF16)
    z, amax_bits, factor, _ = apply_macro(x, SEARCH, CARRY, CLIPS, LEAST_SQUARES, LIMITED, TILES, INTERPRETED)

    q, byte = quantize_pass(z, amax_bits, CARRY, CLIPS, LEAST_SQUARES, LIMITED, TILES)
    value = q * scale_value(byte)
    if HAS_FALLBACK:
        residual = z - value
        residual_bits = max_bits(residual, TILES)
        q, byte = quantize_pass(residual, residual_bits, CARRY, CLIPS, LEAST_SQUARES, LIMITED, TILES)
        value = value + q * scale_value(byte) * alpha
        if SEARCH == STATIC and LARGEST > 65504.0:
            # Only values from a maximum of 2**127 on are cut, and its factor is 1 (a smaller maximum times its static
            # factor stays below 3.01 * 2**126): the same as clamping after the division.
            value = clamp(value, LARGEST)
    if SEARCH == BLOCKWISE:
        value = value * factor
    elif SEARCH != NO_MACRO:
        # A nonzero value is then at least 2**-64, or a sum that is a multiple of alpha * 2**-88: no less than 2**-108.
        fast = all_at_least(amax_bits, FAST_DIVISION_BITS)
        if HAS_FALLBACK:
            fast = fast & all_at_least(residual_bits, FAST_DIVISION_BITS) & (alpha >= _FAST_DIVISION_ALPHA)
        if SEARCH == DYNAMIC:
            fast = fast & all_below(amax_bits, TOO_LARGE_TO_SCALE_BITS)
        value = divide_by_factor(value, factor, fast, INTERPRETED)
    if LARGEST <= 65504.0 or SEARCH == BLOCKWISE or (HAS_FALLBACK and SEARCH != STATIC):
        value = clamp(value, LARGEST)
    _store_values(out_ptr, rows, col_start, offsets, n_rows, n_cols, value, BF16, INTERPRETED)


@triton.jit
def _codes(q, byte):
    """Packed E2M1 codes ``[..., 16]`` (int32) of grid values ``[..., 32]``, two in each, the even element's in the low
    half; zero in blocks with NaN."""
    bits = q.to(tl.int32, bitcast=True)
    # Exponent and first mantissa bit; 0.5 is 252, 1 is 254, 6 is 259.
    top = (bits >> 22) & 0x1FF
    code = tl.maximum(top - 252, 0) + (top == 252).to(tl.int32) + ((bits >> 28) & 8)
    code = tl.where(byte == NAN_BYTE, 0, code)
    even, odd = tl.split(tl.reshape(code, [q.shape[0], q.shape[1], q.shape[2], 16, 2]))
    return even | (odd << 4)


@triton.jit(do_not_specialize=["n_rows", "col_tiles"])
def quantize_kernel(
    x_ptr,
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
    x_row_stride,
    col_tiles,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    MACRO: tl.constexpr,
    SEARCH: tl.constexpr,
    HAS_FALLBACK: tl.constexpr,
    CARRY: tl.constexpr,
    CLIPS: tl.constexpr,
    LEAST_SQUARES: tl.constexpr,
    LIMITED: tl.constexpr,
    BF16: tl.constexpr,
    TILES: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Codes ``[n_rows, n_codes]``, scale bytes ``[n_rows, n_blocks]`` and macro bytes ``[n_rows, n_macros]``, all
    contiguous, from ``x`` with unit stride along columns. Tiles as in [`fake_quantize_kernel`]. Where rows share
    blocks, the bytes are written for each of them."""
    row_start, col_start = _tile_start(col_tiles, ROWS, COLS)
    rows = row_start + tl.arange(0, ROWS)[:, None, None, None]
    x = _load(x_ptr, rows, col_start, _offsets(COLS, MACRO, 32, 32), n_rows, n_cols, x_row_stride, BF16)
    z, amax_bits, _, m8 = apply_macro(x, SEARCH, CARRY, CLIPS, LEAST_SQUARES, LIMITED, TILES, INTERPRETED)

    at_codes = _offsets(COLS, MACRO, 32, 16)
    at_blocks = _offsets(COLS, MACRO, 32, 1)
    q, byte = quantize_pass(z, amax_bits, CARRY, CLIPS, LEAST_SQUARES, LIMITED, TILES)
    _store(codes_ptr, rows, col_start // 2, at_codes, n_rows, n_codes, _codes(q, byte))
    _store(scale_ptr, rows, col_start // 32, at_blocks, n_rows, n_blocks, byte)
    if SEARCH != NO_MACRO:
        at_macros = _offsets(COLS, MACRO, MACRO, 1)
        _store(macro_ptr, rows, col_start // MACRO, at_macros, n_rows, n_macros, m8)
    if HAS_FALLBACK:
        residual = tl.where(byte == NAN_BYTE, 0.0, z - q * scale_value(byte))
        q, byte = quantize_pass(residual, max_bits(residual, TILES), CARRY, CLIPS, LEAST_SQUARES, LIMITED, TILES)
        _store(residual_codes_ptr, rows, col_start // 2, at_codes, n_rows, n_codes, _codes(q, byte))
        _store(residual_scale_ptr, rows, col_start // 32, at_blocks, n_rows, n_blocks, byte)


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
    BF16: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """``out[n_rows, n_cols]`` (contiguous) from what [`quantize_kernel`] writes, or any other bytes in its place. Where
    ``SEARCH`` is neither `NO_MACRO` nor `BLOCKWISE` values are divided by macro factors."""
    row_start, col_start = _tile_start(col_tiles, ROWS, COLS)
    rows = row_start + tl.arange(0, ROWS)[:, None, None, None]
    at_codes = _offsets(COLS, MACRO, 32, 16)
    at_blocks = _offsets(COLS, MACRO, 32, 1)
    codes = _load_bytes(codes_ptr, rows, col_start // 2, at_codes, n_rows, n_codes)
    byte = _load_bytes(scale_ptr, rows, col_start // 32, at_blocks, n_rows, n_blocks)
    value = _decode(codes, byte)
    if HAS_FALLBACK:
        codes = _load_bytes(residual_codes_ptr, rows, col_start // 2, at_codes, n_rows, n_codes)
        byte = _load_bytes(residual_scale_ptr, rows, col_start // 32, at_blocks, n_rows, n_blocks)
        value = value + _decode(codes, byte) * alpha
    if SEARCH != NO_MACRO:
        at_macros = _offsets(COLS, MACRO, MACRO, 1)
        m8 = _load_bytes(macro_ptr, rows, col_start // MACRO, at_macros, n_rows, n_macros)
        m8 = m8.to(tl.int32)
        if SEARCH == BLOCKWISE:
            value = value * mantissa_factor((m8 >> (2 * tl.arange(0, 4)[None, None, :, None])) & 3)
        else:
            value = divide_by_factor(value, macro_factor(m8), can_divide_fast(value), INTERPRETED)
    value = clamp(value, LARGEST)
    _store_values(out_ptr, rows, col_start, _offsets(COLS, MACRO, 32, 32), n_rows, n_cols, value, BF16, INTERPRETED)
