# SPDX-License-Identifier: Apache-2.0
"""Scales of NVFP4 operands: from scale bytes and block mantissas to E4M3, in the layout that FP4 tensor cores read.

What it computes: ``2**e * (1 + m/4)`` over a power of two for each row or for the whole matrix, which brings the
largest scale to 256 to 448; each is written twice, since NVFP4 has a scale per 16 elements. Tile: a program writes
tiles of 128 rows and 4 scales, 512 bytes each, padding included.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .common.blocks import NAN_BYTE
from .common.tensors import check_device, on, output_tensor


@triton.jit(do_not_specialize=["n_rows"])
def nvfp4_scales_kernel(
    byte_ptr,
    macro_ptr,
    top_ptr,
    out_ptr,
    factor_ptr,
    misfits_ptr,
    n_rows,
    n_blocks,
    n_macros,
    BY_ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Scale bytes ``[n_rows, n_blocks]`` and bytes of mantissas ``[n_rows, n_macros]``, if any, contiguous, to E4M3
    bytes. ``top_ptr`` points to the largest scale bytes plus one, of rows or of all; ``factor_ptr`` to float32 bits of
    the powers of two, ``misfits_ptr`` to a counter of scales that E4M3 does not have."""
    row = tl.arange(0, 128)[:, None]
    groups = tl.cdiv(n_blocks, BLOCKS)
    row_tile = tl.program_id(0) // groups
    group = tl.program_id(0) % groups
    at_row = row_tile.to(tl.int64) * 128 + row
    block = group * BLOCKS + tl.arange(0, BLOCKS)[None, :]
    inside = (at_row < n_rows) & (block < n_blocks)
    byte = tl.load(byte_ptr + at_row * n_blocks + block, mask=inside, other=0).to(tl.int32)
    top_at = at_row if BY_ROWS else at_row * 0
    top = tl.load(top_ptr + top_at, mask=at_row < n_rows, other=0).to(tl.int32) - 1
    # The bytes of powers of two that are normal float32 numbers, as their reciprocals are.
    base = tl.maximum(top - 8, 1)
    mantissa = tl.zeros_like(byte)
    if macro_ptr is not None:
        packed = tl.load(macro_ptr + at_row * n_macros + block // 4, mask=inside, other=0).to(tl.int32)
        mantissa = (packed >> (2 * (block % 4))) & 3
    exponent = byte - base
    # Below 2**-6 the implicit bit and the mantissa move to the right, out of the field for exponents below -9.
    shift = tl.minimum(tl.maximum(-6 - exponent, 0), 8)
    subnormal = (8 + 2 * mantissa) >> shift
    misfits = inside & (byte != 0) & (byte != NAN_BYTE) & ((subnormal << shift) != 8 + 2 * mantissa)
    code = tl.where(exponent >= -6, ((exponent + 7) << 3) + 2 * mantissa, subnormal)
    # Byte 0 is a block of zeros, or of numbers that are none in the products of GPUs.
    code = tl.where(inside, tl.where(byte == NAN_BYTE, 0x7F, code), 0).to(tl.uint8)
    col_tiles = (n_blocks + 1) // 2
    tile = row_tile.to(tl.int64) * col_tiles + block // 2
    at = out_ptr + tile * 512 + 16 * (row % 32) + 4 * (row // 32) + 2 * (block % 2)
    written = block < 2 * col_tiles
    tl.store(at, code, mask=written)
    tl.store(at + 1, code, mask=written)
    if group == 0:
        tl.store(factor_ptr + top_at, base << 23, mask=at_row < (n_rows if BY_ROWS else 1))
    tl.atomic_add(misfits_ptr, tl.sum(tl.sum(misfits.to(tl.int32), axis=1), axis=0), sem="relaxed")


def nvfp4_scales(
    byte: torch.Tensor,
    macro: torch.Tensor | None = None,
    by_rows: bool = False,
    *,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return scales of blocks of 32 as those of an NVFP4 operand.

    Args:
        byte: uint8 ``[R, blocks]``, E8M0.
        macro: uint8 ``[R, ceil(blocks / 4)]``, block mantissas, or `None`.
        by_rows: with a factor for each row instead of one.
        out: contiguous tensors that the three results are written to, instead of new ones.

    Returns:
        E4M3 scales, flat and swizzled; factors, float32 ``[R, 1]`` or ``[1, 1]``; and the number of scales that are no
        E4M3 numbers, an int32 scalar. These are wrong.

    Raises:
        TypeError: other dtypes.
        ValueError: an empty matrix, not on a GPU, or an ``out`` of another shape, device or layout.
    """
    if any(part is not None and part.dtype != torch.uint8 for part in (byte, macro)):
        raise TypeError("scale bytes and block mantissas must be uint8")
    check_device(byte)
    if byte.dim() != 2 or not byte.numel():
        raise ValueError(f"scale bytes [R, blocks] are needed, got {list(byte.shape)}")
    n_rows, n_blocks = byte.shape
    top = byte + 1  # of a byte for NaN, 255, that is 0
    if by_rows:
        n_factors = n_rows
        top = top.amax(dim=1)
    else:
        n_factors = 1
        top = top.amax()
    n_macros = 0
    if macro is not None:
        macro = macro.contiguous()
        n_macros = macro.shape[1]
    scale = factor = misfits = None
    if out is not None:
        scale, factor, misfits = out
    row_tiles = triton.cdiv(n_rows, 128)
    n_bytes = row_tiles * triton.cdiv(n_blocks, 2) * 512
    scale = output_tensor(scale, (n_bytes,), torch.float8_e4m3fn, byte.device, "scale of out")
    factor = output_tensor(factor, (n_factors, 1), torch.float32, byte.device, "factor of out")
    misfits = output_tensor(misfits, (), torch.int32, byte.device, "misfits of out").zero_()
    with on(byte.device):
        nvfp4_scales_kernel[(row_tiles * triton.cdiv(n_blocks, 16),)](
            byte.contiguous(),
            macro,
            top,
            scale.view(torch.uint8),
            factor.view(torch.int32),
            misfits,
            n_rows,
            n_blocks,
            n_macros,
            BY_ROWS=by_rows,
            BLOCKS=16,
        )
    return scale, factor, misfits
