# SPDX-License-Identifier: Apache-2.0
"""The kernel of two elements an instruction for block mantissas: codes, scale bytes and mantissas of bfloat16 by the
rule ``"even"`` on NVIDIA GPUs, and codes and scale bytes of the residual. The bits are those of [`pack_tile`].

A thread has a block, four times four words of two elements, so that what is found for a block is found once. What
belongs to blocks, and each of their words, is ``[macro blocks, 4]``.
"""

import triton
import triton.language as tl

from ..common.blocks import NAN_BYTE
from ..common.pairs import LOW, larger, magnitudes, multiply, multiply_add, permute
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


# Both halves of a word, of bfloat16: the signs; where a code is the digit of a subnormal number and those above; 2**126.
_SIGNS = tl.constexpr(-0x7FFF8000)
_CODES = tl.constexpr(0x01C001C0)
_TO_VALUES = tl.constexpr(0x7E807E80)


@triton.jit
def _blocks(MACROS: tl.constexpr):
    """Numbers of blocks."""
    return tl.arange(0, MACROS)[:, None] * 4 + tl.arange(0, 4)[None, :]


@triton.jit
def _load(x_ptr, n_words, MACROS: tl.constexpr, FIRST: tl.constexpr):
    """Words ``FIRST`` to ``FIRST + 3`` of every sixteen; zero from ``n_words`` on."""
    offsets = _blocks(MACROS)[:, :, None] * 16 + FIRST + tl.arange(0, 4)[None, None, :]
    x = tl.load(x_ptr + offsets, mask=offsets < n_words, other=0)
    even, odd = tl.split(tl.reshape(x, [MACROS, 4, 2, 2]))
    w0, w2 = tl.split(even)
    w1, w3 = tl.split(odd)
    return w0, w1, w2, w3


@triton.jit
def _four_magnitudes(w, INTERPRETED: tl.constexpr):
    m0, m1 = magnitudes(w[0], INTERPRETED), magnitudes(w[1], INTERPRETED)
    m2, m3 = magnitudes(w[2], INTERPRETED), magnitudes(w[3], INTERPRETED)
    return m0, m1, m2, m3


@triton.jit
def _magnitudes(w, INTERPRETED: tl.constexpr):
    """Of four times four words."""
    m0, m1 = _four_magnitudes(w[0], INTERPRETED), _four_magnitudes(w[1], INTERPRETED)
    m2, m3 = _four_magnitudes(w[2], INTERPRETED), _four_magnitudes(w[3], INTERPRETED)
    return m0, m1, m2, m3


@triton.jit
def _largest_of_four(m, INTERPRETED: tl.constexpr):
    return larger(larger(m[0], m[1], INTERPRETED), larger(m[2], m[3], INTERPRETED), INTERPRETED)


@triton.jit
def _largest(m, INTERPRETED: tl.constexpr):
    """The bits of the largest of four times four words of magnitudes."""
    low = larger(_largest_of_four(m[0], INTERPRETED), _largest_of_four(m[1], INTERPRETED), INTERPRETED)
    high = larger(_largest_of_four(m[2], INTERPRETED), _largest_of_four(m[3], INTERPRETED), INTERPRETED)
    words = larger(low, high, INTERPRETED)
    return larger(words, permute(words, words, 0x1032, INTERPRETED), INTERPRETED) & LOW


@triton.jit
def _over_power_of_two(m, bits, INTERPRETED: tl.constexpr):
    """[`over_power_of_two`] of four times four words."""
    y0, y1 = over_power_of_two(m[0], bits, INTERPRETED), over_power_of_two(m[1], bits, INTERPRETED)
    y2, y3 = over_power_of_two(m[2], bits, INTERPRETED), over_power_of_two(m[3], bits, INTERPRETED)
    return y0, y1, y2, y3


@triton.jit
def _signs(w, INTERPRETED: tl.constexpr):
    """[`sign_bytes`] of four words."""
    return sign_bytes(w[0], w[1], w[2], w[3], INTERPRETED)


@triton.jit
def _minus_steps(byte, mantissa):
    """Minus factor times scale, in both halves of words, as bfloat16; of byte 0 it is subnormal."""
    return tl.where(byte == 0, 0x40 + (mantissa << 4), (byte << 7) + (mantissa << 5)) * 0x00010001 | _SIGNS


@triton.jit
def _residual(m, t, minus_step, INTERPRETED: tl.constexpr):
    """What a word of two magnitudes is more than its values, ``minus_step`` times the grid's: exact."""
    value = multiply((t >> 3) & _CODES, tl.full(t.shape, _TO_VALUES, tl.int32), INTERPRETED)
    return multiply_add(value, minus_step, m, INTERPRETED)


@triton.jit
def _residuals(m, t, minus_step, INTERPRETED: tl.constexpr):
    """[`_residual`] of four words."""
    r0, r1 = _residual(m[0], t[0], minus_step, INTERPRETED), _residual(m[1], t[1], minus_step, INTERPRETED)
    r2, r3 = _residual(m[2], t[2], minus_step, INTERPRETED), _residual(m[3], t[3], minus_step, INTERPRETED)
    return r0, r1, r2, r3


@triton.jit
def _word(t, signs, finite, INTERPRETED: tl.constexpr):
    """Words of eight codes of four words of [`rounded`] and their signs; zero where ``finite`` has no bits."""
    return signed(codes_of_rounded(t, INTERPRETED) & finite, signs[0], signs[1])


@triton.jit
def _store(codes_ptr, scale_ptr, words, byte, n_blocks):
    """Store four words of codes, and a scale byte."""
    blocks = _blocks(byte.shape[0])
    codes = tl.join(tl.join(words[0], words[2]), tl.join(words[1], words[3]))
    codes = tl.reshape(codes, [byte.shape[0], 4, 4])
    at = blocks[:, :, None] * 4 + tl.arange(0, 4)[None, None, :]
    tl.store(codes_ptr + at, codes, mask=at < n_blocks * 4)
    tl.store(scale_ptr + blocks, byte.to(tl.uint8), mask=blocks < n_blocks)


@triton.jit
def _codes(y, signs, bits, mantissa, limit: tl.constexpr, INTERPRETED: tl.constexpr):
    """What a pass makes of four times four words of [`over_power_of_two`]: words of [`rounded`], words of codes, scale
    bytes but for NaN."""
    byte, inverse = scales(bits, mantissa)
    if limit:
        most = limits(byte)
    else:
        most = None
    t0, t1 = rounded(y[0], inverse, most, INTERPRETED), rounded(y[1], inverse, most, INTERPRETED)
    t2, t3 = rounded(y[2], inverse, most, INTERPRETED), rounded(y[3], inverse, most, INTERPRETED)
    return (t0, t1, t2, t3), byte


@triton.jit
def _words(t, signs, finite, INTERPRETED: tl.constexpr):
    c0, c1 = _word(t[0], signs[0], finite, INTERPRETED), _word(t[1], signs[1], finite, INTERPRETED)
    c2, c3 = _word(t[2], signs[2], finite, INTERPRETED), _word(t[3], signs[3], finite, INTERPRETED)
    return c0, c1, c2, c3


@triton.jit
def _xor(a, b):
    return a[0] ^ b[0], a[1] ^ b[1]


@triton.jit(do_not_specialize=["n_blocks"])
def quantize_mantissas_kernel(x_ptr, out, n_blocks, MACROS: tl.constexpr, SCHEME: tl.constexpr):
    """Codes (as int32 words of eight), scale bytes and bytes of mantissas of ``n_blocks`` adjacent blocks, whole macro
    blocks, read as int32 words of two elements; codes and scale bytes of the residual too. One program for every
    ``MACROS`` macro blocks."""
    INTERPRETED: tl.constexpr = SCHEME.INTERPRETED
    first = tl.program_id(0).to(tl.int64) * (4 * MACROS)
    left = tl.minimum(n_blocks - first, 4 * MACROS).to(tl.int32)
    x_ptr += first * 16
    w = (
        _load(x_ptr, left * 16, MACROS, 0),
        _load(x_ptr, left * 16, MACROS, 4),
        _load(x_ptr, left * 16, MACROS, 8),
        _load(x_ptr, left * 16, MACROS, 12),
    )
    m = _magnitudes(w, INTERPRETED)
    bits = _largest(m, INTERPRETED)
    y = _over_power_of_two(m, bits, INTERPRETED)
    mantissa = best_mantissas(y, bits, INTERPRETED)
    finite = tl.where(bits < INFINITE, -1, 0)
    s = _signs(w[0], INTERPRETED), _signs(w[1], INTERPRETED), _signs(w[2], INTERPRETED), _signs(w[3], INTERPRETED)
    t, byte = _codes(y, s, bits, mantissa, True, INTERPRETED)
    stored = tl.where(bits < INFINITE, byte, NAN_BYTE)
    _store(out.codes + first * 4, out.scale + first, _words(t, s, finite, INTERPRETED), stored, left)
    packed = tl.sum(mantissa << (2 * tl.arange(0, 4)[None, :]), axis=1, keep_dims=True)
    blocks = _blocks(MACROS)
    mask = (blocks < left) & (blocks % 4 == 0)
    tl.store(out.macro + first // 4 + (blocks >> 2), tl.broadcast_to(packed.to(tl.uint8), mask.shape), mask=mask)
    if SCHEME.HAS_FALLBACK:
        step = _minus_steps(byte, mantissa)
        r0, r1 = _residuals(m[0], t[0], step, INTERPRETED), _residuals(m[1], t[1], step, INTERPRETED)
        r2, r3 = _residuals(m[2], t[2], step, INTERPRETED), _residuals(m[3], t[3], step, INTERPRETED)
        m = _magnitudes((r0, r1, r2, r3), INTERPRETED)
        bits = _largest(m, INTERPRETED)
        y = _over_power_of_two(m, bits, INTERPRETED)
        s0, s1 = _xor(s[0], _signs(r0, INTERPRETED)), _xor(s[1], _signs(r1, INTERPRETED))
        s2, s3 = _xor(s[2], _signs(r2, INTERPRETED)), _xor(s[3], _signs(r3, INTERPRETED))
        # No residual reaches the scale that has a limit.
        t, byte = _codes(y, s, bits, mantissa, False, INTERPRETED)
        words = _words(t, (s0, s1, s2, s3), finite, INTERPRETED)
        _store(out.residual_codes + first * 4, out.residual_scale + first, words, byte & finite, left)
