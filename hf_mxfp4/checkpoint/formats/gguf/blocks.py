# SPDX-License-Identifier: Apache-2.0
"""GGML's `block_mxfp4`: 17 bytes for 32 elements, a scale byte and the codes, with no arithmetic either way.

The order of codes is its own: byte ``j`` has element ``j`` in the low nibble and ``j + 16`` in the high one, where
ours has ``2j`` and ``2j + 1``. Codes and scale bytes mean what they do here: GGML reads the codes as integers (0, 1, 2,
3, 4, 6, 8, 12), twice the E2M1 values, and halves the scale. Byte 255, NaN here, is 2^128 there.
"""

import torch

from ....numerics import BLOCK_SIZE


HALF = BLOCK_SIZE // 2
#: Bytes of a block: scale and codes.
BLOCK_BYTES = 1 + HALF


def row_bytes(columns: int) -> int:
    """Bytes of a row of ``columns`` elements, a multiple of 32."""
    return columns // BLOCK_SIZE * BLOCK_BYTES


def to_blocks(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Codes uint8 ``[N, K/2]`` and scale bytes ``[N, K/32]`` as rows of blocks, uint8 ``[N, K/32 * 17]``."""
    first, second = codes.unflatten(-1, (-1, 2, HALF // 2)).unbind(-2)
    even, odd = first & 15 | second << 4, first >> 4 | second & 0xF0
    return torch.cat([scale[..., None], torch.stack([even, odd], dim=-1).flatten(-2)], dim=-1).flatten(-2)


def from_blocks(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The way back: codes ``[N, K/2]`` and scale bytes ``[N, K/32]``."""
    split = blocks.unflatten(-1, (-1, BLOCK_BYTES))
    even, odd = split[..., 1::2], split[..., 2::2]
    codes = torch.cat([even & 15 | odd << 4, even >> 4 | odd & 0xF0], dim=-1)
    return codes.flatten(-2), split[..., 0].contiguous()
