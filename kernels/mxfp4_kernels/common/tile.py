# SPDX-License-Identifier: Apache-2.0
"""Tiles in memory and in registers: where they start, how they are read and written, and what becomes of one.

A program holds its tile as ``[ROWS, macro blocks, blocks, 32]``: the maxima of blocks and macro blocks are plain
reductions, and the innermost axis is contiguous in memory. The arithmetic, and what it asks of the compiler, is in
`common/blocks.py` and `common/macro.py`.
"""

import triton
import triton.language as tl

from .blocks import (
    BLOCKWISE,
    DYNAMIC,
    FAST_DIVISION_BITS,
    GIVEN,
    NAN_BYTE,
    NO_MACRO,
    STATIC,
    TOO_LARGE_TO_SCALE_BITS,
    all_below,
    clamp,
    divide_by_factor,
    lowered,
    max_bits,
    none_below,
    quantize_pass,
    scale_value,
)
from .elements import as_stored, to_float
from .hadamard import rotate_tile
from .macro import apply_macro
from .rng import uniform


#: Longer tiles of one row are rows of macro blocks as long as they.
LONGEST_FLAT_TILE = tl.constexpr(2048)
# The fallback weight from which on [`divide_by_factor`] can take its fast way.
_FAST_DIVISION_ALPHA = tl.constexpr(2.0**-20)


@triton.jit
def tile_start(col_tiles, ROWS: tl.constexpr, COLS: tl.constexpr):
    """First row and first column (int64) of this program's tile; ``ROWS == 1`` with a tile
    of no more than `LONGEST_FLAT_TILE` means that the matrix is one row."""
    pid = tl.program_id(0)
    if ROWS == 1 and COLS <= LONGEST_FLAT_TILE:
        row_start = pid.to(tl.int64) * 0
        col_start = pid.to(tl.int64) * COLS
    else:
        row_start = (pid // col_tiles).to(tl.int64) * ROWS
        col_start = (pid % col_tiles).to(tl.int64) * COLS
    return row_start, col_start


@triton.jit
def offsets_in_tile(COLS: tl.constexpr, MACRO: tl.constexpr, SIZE: tl.constexpr, EACH: tl.constexpr):
    """Offsets inside a tile row (int32), ``[1, COLS / MACRO, MACRO / SIZE, EACH]``, of what there are ``EACH`` of for
    ``SIZE`` elements."""
    macros = tl.arange(0, COLS // MACRO)[None, :, None, None]
    parts = tl.arange(0, MACRO // SIZE)[None, None, :, None]
    return (macros * (MACRO // SIZE) + parts) * EACH + tl.arange(0, EACH)[None, None, None, :]


@triton.jit
def load(x_ptr, at, offsets, n_read, x_row_stride, BF16: tl.constexpr):
    """Elements as float32, zero outside of the matrix and from column ``n_read`` on."""
    mask = (at.rows < at.n_rows) & (offsets < n_read - at.col_start)
    return to_float(tl.load(x_ptr + at.col_start + at.rows * x_row_stride + offsets, mask=mask, other=0), BF16)


@triton.jit
def store(out_ptr, rows, start, offsets, n_rows, n_cols, values, INTERPRETED: tl.constexpr):
    """Store what lies inside of the matrix ``out[n_rows, n_cols]`` (contiguous), from column ``start`` on."""
    mask = (rows < n_rows) & (offsets < n_cols - start)
    pointers = out_ptr + start + rows * n_cols + offsets
    tl.store(pointers, as_stored(tl.broadcast_to(values, mask.shape), out_ptr, INTERPRETED), mask=mask)


@triton.jit
def offsets_of(x, SIZE: tl.constexpr, EACH: tl.constexpr):
    """[`offsets_in_tile`] of a tile ``x``."""
    return offsets_in_tile(x.shape[1] * x.shape[2] * 32, x.shape[2] * 32, SIZE, EACH)


@triton.jit
def rotated(x, col_start, n_cols, signs_ptr, SIDE: tl.constexpr):
    """A tile times the signs ``[n_cols]`` (float32) of its columns, then rotated."""
    if SIDE.HAS_SIGNS:
        offsets = offsets_of(x, 32, 32)
        x = x * tl.load(signs_ptr + col_start + offsets, mask=offsets < n_cols - col_start, other=1.0)
    if SIDE.ROTATION > 0:
        x = rotate_tile(x, SIDE.ROTATION, SIDE.ROTATION_SCALE)
    return x


@triton.jit
def rounding_noise(x, at, random, DRAW: tl.constexpr, SIDE: tl.constexpr):
    """What [`quantize_pass`] rounds a tile ``x`` stochastically with, a scalar where it does not."""
    if SIDE.STOCHASTIC:
        return uniform(x, at, random, DRAW)
    else:
        return 0.0


@triton.jit
def _codes(q, byte):
    """Packed E2M1 codes ``[..., 16]`` of grid values ``[..., 32]``, two in each, the even element's in the low half;
    zero in blocks with NaN."""
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
    at_codes, at_blocks = offsets_of(q, 32, 16), offsets_of(q, 32, 1)
    store(scale_ptr, at.rows, at.col_start // 32, at_blocks, at.n_rows, row_bytes.n_blocks, byte, False)
    store(codes_ptr, at.rows, at.col_start // 2, at_codes, at.n_rows, row_bytes.n_codes, _codes(q, byte), False)


@triton.jit
def fake_tile(
    x, out_ptr, at, alpha, random, macro, SCHEME: tl.constexpr, SIDE: tl.constexpr, packed=None, row_bytes=None
):
    """Write the MXFP4 values of a tile (float32 ``x``) to its place in a contiguous matrix. ``macro`` are the macro
    bytes that are read, or else written; `None` for neither. Codes and scale bytes go to ``packed`` as [`pack_tile`]
    has them, if ``row_bytes`` are given: without macro bytes, and without a residual."""
    # Without a residual bfloat16 needs no exact quotient by a macro factor, (256 + m8) / 256. Values are 1 or 3 times a
    # power of two. The middle of two bfloat16 is an odd number from 33 to 511 times one, as no quotient is less than
    # 2**-129; times the factor it is never a value, hence off by 2**-18 of that at least. A reciprocal that errs by
    # 2**-22 and two roundings are off by less than 2**-21.
    stored: tl.constexpr = out_ptr.dtype.element_ty
    to_bf16: tl.constexpr = stored == tl.bfloat16 or (SCHEME.INTERPRETED and stored == tl.int16)
    divides: tl.constexpr = SCHEME.SEARCH == STATIC or SCHEME.SEARCH == DYNAMIC or SCHEME.SEARCH == GIVEN
    short: tl.constexpr = to_bf16 and divides and not SCHEME.HAS_FALLBACK
    given = tl.zeros([1, 1, 1, 1], tl.int32)
    if SCHEME.SEARCH == GIVEN:
        offsets = offsets_of(x, SCHEME.MACRO, 1)
        start = at.col_start // SCHEME.MACRO
        mask = (at.rows < at.n_rows) & (offsets < macro.n_macros - start)
        given = tl.load(macro.pointer + start + at.rows * macro.n_macros + offsets, mask=mask, other=0).to(tl.int32)
    z, amax_bits, factor, m8 = apply_macro(x, SCHEME, SCHEME.BF16 and SIDE.ROTATION == 0, given)
    if macro is not None and SCHEME.SEARCH != GIVEN:
        start = at.col_start // SCHEME.MACRO
        offsets = offsets_of(x, SCHEME.MACRO, 1)
        store(macro.pointer, at.rows, start, offsets, at.n_rows, macro.n_macros, m8, False)
    noise = rounding_noise(x, at, random, 0, SIDE)
    q, byte = quantize_pass(z, amax_bits, noise, SIDE.STOCHASTIC, SCHEME)
    if row_bytes is not None:
        _store_codes(q, byte, packed.codes, packed.scale, at, row_bytes)
    scale = scale_value(byte)
    if short:
        scale = scale * (1.0 / factor)
    value = q * scale
    if SCHEME.HAS_FALLBACK:
        residual = z - value
        residual_bits = max_bits(residual, SCHEME.TILES)
        noise = rounding_noise(x, at, random, 1, SIDE)
        q, byte = quantize_pass(residual, residual_bits, noise, SIDE.STOCHASTIC, SCHEME)
        value = value + q * scale_value(byte) * alpha
        if SCHEME.SEARCH == STATIC and SCHEME.LARGEST > 65504.0:
            # Only values from a maximum of 2**127 on are cut, and its factor is 1 (a smaller maximum times its static
            # factor stays below 3.01 * 2**126): the same as clamping after the division.
            value = clamp(value, SCHEME.LARGEST)
    if SCHEME.SEARCH == BLOCKWISE:
        value = value * factor
    elif SCHEME.SEARCH != NO_MACRO and not short:
        # A nonzero value is then at least 2**-64, or a sum that is a multiple of alpha * 2**-88: no less than 2**-108.
        least = lowered(amax_bits)
        if SCHEME.HAS_FALLBACK:
            least = tl.minimum(least, lowered(residual_bits))
        fast = none_below(least, FAST_DIVISION_BITS)
        if SCHEME.HAS_FALLBACK:
            fast = fast & (alpha >= _FAST_DIVISION_ALPHA)
        if SCHEME.SEARCH != STATIC:
            fast = fast & all_below(amax_bits, TOO_LARGE_TO_SCALE_BITS)
        value = divide_by_factor(value, factor, fast, SCHEME.INTERPRETED)
    if SCHEME.LARGEST <= 65504.0 or SCHEME.SEARCH == BLOCKWISE or (SCHEME.HAS_FALLBACK and SCHEME.SEARCH != STATIC):
        value = clamp(value, SCHEME.LARGEST)
    offsets = offsets_of(x, 32, 32)
    store(out_ptr, at.rows, at.col_start, offsets, at.n_rows, at.n_cols, value, SCHEME.INTERPRETED)


@triton.jit
def pack_tile(x, out, at, row_bytes, random, SCHEME: tl.constexpr, SIDE: tl.constexpr):
    """Write codes ``[n_rows, n_codes]``, scale bytes ``[n_rows, n_blocks]`` and macro bytes ``[n_rows, n_macros]``, all
    contiguous, of a tile (float32 ``x``). Where rows share blocks, the bytes are written for each of them."""
    z, amax_bits, _, m8 = apply_macro(x, SCHEME, SCHEME.BF16 and SIDE.ROTATION == 0)
    if SCHEME.SEARCH != NO_MACRO:
        start = at.col_start // SCHEME.MACRO
        at_macros = offsets_of(x, SCHEME.MACRO, 1)
        store(out.macro, at.rows, start, at_macros, at.n_rows, row_bytes.n_macros, m8, False)
    noise = rounding_noise(x, at, random, 0, SIDE)
    q, byte = quantize_pass(z, amax_bits, noise, SIDE.STOCHASTIC, SCHEME)
    _store_codes(q, byte, out.codes, out.scale, at, row_bytes)
    if SCHEME.HAS_FALLBACK:
        residual = tl.where(byte == NAN_BYTE, 0.0, z - q * scale_value(byte))
        noise = rounding_noise(x, at, random, 1, SIDE)
        residual_bits = max_bits(residual, SCHEME.TILES)
        q, byte = quantize_pass(residual, residual_bits, noise, SIDE.STOCHASTIC, SCHEME)
        _store_codes(q, byte, out.residual_codes, out.residual_scale, at, row_bytes)
