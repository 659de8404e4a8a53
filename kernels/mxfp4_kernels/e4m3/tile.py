# SPDX-License-Identifier: Apache-2.0
"""MXFP4 blocks of a tile folded into E4M3 elements and float32 scales, for FP8 tensor cores; the definition of folding
is that of `hf_mxfp4.numerics.fold`.

Tiles and the arithmetic of blocks are as in `common/blocks.py`; here a macro block is always 128 elements, which is
also the group of a scale, so that a tile is ``[ROWS, COLS / 128, 4, 32]``. Elements are written as bytes, with rows
padded to a multiple of 128 by zeros: products of them need no mask along their contraction.
"""

import triton
import triton.language as tl

from ..common.blocks import (
    EXPONENT_FIELD,
    MAGNITUDE_FIELD,
    NAN_BYTE,
    NO_MACRO,
    max_bits,
    quantize_pass,
    round_to_grid,
    scale_bytes,
    scale_value,
)
from ..common.macro import apply_macro
from ..common.tile import offsets_in_tile, rotated, rounding_noise


NAN_BITS = tl.constexpr(0x7FC00000)
# The largest exponent of a block inside of E4M3, the least that holds 0.5 and 1.5, and the least scale byte.
HIGHEST = tl.constexpr(6)
LOWEST = tl.constexpr(-8)
_LEAST_SCALE_BYTE = tl.constexpr(2)
# 2**-6, the smallest normal E4M3 number, as float32 bits; and half of 1.5 * 2**23 over the 2**3 steps of a binade.
_SMALLEST_NORMAL = tl.constexpr(0x3C800000)
_ROUND_MAGIC = tl.constexpr(1.5 * 2.0**20)
# Stands for a block of byte 253 among the blocks of a tile that are counted, fewer than this.
_LIMIT_HERE = tl.constexpr(1 << 16)


@triton.jit
def e4m3_bits(value, NATIVE: tl.constexpr):
    """E4M3 (float8_e4m3fn) bytes of float32 values in [-448, 448] or NaN, to nearest, ties to even; with integers where
    the GPU has no such conversion."""
    if NATIVE:
        return value.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        bits = value.to(tl.int32, bitcast=True)
        binade = tl.maximum(bits & EXPONENT_FIELD, _SMALLEST_NORMAL).to(tl.float32, bitcast=True)
        # As in round_to_grid: the products are exact, so that it does not matter whether the sums are fused.
        rounded = tl.fma(binade, -_ROUND_MAGIC, tl.fma(binade, _ROUND_MAGIC, value))
        magnitude = rounded.to(tl.int32, bitcast=True) & MAGNITUDE_FIELD
        subnormal = (tl.abs(rounded) * 512.0).to(tl.int32)
        code = tl.where(magnitude >= _SMALLEST_NORMAL, (magnitude >> 20) - 960, subnormal)
        code = tl.where((bits & MAGNITUDE_FIELD) > EXPONENT_FIELD, 0x7F, code)
        return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def prepared(x, at, signs_ptr, random, SIDE: tl.constexpr):
    """A tile of rows (padding of the rotation included in their length), rotated, and the random numbers that it is
    rounded with."""
    x = rotated(x, at.col_start, at.n_cols, signs_ptr, SIDE)
    return x, rounding_noise(x, at, random, 0, SIDE)


@triton.jit
def blocks_of(x, noise, STOCHASTIC: tl.constexpr, SCHEME: tl.constexpr):
    """Values to be rounded (``STOCHASTIC``: E2M1 values), scale bytes, the bytes of those blocks that count (neither
    zero nor NaN; 0 of the others), and the macro factor."""
    z, amax_bits, factor, _ = apply_macro(x, SCHEME)
    if STOCHASTIC:
        z, byte = quantize_pass(z, amax_bits, noise, True, SCHEME)
        counts = tl.max(tl.abs(z), axis=3, keep_dims=True) > 0.0
    else:
        byte = scale_bytes(z, amax_bits, SCHEME)
        if SCHEME.TILES:
            # A row of a tile may be zero where the tile is not.
            amax_bits = max_bits(z, False, SCHEME.NATIVE)
        # Rounding is monotonic: a block is zero when its largest magnitude is, which goes there up to a quarter.
        counts = amax_bits.to(tl.float32, bitcast=True) * ((254 - byte) << 23).to(tl.float32, bitcast=True) > 0.25
    # Zero blocks of byte 0 would count for nothing.
    return z, byte, tl.where(counts & (byte != NAN_BYTE), byte, -1), factor


@triton.jit
def base_of(top):
    """Scale bytes of groups, from the largest byte that counts."""
    return tl.maximum(top - HIGHEST, _LEAST_SCALE_BYTE)


@triton.jit
def _limit(byte, one_bits, LIMITED: tl.constexpr):
    """Largest magnitude of elements, NaN in a NaN block."""
    one = tl.where(byte == NAN_BYTE, NAN_BITS, one_bits).to(tl.float32, bitcast=True)
    # At byte 253, 4 would not be finite.
    return (tl.where(byte == 253, 3.0, 6.0) if LIMITED else 6.0) * one


@triton.jit
def elements_of(z, byte, counted, base, STOCHASTIC: tl.constexpr, SCHEME: tl.constexpr):
    """E4M3 bytes of what [`blocks_of`] gives, in groups with scale bytes ``base``, and how many blocks were rounded.

    The multiplication by the scale of a block and that by its power of two inside of the group are one, and values are
    rounded to the grid times that power: all of it is exact.
    """
    shift = tl.minimum(tl.maximum(byte - base, -40), HIGHEST)
    found = ((counted >= 0) & (byte - base < LOWEST)).to(tl.int32)
    if SCHEME.LIMITED and not (SCHEME.CLIPS or STOCHASTIC):
        found = tl.where(byte == 253, _LIMIT_HERE, found)
    found = tl.sum(tl.reshape(tl.broadcast_to(found, counted.shape), [counted.numel], can_reorder=True), axis=0)
    one_bits = (127 + shift) << 23
    if STOCHASTIC:
        power = tl.where(byte == NAN_BYTE, NAN_BITS, one_bits).to(tl.float32, bitcast=True)
        return e4m3_bits(z * power, SCHEME.NATIVE), found
    power = tl.where(byte == NAN_BYTE, NAN_BITS, (254 - byte + shift) << 23).to(tl.float32, bitcast=True)
    y = z * power
    if SCHEME.CLIPS or SCHEME.LIMITED:
        limit = _limit(byte, one_bits, SCHEME.LIMITED)
    if SCHEME.CLIPS:
        y = tl.minimum(tl.maximum(y, -limit), limit)
    y = round_to_grid(y, one_bits)
    if SCHEME.LIMITED and not SCHEME.CLIPS:
        # No tensor but a diverged one has anything to limit.
        if found >= _LIMIT_HERE:
            y = tl.minimum(tl.maximum(y, -limit), limit)
    return e4m3_bits(y, SCHEME.NATIVE), found % _LIMIT_HERE


@triton.jit
def store_elements(elements_ptr, elements, at):
    """Store bytes of the shape ``[ROWS, groups, 4, 32]``."""
    cols = at.col_start + offsets_in_tile(elements.shape[1] * 128, 128, 32, 32)
    tl.store(elements_ptr + at.rows * at.n_cols + cols, elements, mask=(at.rows < at.n_rows) & (cols < at.n_cols))


@triton.jit
def fold_tile(x, noise, out, at, STOCHASTIC: tl.constexpr, SCHEME: tl.constexpr, macro_ptr=None):
    """Write elements ``[n_rows, n_cols]`` and scales ``[n_cols / 128, n_rows]``, each contiguous, of a tile (float32
    ``x``), and macro bytes ``[n_rows, n_cols / 128]`` to ``macro_ptr``, unless it is `None`. Returns the number of
    blocks that were rounded, and the bytes of those that count."""
    z, byte, counted, factor = blocks_of(x, noise, STOCHASTIC, SCHEME)
    base = base_of(tl.max(counted, axis=2, keep_dims=True))
    elements, n_inexact = elements_of(z, byte, counted, base, STOCHASTIC, SCHEME)
    store_elements(out.elements, elements, at)
    scale = scale_value(base)
    if SCHEME.SEARCH != NO_MACRO:
        scale = tl.div_rn(scale, tl.broadcast_to(factor, scale.shape))
    groups = at.col_start // 128 + tl.arange(0, x.shape[1])[None, :, None, None]
    mask = (at.rows < at.n_rows) & (groups < at.n_cols // 128)
    tl.store(out.scale + groups * at.n_rows + at.rows, tl.broadcast_to(scale, mask.shape), mask=mask)
    if macro_ptr is not None:
        m8 = ((factor.to(tl.int32, bitcast=True) >> 15) & 0xFF).to(tl.uint8)
        to = macro_ptr + at.rows * (at.n_cols // 128) + groups
        tl.store(to, tl.broadcast_to(m8, mask.shape), mask=mask)
    return n_inexact, counted


@triton.jit
def count_inexact(counter_ptr, n):
    """Add the number of blocks that were rounded to the counter."""
    if n > 0:
        tl.atomic_add(counter_ptr, n)
