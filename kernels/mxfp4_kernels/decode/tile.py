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

from ..common.blocks import BLOCK_MANTISSAS, macro_factor


#: Scale bytes up to this one need no second multiply.
NARROW_BYTE = tl.constexpr(128)
#: The first two mantissa bits of two bfloat16.
MANTISSA_FIELDS = tl.constexpr(0x600060)
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
def _bfloat16_of(bits, INTERPRETED: tl.constexpr):
    """Numbers whose bfloat16 bits are the low halves of integers; bfloat16 as it is."""
    if bits.dtype == tl.bfloat16:
        return bits
    elif INTERPRETED:
        return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return bits.to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _for_words(per_block, words):
    """``[ROWS, BLOCKS]`` repeated for the four words of each block."""
    ROWS: tl.constexpr = words.shape[0]
    BLOCKS: tl.constexpr = words.shape[1] // 4
    return tl.reshape(tl.broadcast_to(per_block[:, :, None], [ROWS, BLOCKS, 4]), [ROWS, BLOCKS * 4])


@triton.jit
def _decoded(words, byte, mantissa, WIDE: tl.constexpr, WEIGHT: tl.constexpr):
    """Values ``[ROWS, 8 * WORDS]`` (bfloat16) of codes ``[ROWS, WORDS]`` (int32 words), with the scale bytes
    ``[ROWS, WORDS / 4]`` (int32) of their blocks, and with `BLOCK_MANTISSAS` as many mantissas, in `MANTISSA_FIELDS`.

    Of up to 16 rows of the other operand, columns are in the order of [`_interleave`], so that nothing is moved; of
    more, as in the weight. With ``WIDE`` every scale byte is right; otherwise those up to `NARROW_BYTE` are, at half
    the multiplies.
    """
    narrow = tl.minimum(byte, NARROW_BYTE) if WIDE else byte
    factor = (narrow + 126) * (_BOTH << 7)
    if WEIGHT.SEARCH == BLOCK_MANTISSAS:
        factor |= mantissa & MANTISSA_FIELDS
    factor = _for_words(factor, words)
    p0 = _multiply(_code_pairs(words, 0), factor, WEIGHT.CUDA)
    p1 = _multiply(_code_pairs(words, 1), factor, WEIGHT.CUDA)
    p2 = _multiply(_code_pairs(words, 2), factor, WEIGHT.CUDA)
    p3 = _multiply(_code_pairs(words, 3), factor, WEIGHT.CUDA)
    if WIDE:
        second = (tl.maximum(byte, NARROW_BYTE) - NARROW_BYTE + 127) << 7
        second = _for_words(tl.where(byte == 255, _NAN_BITS, second) * _BOTH, words)
        p0 = _multiply(p0, second, WEIGHT.CUDA)
        p1 = _multiply(p1, second, WEIGHT.CUDA)
        p2 = _multiply(p2, second, WEIGHT.CUDA)
        p3 = _multiply(p3, second, WEIGHT.CUDA)
    # Each join adds the innermost axis. Codes 0 to 3 of a word are in low halves, 4 to 7 in high ones.
    if WEIGHT.BM > 16:
        even = tl.join(tl.join(p0, p0 >> 16), tl.join(p2, p2 >> 16))
        odd = tl.join(tl.join(p1, p1 >> 16), tl.join(p3, p3 >> 16))
        bits = tl.join(even, odd)
    else:
        pairs = tl.join(tl.join(p0, p2), tl.join(p1, p3))
        bits = tl.join(pairs, pairs >> 16)
    return _bfloat16_of(tl.reshape(bits, [words.shape[0], words.shape[1] * 8]), WEIGHT.INTERPRETED)


@triton.jit
def _interleave(x):
    """Columns of ``x[ROWS, COLS]`` in the order 0 4 1 5 2 6 3 7 of every eight."""
    ROWS: tl.constexpr = x.shape[0]
    COLS: tl.constexpr = x.shape[1]
    return tl.reshape(tl.permute(tl.reshape(x, [ROWS, COLS // 8, 2, 4]), [0, 1, 3, 2]), [ROWS, COLS])


@triton.jit
def load_inside(pointers, inside, ALL: tl.constexpr):
    """Return what lies at pointers, zero where not ``inside``; ``ALL``: everywhere."""
    if ALL:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=inside, other=0)


@triton.jit
def inverse_of_macro(m8, WEIGHT: tl.constexpr):
    """One over the factors of macro bytes, to ``2**-23``. They are in [1, 2), where no division needs care."""
    factor = macro_factor(m8)
    if WEIGHT.CUDA:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [factor], tl.float32, is_pure=True, pack=1
        )
    else:
        return 1.0 / factor


@triton.jit
def decoded_product(x, words, byte, mantissa, WIDE: tl.constexpr, WEIGHT: tl.constexpr):
    """``weight[BN, BK] x[BM, BK]^T`` of one step, macro factors apart; ``x`` is bfloat16 or its bits."""
    weight = _decoded(words, byte, mantissa, WIDE, WEIGHT)
    x = _bfloat16_of(x, WEIGHT.INTERPRETED)
    if WEIGHT.BM <= 16:
        x = _interleave(x)
    return tl.dot(weight, tl.trans(x))


# ---- sums of a tile that several programs share, each of which contracts a part of the columns ----------------------
# Each stores its own; the last one to arrive adds up all of them, in their order, so that the result does not depend on
# which one that is.


@triton.jit
def _wait_for_stores(lanes, WEIGHT: tl.constexpr):
    """Let each thread wait until its stores are where other programs see them, on AMD: the barrier there waits for
    shared memory alone, and the release of an atomic for the stores of its own wave. ``lanes`` is any int32 tensor."""
    if not WEIGHT.CUDA and not WEIGHT.INTERPRETED:
        tl.inline_asm_elementwise(
            "s_waitcnt vmcnt(0)\nv_mov_b32 $0, $1",
            "=v,v,~{memory}",
            [lanes],
            tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def arrives_last(arrived_ptr, n_splits, lanes, WEIGHT: tl.constexpr):
    """Count this program, whose sums are stored, as arrived; whether all others are. ``lanes`` is any int32 tensor. The
    last program sets the counter, zero before, back to zero."""
    # All threads' sums, before one thread says that they are there.
    _wait_for_stores(lanes, WEIGHT)
    tl.debug_barrier()
    return tl.atomic_add(arrived_ptr, 1, sem="acq_rel") == n_splits - 1


@triton.jit
def sum_of_splits(pointers, inside, size, n_splits):
    """Return sums of all splits, from the first one's tile (float32) on; ``size`` elements lie between splits."""
    total = tl.zeros(pointers.shape, tl.float32)
    for split in range(n_splits):
        # Past the first-level cache, which other multiprocessors do not write to.
        total += tl.load(pointers + split * size, mask=inside, other=0.0, cache_modifier=".cg")
    return total
