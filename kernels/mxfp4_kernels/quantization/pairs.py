# SPDX-License-Identifier: Apache-2.0
"""The kernel of two elements an instruction: codes and scale bytes of bfloat16 on NVIDIA GPUs, in whole blocks, by the
rules that need no search, without macro factors or with static ones, and with those of the residual or without. The
bits are those of [`pack_tile`], which takes three times the instructions.

A tile is two halves, each in four parts ``[macro blocks, blocks, 4]`` of words of two elements: words 0, 1, 2 and 3 of
every four, of which one word of eight codes is made. What belongs to blocks, ``[macro blocks, blocks, 1]``, is in the
low half of a word for the first half of the tile, in the high half for the second.
"""

import triton
import triton.language as tl

from ..common.blocks import NO_MACRO
from ..common.pairs import HIGH, four_magnitudes, larger, largest, largest_of_four, permute
from .e2m1 import codes_of_words, multiplier_of, residual_codes_by_instruction
from .pair_codes import factor_words, magnitude_codes, rounded, scaled, scales_of_both, sign_bytes, signed
from .pair_residual import residual_codes, residual_of_words, scale_words


@triton.jit
def numbers(MACROS: tl.constexpr, EACH: tl.constexpr):
    """Of the words of codes of one half: ``[MACROS, EACH, 4]``."""
    macros, blocks = tl.arange(0, MACROS)[:, None, None], tl.arange(0, EACH)[None, :, None]
    return (macros * EACH + blocks) * 4 + tl.arange(0, 4)[None, None, :]


@triton.jit
def load_words(x_ptr, n_words, MACROS: tl.constexpr, EACH: tl.constexpr):
    """The four parts of one half; zero from ``n_words`` on."""
    offsets = numbers(MACROS, EACH)[:, :, :, None] * 4 + tl.arange(0, 4)[None, None, None, :]
    x = tl.load(x_ptr + offsets, mask=offsets < n_words, other=0)
    even, odd = tl.split(tl.reshape(x, [MACROS, EACH, 4, 2, 2]))
    w0, w2 = tl.split(even)
    w1, w3 = tl.split(odd)
    return w0, w1, w2, w3


@triton.jit
def _signs(w, INTERPRETED: tl.constexpr):
    return sign_bytes(w[0], w[1], w[2], w[3], INTERPRETED)


@triton.jit
def _maxima(v, w, INTERPRETED: tl.constexpr):
    """The largest magnitudes of the blocks of both halves."""
    v, w = largest_of_four(v, INTERPRETED), largest_of_four(w, INTERPRETED)
    even, odd = permute(v, w, 0x5410, INTERPRETED), permute(v, w, 0x7632, INTERPRETED)
    return largest(larger(even, odd, INTERPRETED), 2, INTERPRETED)


@triton.jit
def _both_halves(words, INTERPRETED: tl.constexpr):
    """Words with the low halves of ``words`` in both halves, and with the high ones."""
    return permute(words, words, 0x1010, INTERPRETED), permute(words, words, 0x3232, INTERPRETED)


@triton.jit
def _rounded(m, inverse, factor, SCHEME: tl.constexpr):
    """Steps, and starts of binades, of the four parts of one half."""
    inverse, factor = tl.broadcast_to(inverse, m[0].shape), tl.broadcast_to(factor, m[0].shape)
    s0, b0 = rounded(m[0], inverse, factor, SCHEME)
    s1, b1 = rounded(m[1], inverse, factor, SCHEME)
    s2, b2 = rounded(m[2], inverse, factor, SCHEME)
    s3, b3 = rounded(m[3], inverse, factor, SCHEME)
    return (s0, s1, s2, s3), (b0, b1, b2, b3)


@triton.jit
def _codes(steps, signs, SCHEME: tl.constexpr):
    """Words of eight codes of one half."""
    return signed(magnitude_codes(steps[0], steps[1], steps[2], steps[3], SCHEME), signs[0], signs[1])


@triton.jit
def _residual_words(w, steps, binades, scale, SCHEME: tl.constexpr):
    """What is left of the four parts of one half."""
    scale = tl.broadcast_to(scale, w[0].shape)
    r0 = residual_of_words(w[0], steps[0], binades[0], scale, SCHEME)
    r1 = residual_of_words(w[1], steps[1], binades[1], scale, SCHEME)
    r2 = residual_of_words(w[2], steps[2], binades[2], scale, SCHEME)
    r3 = residual_of_words(w[3], steps[3], binades[3], scale, SCHEME)
    return r0, r1, r2, r3


@triton.jit
def store(codes_ptr, scale_ptr, first, codes, byte, n_blocks):
    """Store codes and scale bytes of one half, whose first block has the number ``first``, of ``n_blocks`` at most."""
    at = numbers(codes.shape[0], codes.shape[1])
    inside = at < n_blocks * 4
    tl.store(codes_ptr + first * 4 + at, codes, mask=inside)
    # By one of the four threads of a block.
    tl.store(scale_ptr + first + (at >> 2), tl.broadcast_to(byte.to(tl.uint8), at.shape), mask=inside & (at % 4 == 0))


@triton.jit
def store_macro(macro_ptr, first, m8, n_blocks, MACRO: tl.constexpr):
    """The same of the macro bytes of its blocks."""
    each: tl.constexpr = MACRO // 8
    at = numbers(m8.shape[0], m8.shape[1])
    m8 = tl.broadcast_to(m8.to(tl.uint8), at.shape)
    tl.store(macro_ptr + first * 32 // MACRO + at // each, m8, mask=(at < n_blocks * 4) & (at % each == 0))


@triton.jit
def _plain_pass(
    v, w, codes_ptr, scale_ptr, first, left, BLOCKS: tl.constexpr, RESIDUAL: tl.constexpr, SCHEME: tl.constexpr
):
    """Write codes and scale bytes of both halves, without macro factors; returns what is left of their elements, as
    such words. Of blocks with NaN that is NaN or infinite: as ``RESIDUAL`` those have scale byte 0."""
    INTERPRETED: tl.constexpr = SCHEME.INTERPRETED
    a, b = four_magnitudes(v, INTERPRETED), four_magnitudes(w, INTERPRETED)
    byte, inverse, nan = scales_of_both(_maxima(a, b, INTERPRETED), SCHEME)
    inverse_v, inverse_w = _both_halves(inverse, INTERPRETED)
    steps_v, binades_v = _rounded(a, inverse_v, inverse_v, SCHEME)
    steps_w, binades_w = _rounded(b, inverse_w, inverse_w, SCHEME)
    stored = byte & ~nan if RESIDUAL else byte | (nan & 0x00FF00FF)
    store(codes_ptr, scale_ptr, first, _codes(steps_v, _signs(v, INTERPRETED), SCHEME), stored, left)
    first, left = first + BLOCKS, left - BLOCKS
    store(codes_ptr, scale_ptr, first, _codes(steps_w, _signs(w, INTERPRETED), SCHEME), stored >> 16, left)
    scale_v, scale_w = _both_halves(scale_words(byte, INTERPRETED), INTERPRETED)
    return _residual_words(v, steps_v, binades_v, scale_v, SCHEME), _residual_words(
        w, steps_w, binades_w, scale_w, SCHEME
    )


@triton.jit
def _with_macro(v, magnitudes_v, maxima, macro_maxima, out, first, left, SCHEME: tl.constexpr):
    """Write what there is of one half with macro factors, given the float32 bits of the maxima of its blocks and of
    those of their macro blocks."""
    byte, inverse, m8, _ = scaled(maxima, macro_maxima, SCHEME)
    steps, binades = _rounded(magnitudes_v, inverse, factor_words(m8), SCHEME)
    signs = _signs(v, SCHEME.INTERPRETED)
    store(out.codes, out.scale, first, _codes(steps, signs, SCHEME), byte, left)
    store_macro(out.macro, first, m8, left, SCHEME.MACRO)
    if SCHEME.HAS_FALLBACK:
        codes, byte = residual_codes(magnitudes_v, steps, binades, signs, byte, m8, SCHEME)
        store(out.residual_codes, out.residual_scale, first, codes, byte, left)


@triton.jit
def _by_instruction(v, maxima, macro_maxima, out, first, left, SCHEME: tl.constexpr):
    """The same of one half by the instruction that makes codes, with macro factors or without."""
    byte, inverse, m8, _ = scaled(maxima, macro_maxima, SCHEME)
    multiplier = tl.broadcast_to(multiplier_of(inverse, m8, SCHEME), v[0].shape)
    codes = codes_of_words(v[0], v[1], v[2], v[3], multiplier, SCHEME.INTERPRETED)
    store(out.codes, out.scale, first, codes, byte, left)
    if SCHEME.SEARCH != NO_MACRO:
        store_macro(out.macro, first, m8, left, SCHEME.MACRO)
    if SCHEME.HAS_FALLBACK:
        codes, byte = residual_codes_by_instruction(v, codes, byte, m8, SCHEME)
        store(out.residual_codes, out.residual_scale, first, codes, byte, left)


@triton.jit(do_not_specialize=["n_blocks"])
def quantize_pairs_kernel(x_ptr, out, n_blocks, BLOCKS: tl.constexpr, SCHEME: tl.constexpr):
    """Codes (as int32 words of eight), scale bytes and macro bytes of ``n_blocks`` adjacent blocks, whole macro blocks,
    read as int32 words of two elements; codes and scale bytes of the residual too. One program for every
    ``2 * BLOCKS``."""
    first = tl.program_id(0).to(tl.int64) * (2 * BLOCKS)
    left = tl.minimum(n_blocks - first, 2 * BLOCKS).to(tl.int32)
    each: tl.constexpr = SCHEME.MACRO // 32
    x_ptr += first * 16
    v = load_words(x_ptr, left * 16, BLOCKS // each, each)
    w = load_words(x_ptr + BLOCKS * 16, (left - BLOCKS) * 16, BLOCKS // each, each)
    if SCHEME.SEARCH == NO_MACRO and not SCHEME.CONVERTS:
        v, w = _plain_pass(v, w, out.codes, out.scale, first, left, BLOCKS, False, SCHEME)
        if SCHEME.HAS_FALLBACK:
            _plain_pass(v, w, out.residual_codes, out.residual_scale, first, left, BLOCKS, True, SCHEME)
    else:
        a, b = four_magnitudes(v, SCHEME.INTERPRETED), four_magnitudes(w, SCHEME.INTERPRETED)
        maxima = _maxima(a, b, SCHEME.INTERPRETED)
        macro = largest(maxima, 1, SCHEME.INTERPRETED)
        if SCHEME.CONVERTS:
            _by_instruction(v, maxima << 16, macro << 16, out, first, left, SCHEME)
            _by_instruction(w, maxima & HIGH, macro & HIGH, out, first + BLOCKS, left - BLOCKS, SCHEME)
        else:
            _with_macro(v, a, maxima << 16, macro << 16, out, first, left, SCHEME)
            _with_macro(w, b, maxima & HIGH, macro & HIGH, out, first + BLOCKS, left - BLOCKS, SCHEME)
