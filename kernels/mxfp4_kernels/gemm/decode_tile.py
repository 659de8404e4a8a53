# SPDX-License-Identifier: Apache-2.0
"""Packed codes to bfloat16 in registers, about two instructions for each.

Eight codes make one little-endian int32 word. In bfloat16 the two exponent bits and the mantissa bit of a code go to
bits 8..6, its sign to bit 15; what that spells is the E2M1 value times ``2**-126``, for the subnormal 0.5 too. One
multiply puts the exponent right and brings the block's scale along: ``2**(byte - 127 + 126)``, which bfloat16 holds up
to byte 128. Scales above, of blocks whose largest magnitude is 12 or more, need a second one.

All products are exact in bfloat16 from scale byte 0 on, times a block mantissa ``1 + m / 4`` too (five significant
bits). Values beyond its range become infinite; finite 16-bit and float32 weights have none below ``2**127``.

Constants of the functions here:

* ``CUDA``: multiply two bfloat16 in one instruction, written in PTX; otherwise as float32, with the same results.
* ``INTERPRETED``: give float32 of the same values, because Triton's interpreter does not calculate in bfloat16.
"""

import triton
import triton.language as tl

from ..common.blocks import BLOCKWISE, macro_factor
from ..common.pairs import reciprocal


#: Scale bytes up to this one need no second multiply.
NARROW_BYTE = tl.constexpr(128)
#: Orders of the columns of a block that leave each word to one thread, which differ by what tensor cores take from a
#: thread: eight neighbours of a row in the first (in a word: 0 4 1 5 2 6 3 7, as in all); two of every eight in the
#: second, where pairs of the four words of a block take turns; four of every sixteen in the third.
WHOLE_WORDS = tl.constexpr(0)
WORDS_IN_PAIRS = tl.constexpr(1)
WORDS_IN_FOURS = tl.constexpr(2)
_HIGH_HALF = tl.constexpr(-0x10000)
# 0x81C081C0: sign, exponent and mantissa of both halves.
_ELEMENT_FIELDS = tl.constexpr(-0x7E3F7E40)
_NAN_BITS = tl.constexpr(0x7FC0)
_BOTH = tl.constexpr(0x10001)


@triton.jit
def _code_pairs(words, PAIR: tl.constexpr):
    """int32 words of two bfloat16, code ``PAIR`` (0..3) of ``words`` in the low half and ``PAIR + 4`` in the high half,
    as E2M1 values times ``2**-126``. A multiply makes two copies of the nibble, for the sign and for the rest."""
    if PAIR == 0:
        nibbles = (words & 0x000F000F) * 0x1040
    elif PAIR == 1:
        nibbles = (words & 0x00F000F0) * 0x0104
    elif PAIR == 2:
        nibbles = ((words >> 8) & 0x000F000F) * 0x1040
    else:
        nibbles = ((words >> 8) & 0x00F000F0) * 0x0104
    return nibbles & _ELEMENT_FIELDS


@triton.jit
def _multiply(pairs, factor, CUDA: tl.constexpr):
    """Products of the bfloat16 in both halves of int32 words; exact ones only."""
    if CUDA:
        # mul.bf16x2 needs sm_90; adding -0 changes nothing.
        return tl.inline_asm_elementwise(
            "{ .reg .b32 zero; mov.b32 zero, 0x80008000; fma.rn.bf16x2 $0, $1, $2, zero; }",
            "=r,r,r",
            [pairs, factor],
            tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        low = (pairs << 16).to(tl.float32, bitcast=True) * (factor << 16).to(tl.float32, bitcast=True)
        high = (pairs & _HIGH_HALF).to(tl.float32, bitcast=True)
        high = high * (factor & _HIGH_HALF).to(tl.float32, bitcast=True)
        return ((low.to(tl.int32, bitcast=True) >> 16) & 0xFFFF) | (high.to(tl.int32, bitcast=True) & _HIGH_HALF)


@triton.jit
def bfloat16_of(bits, INTERPRETED: tl.constexpr):
    """Numbers whose bfloat16 bits are the low halves of integers; bfloat16 as it is."""
    if bits.dtype == tl.bfloat16:
        return bits
    elif INTERPRETED:
        return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return bits.to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _multipliers(byte, mantissa, HAS_MANTISSA: tl.constexpr, WIDE: tl.constexpr):
    """What [`_code_pairs`] of blocks are multiplied by: bfloat16 in both halves of int32 words."""
    if WIDE:
        byte = tl.minimum(byte, NARROW_BYTE)
    factor = (byte + 126) * (_BOTH << 7)
    if HAS_MANTISSA:
        factor |= mantissa * (_BOTH << 5)
    return factor


@triton.jit
def _second_multipliers(byte):
    """What blocks with scale bytes above `NARROW_BYTE` are multiplied by again; NaN for byte 255, 1 for the others."""
    bits = (tl.maximum(byte, NARROW_BYTE) - NARROW_BYTE + 127) << 7
    return tl.where(byte == 255, _NAN_BITS, bits) * _BOTH


@triton.jit
def _for_words(per_block, words):
    """``[ROWS, BLOCKS]`` repeated for the four words of each block."""
    ROWS: tl.constexpr = words.shape[0]
    BLOCKS: tl.constexpr = words.shape[1] // 4
    return tl.reshape(tl.broadcast_to(per_block[:, :, None], [ROWS, BLOCKS, 4]), [ROWS, BLOCKS * 4])


@triton.jit
def decode_tile(words, byte, mantissa, WIDE: tl.constexpr, WEIGHT: tl.constexpr):
    """Values ``[ROWS, 8 * WORDS]`` (bfloat16) of codes ``[ROWS, WORDS]`` (int32 words), with the scale bytes
    ``[ROWS, WORDS / 4]`` (int32) of their blocks. Macro factors are for the caller to divide by. Block mantissas are
    not: they come in as int32 of the shape of ``byte``, used with `BLOCKWISE` macro bytes alone.

    ``NATURAL``: in the order of the weight's columns. Otherwise as [`interleave`] orders the other operand, without
    moving anything.
    ``WIDE``: every scale byte is right. Otherwise those up to `NARROW_BYTE` are, at half the multiplies.
    """
    factor = _for_words(_multipliers(byte, mantissa, WEIGHT.SEARCH == BLOCKWISE, WIDE), words)
    p0 = _multiply(_code_pairs(words, 0), factor, WEIGHT.CUDA)
    p1 = _multiply(_code_pairs(words, 1), factor, WEIGHT.CUDA)
    p2 = _multiply(_code_pairs(words, 2), factor, WEIGHT.CUDA)
    p3 = _multiply(_code_pairs(words, 3), factor, WEIGHT.CUDA)
    if WIDE:
        second = _for_words(_second_multipliers(byte), words)
        p0 = _multiply(p0, second, WEIGHT.CUDA)
        p1 = _multiply(p1, second, WEIGHT.CUDA)
        p2 = _multiply(p2, second, WEIGHT.CUDA)
        p3 = _multiply(p3, second, WEIGHT.CUDA)
    # Each join adds the innermost axis. Codes 0 to 3 of a word are in low halves, 4 to 7 in high ones.
    ROWS: tl.constexpr = words.shape[0]
    BLOCKS: tl.constexpr = words.shape[1] // 4
    if WEIGHT.NATURAL:
        even = tl.join(tl.join(p0, p0 >> 16), tl.join(p2, p2 >> 16))
        odd = tl.join(tl.join(p1, p1 >> 16), tl.join(p3, p3 >> 16))
        bits = tl.join(even, odd)
    else:
        pairs = tl.join(tl.join(p0, p2), tl.join(p1, p3))
        bits = tl.join(pairs, pairs >> 16)
        if WEIGHT.ORDER == WORDS_IN_PAIRS:
            bits = tl.permute(tl.reshape(bits, [ROWS, BLOCKS, 4, 2, 2, 2]), [0, 1, 3, 4, 2, 5])
        elif WEIGHT.ORDER == WORDS_IN_FOURS:
            bits = tl.permute(tl.reshape(bits, [ROWS, BLOCKS, 4, 2, 2, 2]), [0, 1, 3, 2, 4, 5])
    return bfloat16_of(tl.reshape(bits, [ROWS, BLOCKS * 32]), WEIGHT.INTERPRETED)


@triton.jit
def interleave(x, ORDER: tl.constexpr):
    """Columns of ``x[ROWS, COLS]`` as [`decode_tile`] orders them without ``NATURAL``."""
    ROWS: tl.constexpr = x.shape[0]
    COLS: tl.constexpr = x.shape[1]
    if ORDER == WHOLE_WORDS:
        x = tl.permute(tl.reshape(x, [ROWS, COLS // 8, 2, 4]), [0, 1, 3, 2])
    elif ORDER == WORDS_IN_PAIRS:
        x = tl.permute(tl.reshape(x, [ROWS, COLS // 32, 4, 2, 2, 2]), [0, 1, 4, 5, 2, 3])
    else:
        x = tl.permute(tl.reshape(x, [ROWS, COLS // 32, 4, 2, 2, 2]), [0, 1, 4, 2, 5, 3])
    return tl.reshape(x, [ROWS, COLS])


@triton.jit
def load_inside(pointers, inside, ALL: tl.constexpr):
    """What lies at pointers, zero where not ``inside``; ``ALL``: everywhere."""
    if ALL:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=inside, other=0)


@triton.jit
def inverse_of_macro(m8, WEIGHT: tl.constexpr):
    """One over the factors of macro bytes, to ``2**-23``. They are in [1, 2), where no division needs care."""
    if WEIGHT.CUDA:
        return reciprocal(macro_factor(m8), WEIGHT.INTERPRETED)
    else:
        return 1.0 / macro_factor(m8)


@triton.jit
def _dot(weight, x, WEIGHT: tl.constexpr):
    """``weight[BN, BK] x[BM, BK]^T`` of a bfloat16 tile and bfloat16, its bits (``PIECES`` is 1), or float32."""
    PIECES: tl.constexpr = WEIGHT.PIECES
    if PIECES == 1:
        x = bfloat16_of(x, WEIGHT.INTERPRETED)
        if not WEIGHT.NATURAL:
            x = interleave(x, WEIGHT.ORDER)
        return tl.dot(weight, tl.trans(x))
    else:
        total = tl.zeros([weight.shape[0], x.shape[0]], tl.float32)
        if not WEIGHT.NATURAL:
            x = interleave(x, WEIGHT.ORDER)
        for _ in tl.static_range(PIECES):
            bits = x.to(tl.int32, bitcast=True)
            # The bits of a NaN may all be in the half that is cut off.
            top = tl.where(x == x, bits & _HIGH_HALF, 0x7FC00000)
            total = tl.dot(weight, tl.trans(bfloat16_of(top >> 16, WEIGHT.INTERPRETED)), total)
            piece = top.to(tl.float32, bitcast=True)
            x = tl.where(x == piece, 0.0, x - piece)
        return total


@triton.jit
def decoded_product(
    x,
    codes,
    byte,
    mantissa,
    residual_codes_at,
    residual_scale_at,
    has_words,
    has_blocks,
    largest,
    alpha,
    WIDE: tl.constexpr,
    WEIGHT: tl.constexpr,
):
    """``weight[BN, BK] x[BM, BK]^T`` of one step, macro factors apart, and the largest scale bytes met with those of
    the step. Of the residual, codes and scale bytes are loaded here from ``[BN, BK / 8]`` and ``[BN, BK / 32]``, or
    `None`."""
    if not WIDE:
        largest = tl.maximum(largest, byte)
    part = _dot(decode_tile(codes, byte, mantissa, WIDE, WEIGHT), x, WEIGHT)
    if residual_codes_at is not None:
        codes = load_inside(residual_codes_at, has_words, WEIGHT.EVEN)
        byte = load_inside(residual_scale_at, has_blocks, WEIGHT.EVEN).to(tl.int32)
        if not WIDE:
            largest = tl.maximum(largest, byte)
        part += alpha * _dot(decode_tile(codes, byte, mantissa, WIDE, WEIGHT), x, WEIGHT)
    return part, largest
