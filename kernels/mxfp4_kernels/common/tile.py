# SPDX-License-Identifier: Apache-2.0
"""Tiles ``[ROWS, macro blocks, blocks, 32]`` in memory, and what is done to one before and after it is quantized."""

import triton
import triton.language as tl

from .bf16x2_blocks import codes_of_words, values_of_words
from .blocks import (
    NAN_BYTE,
    NO_MACRO,
    apply_macro,
    as_stored,
    max_bits,
    quantize_pass,
    scale_value,
    without_factor,
)
from .rng import uniform


@triton.jit
def offsets_in_tile(COLS: tl.constexpr, MACRO: tl.constexpr, SIZE: tl.constexpr, EACH: tl.constexpr):
    """Offsets inside a tile row (int32), ``[1, COLS / MACRO, MACRO / SIZE, EACH]``, of what there are ``EACH`` of for
    ``SIZE`` elements."""
    macros = tl.arange(0, COLS // MACRO)[None, :, None, None]
    parts = tl.arange(0, MACRO // SIZE)[None, None, :, None]
    return (macros * (MACRO // SIZE) + parts) * EACH + tl.arange(0, EACH)[None, None, None, :]


@triton.jit
def store(out_ptr, rows, start, offsets, n_rows, n_cols, values, INTERPRETED: tl.constexpr):
    """Store what lies inside of the matrix ``out[n_rows, n_cols]`` (contiguous), from column ``start`` on."""
    mask = (rows < n_rows) & (offsets < n_cols - start)
    pointers = out_ptr + start + rows * n_cols + offsets
    tl.store(pointers, as_stored(tl.broadcast_to(values, mask.shape), out_ptr, INTERPRETED), mask=mask)


@triton.jit
def _offsets_of(x, SIZE: tl.constexpr, EACH: tl.constexpr):
    """[`offsets_in_tile`] of a tile ``x``."""
    return offsets_in_tile(x.shape[1] * x.shape[2] * 32, x.shape[2] * 32, SIZE, EACH)


@triton.jit
def rotated(x, col_start, n_cols, signs_ptr, SIDE: tl.constexpr):
    """Return a float32 tile times the signs ``[n_cols]`` (float32) of its columns, with every ``SIDE.ROTATION``
    consecutive elements of a row multiplied by Sylvester's matrix: sums and differences first, the scale last."""
    if SIDE.HAS_SIGNS:
        offsets = _offsets_of(x, 32, 32)
        x = x * tl.load(signs_ptr + col_start + offsets, mask=offsets < n_cols - col_start, other=1.0)
    if SIDE.ROTATION > 0:
        shape: tl.constexpr = x.shape
        for stage in tl.static_range(7):
            if (1 << stage) < SIDE.ROTATION:
                halves = tl.permute(tl.reshape(x, [x.numel // (2 << stage), 2, 1 << stage]), (0, 2, 1))
                first, second = tl.split(halves)
                x = tl.permute(tl.join(first + second, first - second), (0, 2, 1))
        x = tl.reshape(x, shape) * SIDE.ROTATION_SCALE
    return x


@triton.jit
def _noise(x, at, random, DRAW: tl.constexpr, SIDE: tl.constexpr):
    """Random numbers for a tile ``x`` that is rounded stochastically, a scalar otherwise."""
    if SIDE.STOCHASTIC:
        return uniform(x, at, random, DRAW)
    else:
        return 0.0


@triton.jit
def _codes(q, byte):
    """Packed E2M1 codes ``[..., 16]`` of grid values ``[..., 32]``, two in each byte, the even element's in the low
    half; zero in blocks with NaN."""
    bits = q.to(tl.int32, bitcast=True)
    # Exponent and first mantissa bit; 0.5 is 252, 1 is 254, 6 is 259.
    top = (bits >> 22) & 0x1FF
    code = tl.maximum(top - 252, 0) + (top == 252).to(tl.int32) + ((bits >> 28) & 8)
    code = tl.where(byte == NAN_BYTE, 0, code)
    even, odd = tl.split(tl.reshape(code, [q.shape[0], q.shape[1], q.shape[2], 16, 2]))
    return even | (odd << 4)


@triton.jit
def _store_codes(q, byte, codes_ptr, scale_ptr, at, row_bytes):
    """Write codes and scale bytes of grid values."""
    at_codes, at_blocks = _offsets_of(q, 32, 16), _offsets_of(q, 32, 1)
    store(scale_ptr, at.rows, at.col_start // 32, at_blocks, at.n_rows, row_bytes.n_blocks, byte, False)
    store(codes_ptr, at.rows, at.col_start // 2, at_codes, at.n_rows, row_bytes.n_codes, _codes(q, byte), False)


@triton.jit
def _as_words(pointer):
    """Return a pointer to words of four bytes."""
    return pointer.to(tl.pointer_type(tl.int32), bitcast=True)


@triton.jit
def store_pair_values(w, out_ptr, at, SCHEME: tl.constexpr):
    """[`store_values`] of a tile given as [`words_of`] bfloat16, whose rows are whole blocks."""
    values = values_of_words(w, SCHEME)
    store(
        _as_words(out_ptr),
        at.rows,
        at.col_start // 2,
        _offsets_of(values, 32, 16),
        at.n_rows,
        at.n_cols // 2,
        values,
        False,
    )


@triton.jit
def _store_code_words(codes, byte, codes_ptr, scale_ptr, at, row_bytes):
    """Write words of eight codes, and scale bytes."""
    at_codes, at_blocks = _offsets_of(codes, 32, 4), _offsets_of(codes, 32, 1)
    store(_as_words(codes_ptr), at.rows, at.col_start // 8, at_codes, at.n_rows, row_bytes.n_codes // 4, codes, False)
    store(scale_ptr, at.rows, at.col_start // 32, at_blocks, at.n_rows, row_bytes.n_blocks, byte, False)


@triton.jit
def store_pair_codes(w, out, at, row_bytes, SCHEME: tl.constexpr):
    """[`store_packed`] of a tile given as [`words_of`] bfloat16, whose rows are whole blocks."""
    codes, byte, m8, residual_codes, residual_byte = codes_of_words(w, SCHEME)
    _store_code_words(codes, byte, out.codes, out.scale, at, row_bytes)
    if SCHEME.SEARCH != NO_MACRO:
        start, at_macros = at.col_start // SCHEME.MACRO, _offsets_of(codes, SCHEME.MACRO, 1)
        store(out.macro, at.rows, start, at_macros, at.n_rows, row_bytes.n_macros, m8, False)
    if SCHEME.HAS_FALLBACK:
        _store_code_words(residual_codes, residual_byte, out.residual_codes, out.residual_scale, at, row_bytes)


@triton.jit
def store_values(x, out_ptr, at, alpha, random, SCHEME: tl.constexpr, SIDE: tl.constexpr):
    """Write the MXFP4 values of a tile (float32 ``x``) to its place in a contiguous matrix."""
    z, amax_bits, factor, _ = apply_macro(x, SCHEME)
    q, byte = quantize_pass(z, amax_bits, _noise(x, at, random, 0, SIDE), SIDE.STOCHASTIC, SCHEME)
    value = q * scale_value(byte)
    if SCHEME.HAS_FALLBACK:
        residual = z - value
        noise = _noise(x, at, random, 1, SIDE)
        q, byte = quantize_pass(residual, max_bits(residual, SCHEME.TILES), noise, SIDE.STOCHASTIC, SCHEME)
        value = value + q * scale_value(byte) * alpha
    value = without_factor(value, factor, SCHEME)
    store(out_ptr, at.rows, at.col_start, _offsets_of(x, 32, 32), at.n_rows, at.n_cols, value, SCHEME.INTERPRETED)


@triton.jit
def store_packed(x, out, at, row_bytes, random, SCHEME: tl.constexpr, SIDE: tl.constexpr):
    """Write codes ``[n_rows, n_codes]``, scale bytes ``[n_rows, n_blocks]`` and macro bytes ``[n_rows, n_macros]``, all
    contiguous, of a tile (float32 ``x``). Where rows share blocks, the bytes are written for each of them."""
    z, amax_bits, _, m8 = apply_macro(x, SCHEME)
    if SCHEME.SEARCH != NO_MACRO:
        start, at_macros = at.col_start // SCHEME.MACRO, _offsets_of(x, SCHEME.MACRO, 1)
        store(out.macro, at.rows, start, at_macros, at.n_rows, row_bytes.n_macros, m8, False)
    q, byte = quantize_pass(z, amax_bits, _noise(x, at, random, 0, SIDE), SIDE.STOCHASTIC, SCHEME)
    _store_codes(q, byte, out.codes, out.scale, at, row_bytes)
    if SCHEME.HAS_FALLBACK:
        residual = tl.where(byte == NAN_BYTE, 0.0, z - q * scale_value(byte))
        noise = _noise(x, at, random, 1, SIDE)
        q, byte = quantize_pass(residual, max_bits(residual, SCHEME.TILES), noise, SIDE.STOCHASTIC, SCHEME)
        _store_codes(q, byte, out.residual_codes, out.residual_scale, at, row_bytes)
