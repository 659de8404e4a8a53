# SPDX-License-Identifier: Apache-2.0
"""The kernel of two elements an instruction for block mantissas: codes, scale bytes and mantissas of bfloat16 by the
rule ``"even"`` on NVIDIA GPUs, and codes and scale bytes of the residual. The bits are those of [`pack_tile`].

A thread has half of a block, eight words of two elements. A tile is these words, each ``[macro blocks, 4, 2]``; what
belongs to blocks is ``[macro blocks, 4, 1]``.
"""

import triton
import triton.language as tl

from ..common.blocks import NAN_BYTE
from ..common.pairs import LOW, eight_magnitudes, larger, largest, multiply, multiply_add, permute
from .mantissa_search import (
    INFINITE,
    best_mantissas,
    codes_of_rounded,
    limits,
    over_power_of_two,
    rounded,
    scales,
)
from .pair_codes import sign_bytes, signed


_SIGNS = tl.constexpr(-0x7FFF8000)
# Both halves of a word, of bfloat16: the digits that a code has as a subnormal number and above, and 2**126.
_CODES = tl.constexpr(0x01C001C0)
_TO_VALUES = tl.constexpr(0x7E807E80)


@triton.jit
def _offsets(MACROS: tl.constexpr):
    """Of the halves of blocks: ``[MACROS, 4, 2]``."""
    macros, blocks = tl.arange(0, MACROS)[:, None, None], tl.arange(0, 4)[None, :, None]
    return (macros * 4 + blocks) * 2 + tl.arange(0, 2)[None, None, :]


@triton.jit
def _load(x_ptr, n_words, MACROS: tl.constexpr, FIRST: tl.constexpr):
    """Words ``FIRST`` to ``FIRST + 3`` of every eight; zero from ``n_words`` on."""
    offsets = _offsets(MACROS)[:, :, :, None] * 8 + FIRST + tl.arange(0, 4)[None, None, None, :]
    x = tl.load(x_ptr + offsets, mask=offsets < n_words, other=0)
    even, odd = tl.split(tl.reshape(x, [MACROS, 4, 2, 2, 2]))
    w0, w2 = tl.split(even)
    w1, w3 = tl.split(odd)
    return w0, w1, w2, w3


@triton.jit
def _maxima(m, INTERPRETED: tl.constexpr):
    """The bits of the largest of eight words of magnitudes in each block."""
    m0, m1, m2, m3, m4, m5, m6, m7 = m
    low = larger(larger(m0, m1, INTERPRETED), larger(m2, m3, INTERPRETED), INTERPRETED)
    high = larger(larger(m4, m5, INTERPRETED), larger(m6, m7, INTERPRETED), INTERPRETED)
    maxima = larger(low, high, INTERPRETED)
    maxima = larger(maxima, permute(maxima, maxima, 0x1032, INTERPRETED), INTERPRETED)
    return largest(maxima, 2, INTERPRETED) & LOW


@triton.jit
def _signs(w, INTERPRETED: tl.constexpr):
    """Of eight words, [`sign_bytes`] of the first four and of the others."""
    w0, w1, w2, w3, w4, w5, w6, w7 = w
    even0, odd0 = sign_bytes(w0, w1, w2, w3, INTERPRETED)
    even1, odd1 = sign_bytes(w4, w5, w6, w7, INTERPRETED)
    return even0, odd0, even1, odd1


@triton.jit
def _store(codes_ptr, scale_ptr, low, high, byte, n_blocks):
    """Store words of codes and scale bytes."""
    at = _offsets(low.shape[0])
    words = at[:, :, :, None] * 2 + tl.arange(0, 2)[None, None, None, :]
    tl.store(codes_ptr + words, tl.join(low, high), mask=words < n_blocks * 4)
    # By one of the two threads of a block.
    mask = (at < n_blocks * 2) & (at % 2 == 0)
    tl.store(scale_ptr + (at >> 1), tl.broadcast_to(byte.to(tl.uint8), at.shape), mask=mask)


@triton.jit
def _rounded(y, inverse, limit, INTERPRETED: tl.constexpr):
    y0, y1, y2, y3, y4, y5, y6, y7 = y
    t0, t1 = rounded(y0, inverse, limit, INTERPRETED), rounded(y1, inverse, limit, INTERPRETED)
    t2, t3 = rounded(y2, inverse, limit, INTERPRETED), rounded(y3, inverse, limit, INTERPRETED)
    t4, t5 = rounded(y4, inverse, limit, INTERPRETED), rounded(y5, inverse, limit, INTERPRETED)
    t6, t7 = rounded(y6, inverse, limit, INTERPRETED), rounded(y7, inverse, limit, INTERPRETED)
    return t0, t1, t2, t3, t4, t5, t6, t7


@triton.jit
def _residual(w, t, minus_step, INTERPRETED: tl.constexpr):
    """What a word of two magnitudes is more than its values, ``minus_step`` times the grid's."""
    value = multiply((t >> 3) & _CODES, tl.full(t.shape, _TO_VALUES, tl.int32), INTERPRETED)
    return multiply_add(value, tl.broadcast_to(minus_step, t.shape), w, INTERPRETED)


@triton.jit
def _residuals(m, t, byte, mantissa, INTERPRETED: tl.constexpr):
    """Eight words of magnitudes less their values: factor times residual, which is exact in bfloat16."""
    # Minus factor times scale, of which byte 0 is subnormal.
    step = tl.where(byte == 0, 0x40 + (mantissa << 4), (byte << 7) + (mantissa << 5)) * 0x00010001 | _SIGNS
    m0, m1, m2, m3, m4, m5, m6, m7 = m
    t0, t1, t2, t3, t4, t5, t6, t7 = t
    r0, r1 = _residual(m0, t0, step, INTERPRETED), _residual(m1, t1, step, INTERPRETED)
    r2, r3 = _residual(m2, t2, step, INTERPRETED), _residual(m3, t3, step, INTERPRETED)
    r4, r5 = _residual(m4, t4, step, INTERPRETED), _residual(m5, t5, step, INTERPRETED)
    r6, r7 = _residual(m6, t6, step, INTERPRETED), _residual(m7, t7, step, INTERPRETED)
    return r0, r1, r2, r3, r4, r5, r6, r7


@triton.jit
def _words(t, finite, s, INTERPRETED: tl.constexpr):
    """Two words of codes of eight words of [`rounded`] and their [`_signs`]; zero where ``finite`` has no bits."""
    t0, t1, t2, t3, t4, t5, t6, t7 = t
    finite = tl.broadcast_to(finite, t0.shape)
    low = codes_of_rounded(t0, t1, t2, t3, INTERPRETED) & finite
    high = codes_of_rounded(t4, t5, t6, t7, INTERPRETED) & finite
    return signed(low, s[0], s[1]), signed(high, s[2], s[3])


@triton.jit(do_not_specialize=["n_blocks"])
def quantize_mantissas_kernel(x_ptr, out, n_blocks, MACROS: tl.constexpr, SCHEME: tl.constexpr):
    """Codes (as int32 words of eight), scale bytes and bytes of mantissas of ``n_blocks`` adjacent blocks, whole macro
    blocks, read as int32 words of two elements; codes and scale bytes of the residual too. One program for every
    ``MACROS`` macro blocks."""
    INTERPRETED: tl.constexpr = SCHEME.INTERPRETED
    first = tl.program_id(0).to(tl.int64) * (4 * MACROS)
    left = tl.minimum(n_blocks - first, 4 * MACROS).to(tl.int32)
    x_ptr += first * 16
    w0, w1, w2, w3 = _load(x_ptr, left * 16, MACROS, 0)
    w4, w5, w6, w7 = _load(x_ptr, left * 16, MACROS, 4)
    w = w0, w1, w2, w3, w4, w5, w6, w7
    m = eight_magnitudes(w, INTERPRETED)
    bits = _maxima(m, INTERPRETED)
    y = over_power_of_two(m, bits, INTERPRETED)
    mantissa = best_mantissas(y, bits, INTERPRETED)
    byte, inverse = scales(bits, mantissa)
    t = _rounded(y, inverse, limits(byte), INTERPRETED)
    finite = tl.where(bits < INFINITE, -1, 0)
    signs = _signs(w, INTERPRETED)
    low, high = _words(t, finite, signs, INTERPRETED)
    stored = tl.where(bits < INFINITE, byte, NAN_BYTE)
    _store(out.codes + first * 4, out.scale + first, low, high, stored, left)
    packed = tl.sum(mantissa << (2 * tl.arange(0, 4)[None, :, None]), axis=1, keep_dims=True)
    at = _offsets(MACROS)
    mask = (at < left * 2) & (at % 8 == 0)
    tl.store(out.macro + first // 4 + (at >> 3), tl.broadcast_to(packed.to(tl.uint8), at.shape), mask=mask)
    if SCHEME.HAS_FALLBACK:
        r = _residuals(m, t, byte, mantissa, INTERPRETED)
        m = eight_magnitudes(r, INTERPRETED)
        bits = _maxima(m, INTERPRETED)
        byte, inverse = scales(bits, mantissa)
        y = over_power_of_two(m, bits, INTERPRETED)
        # No residual reaches byte 253.
        t = _rounded(y, inverse, None, INTERPRETED)
        even0, odd0, even1, odd1 = _signs(r, INTERPRETED)
        signs = signs[0] ^ even0, signs[1] ^ odd0, signs[2] ^ even1, signs[3] ^ odd1
        low, high = _words(t, finite, signs, INTERPRETED)
        _store(out.residual_codes + first * 4, out.residual_scale + first, low, high, byte & finite, left)
