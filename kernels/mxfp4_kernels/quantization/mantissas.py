# SPDX-License-Identifier: Apache-2.0
"""The kernels of two elements an instruction for block mantissas, of bfloat16 by the rule ``"even"`` on NVIDIA GPUs: of
codes, scale bytes and mantissas, and of values; with what belongs to the residual or without. The bits are those of
[`pack_tile`] and [`fake_tile`].

A thread has a block, four times four words of two elements, so that what is found for a block is found once. What
belongs to blocks, and each of their words, is ``[macro blocks, 4]``.
"""

import triton
import triton.language as tl

from ..common.blocks import NAN_BYTE
from ..common.pairs import multiply, multiply_add, smaller
from .mantissa_rounding import (
    INFINITE,
    SIGNS,
    codes_of_rounded,
    four_plus_products,
    grid_values,
    largest_of_blocks,
    load,
    magnitudes_of_blocks,
    numbers,
    over_power_of_two,
    residuals,
    rounded,
    scales,
    signs_of_blocks,
    steps,
)
from .mantissa_search import best_mantissas
from .pair_codes import signed


# 2**127: of blocks from here on half the values are computed, which is finite always.
_HALVED = tl.constexpr(0x7F00)
# Both halves of a word, of bfloat16: 1, 2, NaN, the largest number, and half of it.
_ONE = tl.constexpr(0x3F803F80)
_TWO = tl.constexpr(0x40004000)
_NAN = tl.constexpr(0x7FC07FC0)
_LARGEST = tl.constexpr(0x7F7F7F7F)
_HALF_OF_LARGEST = tl.constexpr(0x7EFF7EFF)


@triton.jit
def _word(t, signs, finite, INTERPRETED: tl.constexpr):
    """Words of eight codes of four words of [`rounded`] and their signs; zero where ``finite`` has no bits."""
    return signed(codes_of_rounded(t, INTERPRETED) & finite, signs[0], signs[1])


@triton.jit
def _joined(a, b, c, d):
    """Words side by side: ``[macro blocks, 4, 4]``."""
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [a.shape[0], 4, 4])


@triton.jit
def _store_codes(codes_ptr, scale_ptr, t, signs, finite, byte, n_blocks, INTERPRETED: tl.constexpr):
    """Store codes and scale bytes."""
    c0, c1 = _word(t[0], signs[0], finite, INTERPRETED), _word(t[1], signs[1], finite, INTERPRETED)
    c2, c3 = _word(t[2], signs[2], finite, INTERPRETED), _word(t[3], signs[3], finite, INTERPRETED)
    blocks = numbers(byte.shape[0])
    at = blocks[:, :, None] * 4 + tl.arange(0, 4)[None, None, :]
    tl.store(codes_ptr + at, _joined(c0, c1, c2, c3), mask=at < n_blocks * 4)
    tl.store(scale_ptr + blocks, byte.to(tl.uint8), mask=blocks < n_blocks)


@triton.jit
def _xor(a, b):
    return a[0] ^ b[0], a[1] ^ b[1]


@triton.jit
def _residual_pass(r, mantissa, INTERPRETED: tl.constexpr):
    """What [`rounded`] makes of residuals, and their scale bytes. None reaches the scale that has a limit."""
    m = magnitudes_of_blocks(r, INTERPRETED)
    bits = largest_of_blocks(m, INTERPRETED)
    byte, inverse = scales(bits, mantissa)
    return rounded(over_power_of_two(m, bits, INTERPRETED), inverse, None, INTERPRETED), byte


@triton.jit
def _searched(x_ptr, n_blocks, MACROS: tl.constexpr, INTERPRETED: tl.constexpr):
    """Words of blocks, their magnitudes, the bits of the largest of these, all over its power of two, and mantissas."""
    w = load(x_ptr, n_blocks, MACROS)
    m = magnitudes_of_blocks(w, INTERPRETED)
    bits = largest_of_blocks(m, INTERPRETED)
    y = over_power_of_two(m, bits, INTERPRETED)
    return w, m, bits, y, best_mantissas(y, bits, INTERPRETED)


@triton.jit(do_not_specialize=["n_blocks"])
def quantize_mantissas_kernel(x_ptr, out, n_blocks, MACROS: tl.constexpr, SCHEME: tl.constexpr):
    """Codes (as int32 words of eight), scale bytes and bytes of mantissas of ``n_blocks`` adjacent blocks, whole macro
    blocks, read as int32 words of two elements; codes and scale bytes of the residual too. One program for every
    ``MACROS`` macro blocks."""
    INTERPRETED: tl.constexpr = SCHEME.INTERPRETED
    first = tl.program_id(0).to(tl.int64) * (4 * MACROS)
    left = tl.minimum(n_blocks - first, 4 * MACROS).to(tl.int32)
    w, m, bits, y, mantissa = _searched(x_ptr + first * 16, left, MACROS, INTERPRETED)
    byte, inverse = scales(bits, mantissa)
    t = rounded(y, inverse, byte, INTERPRETED)
    finite = tl.where(bits < INFINITE, -1, 0)
    signs = signs_of_blocks(w, INTERPRETED)
    stored = tl.where(bits < INFINITE, byte, NAN_BYTE)
    _store_codes(out.codes + first * 4, out.scale + first, t, signs, finite, stored, left, INTERPRETED)
    packed = tl.sum(mantissa << (2 * tl.arange(0, 4)[None, :]), axis=1, keep_dims=True)
    blocks = numbers(MACROS)
    # By one of the four threads of a macro block.
    mask = (blocks < left) & (blocks % 4 == 0)
    tl.store(out.macro + first // 4 + (blocks >> 2), tl.broadcast_to(packed.to(tl.uint8), mask.shape), mask=mask)
    if SCHEME.HAS_FALLBACK:
        r = residuals(m, grid_values(t, INTERPRETED), steps(byte, mantissa), INTERPRETED)
        t, byte = _residual_pass(r, mantissa, INTERPRETED)
        others = signs_of_blocks(r, INTERPRETED)
        signs = (
            _xor(signs[0], others[0]),
            _xor(signs[1], others[1]),
            _xor(signs[2], others[2]),
            _xor(signs[3], others[3]),
        )
        to_codes, to_scale = out.residual_codes + first * 4, out.residual_scale + first
        _store_codes(to_codes, to_scale, t, signs, finite, byte & finite, left, INTERPRETED)


@triton.jit
def _products(v, step, INTERPRETED: tl.constexpr):
    v0, v1 = multiply(v[0], step, INTERPRETED), multiply(v[1], step, INTERPRETED)
    v2, v3 = multiply(v[2], step, INTERPRETED), multiply(v[3], step, INTERPRETED)
    return v0, v1, v2, v3


@triton.jit
def _with_sign_of(w, value, limit, multiplier, INTERPRETED: tl.constexpr):
    """Magnitudes cut to ``limit``, times ``multiplier`` and a sign that zero does not have."""
    value = smaller(value, limit, INTERPRETED)
    return multiply_add(value, (w & SIGNS) | multiplier, tl.zeros_like(w), INTERPRETED)


@triton.jit
def _store_values(out_ptr, w, values, limit, multiplier, n_words, FIRST: tl.constexpr, INTERPRETED: tl.constexpr):
    """Store words ``FIRST`` to ``FIRST + 3`` of every sixteen."""
    v0 = _with_sign_of(w[0], values[0], limit, multiplier, INTERPRETED)
    v1 = _with_sign_of(w[1], values[1], limit, multiplier, INTERPRETED)
    v2 = _with_sign_of(w[2], values[2], limit, multiplier, INTERPRETED)
    v3 = _with_sign_of(w[3], values[3], limit, multiplier, INTERPRETED)
    at = numbers(v0.shape[0])[:, :, None] * 16 + FIRST + tl.arange(0, 4)[None, None, :]
    tl.store(out_ptr + at, _joined(v0, v1, v2, v3), mask=at < n_words)


@triton.jit(do_not_specialize=["n_blocks"])
def fake_mantissas_kernel(x_ptr, out_ptr, n_blocks, MACROS: tl.constexpr, SCHEME: tl.constexpr):
    """Values, words of two bfloat16, of ``n_blocks`` adjacent blocks, whole macro blocks, read as such words; those of
    the residual, whole, added to them. One program for every ``MACROS`` macro blocks.

    A product of factor, scale and a value on the grid has 5 digits. Two, of which one is that of the residual of the
    other, are added up by one instruction, which rounds as the definition does: its sum in float32 is exact."""
    INTERPRETED: tl.constexpr = SCHEME.INTERPRETED
    first = tl.program_id(0).to(tl.int64) * (4 * MACROS)
    left = tl.minimum(n_blocks - first, 4 * MACROS).to(tl.int32)
    w, m, bits, y, mantissa = _searched(x_ptr + first * 16, left, MACROS, INTERPRETED)
    byte, inverse = scales(bits, mantissa)
    grid = grid_values(rounded(y, inverse, byte, INTERPRETED), INTERPRETED)
    halved = (bits >= _HALVED).to(tl.int32)
    step = steps(byte - halved, mantissa)
    v0, v1 = _products(grid[0], step, INTERPRETED), _products(grid[1], step, INTERPRETED)
    v2, v3 = _products(grid[2], step, INTERPRETED), _products(grid[3], step, INTERPRETED)
    if SCHEME.HAS_FALLBACK:
        r = residuals(m, grid, steps(byte, mantissa), INTERPRETED)
        t, byte = _residual_pass(r, mantissa, INTERPRETED)
        grid = grid_values(t, INTERPRETED)
        step = steps(byte - halved, mantissa)
        v0 = _with_residual(v0, grid[0], r[0], step, INTERPRETED)
        v1 = _with_residual(v1, grid[1], r[1], step, INTERPRETED)
        v2 = _with_residual(v2, grid[2], r[2], step, INTERPRETED)
        v3 = _with_residual(v3, grid[3], r[3], step, INTERPRETED)
    limit = tl.where(halved == 0, _LARGEST, _HALF_OF_LARGEST)
    multiplier = tl.where(bits < INFINITE, tl.where(halved == 0, _ONE, _TWO), _NAN)
    out_ptr += first * 16
    _store_values(out_ptr, w[0], v0, limit, multiplier, left * 16, 0, INTERPRETED)
    _store_values(out_ptr, w[1], v1, limit, multiplier, left * 16, 4, INTERPRETED)
    _store_values(out_ptr, w[2], v2, limit, multiplier, left * 16, 8, INTERPRETED)
    _store_values(out_ptr, w[3], v3, limit, multiplier, left * 16, 12, INTERPRETED)


@triton.jit
def _with_residual(values, grid, r, step, INTERPRETED: tl.constexpr):
    """Four words of values and ``step`` times those of residuals, which have the signs of these."""
    g0, g1 = grid[0] | (r[0] & SIGNS), grid[1] | (r[1] & SIGNS)
    g2, g3 = grid[2] | (r[2] & SIGNS), grid[3] | (r[3] & SIGNS)
    return four_plus_products(values, (g0, g1, g2, g3), step, INTERPRETED)
