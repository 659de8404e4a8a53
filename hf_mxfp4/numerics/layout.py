# SPDX-License-Identifier: Apache-2.0
"""Rows of elements to blocks and back: blocks of 32 columns, or tiles of 32 rows by 32 columns."""

import torch

from .e8m0 import BLOCK_SIZE


def to_blocks(rows: torch.Tensor, unit: int, block_rows: int) -> torch.Tensor:
    """Blocks ``[..., K/32, 32]`` of rows ``[..., K]``, or tiles ``[..., N/32, K/32, 1024]`` of ``[..., N, K]``.

    Pads with zeros: columns to a multiple of ``unit`` (itself one of 32), rows to one of ``block_rows``. Shares memory
    with ``rows`` where it can.
    """
    padding = -rows.shape[-1] % unit
    if block_rows > 1:
        row_padding = -rows.shape[-2] % block_rows
        if padding or row_padding:
            rows = torch.nn.functional.pad(rows, (0, padding, 0, row_padding))
        *lead, n, k = rows.shape
        tiles = rows.reshape(*lead, n // block_rows, block_rows, k // BLOCK_SIZE, BLOCK_SIZE).transpose(-3, -2)
        return tiles.reshape(*lead, n // block_rows, k // BLOCK_SIZE, block_rows * BLOCK_SIZE)
    if padding:
        rows = torch.nn.functional.pad(rows, (0, padding))
    rows = rows.contiguous()
    return rows.view(*rows.shape[:-1], rows.shape[-1] // BLOCK_SIZE, BLOCK_SIZE)


def from_blocks(blocks: torch.Tensor, shape: torch.Size, block_rows: int) -> torch.Tensor:
    """Rows of the given shape ``[..., K]`` out of what [`to_blocks`] made of them, without the padding."""
    if block_rows == 1:
        return blocks.flatten(-2)[..., : shape[-1]]
    *lead, n, k, _ = blocks.shape
    tiles = blocks.reshape(*lead, n, k, block_rows, BLOCK_SIZE).transpose(-3, -2)
    return tiles.reshape(*lead, n * block_rows, k * BLOCK_SIZE)[..., : shape[-2], : shape[-1]]


def per_row(of_blocks: torch.Tensor, shape: torch.Size, block_rows: int) -> torch.Tensor:
    """What belongs to blocks, ``[..., N / block_rows, n]``, for each of the rows of ``shape``: ``[..., N, n]``."""
    if block_rows == 1:
        return of_blocks
    return of_blocks.repeat_interleave(block_rows, dim=-2)[..., : shape[-2], :]
