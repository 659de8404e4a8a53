# SPDX-License-Identifier: Apache-2.0
"""Random numbers of stochastic rounding: Philox4x32-10, counted by element. Tiles are as in `common/blocks.py`.

A number is a function of a 64-bit seed, of the element's place ``(row, column)`` in its tensor, and of which of its
roundings (``draw``) it is for: word ``column % 4`` of the block whose counter is ``(n mod 2**32, n >> 32, draw, 0)``,
``n = row * ceil(columns / 4) + column // 4``. Its upper 24 bits are the number, in units of ``2**-24``. That is the
definition of ``hf_mxfp4.numerics.rng``, and depends neither on the tile nor on the device.
"""

import triton
import triton.language as tl


_ROUNDS = tl.constexpr(10)
_MULTIPLIER_A = tl.constexpr(0xD2511F53)
_MULTIPLIER_B = tl.constexpr(0xCD9E8D57)
_KEY_STEP_A = tl.constexpr(0x9E3779B9)
_KEY_STEP_B = tl.constexpr(0xBB67AE85)
_UNIT = tl.constexpr(2.0**-24)


@triton.jit
def _philox(c0, c1, c2, c3, k0, k1):
    """Four words (uint32) for each counter ``c3 c2 c1 c0`` under the key ``k1 k0``, all uint32."""
    for _ in tl.static_range(_ROUNDS):
        first, second = c0, c2
        c0 = tl.umulhi(tl.full(second.shape, _MULTIPLIER_B, tl.uint32), second) ^ c1 ^ k0
        c2 = tl.umulhi(tl.full(first.shape, _MULTIPLIER_A, tl.uint32), first) ^ c3 ^ k1
        c1 = tl.mul(second, tl.full(second.shape, _MULTIPLIER_B, tl.uint32), sanitize_overflow=False)
        c3 = tl.mul(first, tl.full(first.shape, _MULTIPLIER_A, tl.uint32), sanitize_overflow=False)
        k0 = tl.add(k0, tl.full([], _KEY_STEP_A, tl.uint32), sanitize_overflow=False)
        k1 = tl.add(k1, tl.full([], _KEY_STEP_B, tl.uint32), sanitize_overflow=False)
    return c0, c1, c2, c3


@triton.jit
def uniform(tile, at, random, DRAW: tl.constexpr):
    """Float32 numbers in [0, 1) of the shape of ``tile``, for the place ``at`` in its matrix; the first column is a
    multiple of 4."""
    MACROS: tl.constexpr = tile.shape[1]
    BLOCKS: tl.constexpr = tile.shape[2]
    macros = tl.arange(0, MACROS)[None, :, None, None]
    parts = tl.arange(0, BLOCKS)[None, None, :, None]
    quads = (macros * BLOCKS + parts) * 8 + tl.arange(0, 8)[None, None, None, :]
    counter = (at.rows + random.first_row) * ((at.n_cols + 3) // 4) + (at.col_start // 4 + quads)
    counter = tl.broadcast_to(counter, [tile.shape[0], MACROS, BLOCKS, 8]).to(tl.int64)
    c0 = (counter & 0xFFFFFFFF).to(tl.uint32)
    c1 = (counter >> 32).to(tl.uint32)
    c2 = tl.full(c0.shape, DRAW, tl.uint32)
    c3 = tl.full(c0.shape, 0, tl.uint32)
    k0, k1 = random.seed_low.to(tl.uint32, bitcast=True), random.seed_high.to(tl.uint32, bitcast=True)
    w0, w1, w2, w3 = _philox(c0, c1, c2, c3, k0, k1)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    words = tl.reshape(words, [tile.shape[0], MACROS, BLOCKS, 32])
    return (words >> 8).to(tl.int32).to(tl.float32) * _UNIT
