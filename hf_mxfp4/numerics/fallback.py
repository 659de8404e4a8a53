# SPDX-License-Identifier: Apache-2.0
"""Squared errors of blocks, and selective outlier fallback: which blocks get the residual pass.

In each row along the quantized axis, the blocks with the largest squared errors of their first pass are selected. With
32x32 tiles, a row is a row of tiles. The selection depends on that row alone, not on other rows, earlier tensors or the
batch. arXiv 2503.08040 selects by a threshold that follows a target rate instead, so that outputs depend on earlier
inputs.
"""

import math
from fractions import Fraction

import torch


#: Squared errors are cut to multiples of ``1 / SQUARE_UNITS``.
SQUARE_UNITS = 2.0**23
#: Errors of a block that are not zero are at least and at most this.
SMALLEST_ERROR = torch.finfo(torch.float32).tiny
LARGEST_ERROR = torch.finfo(torch.float32).max


def sum_of_squares(error: torch.Tensor) -> torch.Tensor:
    """Sums over the last axis of ``error**2``, in units of 2**-23, as int64: no sum depends on its order, so that all
    backends compare alike.

    Each square is cut to an int32 first: ``error`` is below 16 in magnitude (scaled by [`inverse_power_of_two`], below
    4) and is consumed.
    """
    return error.square_().mul_(SQUARE_UNITS).to(torch.int32).sum(dim=-1)


def inverse_power_of_two(amax: torch.Tensor) -> torch.Tensor:
    """``2**-floor(log2 amax)``, to bring errors into a range whose squares neither overflow nor vanish. Its exponent is
    cut to -126..127."""
    exponent = (amax.view(torch.int32) >> 23) & 0xFF
    return ((254 - exponent).clamp_(1, 254) << 23).view(torch.float32)


def block_errors(
    residual: torch.Tensor, amax: torch.Tensor, divisor: torch.Tensor | None, multiplier: torch.Tensor | None
) -> torch.Tensor:
    """Squared error of each block's first pass, in the domain of ``x``: float32 ``[..., blocks]``.

    The same number in whatever order it is added up: with ``2**E`` the power of two below the block's largest magnitude
    it is ``n * 2**-23 * 4**E / f**2``, where ``n`` is the integer sum of the squares of ``residual / 2**E``, each cut
    to a multiple of 2**-23. Zero only if ``n`` is; otherwise it saturates at the smallest normal and at the largest
    finite float32 number, so that blocks outside of about 1e-19..1e19 in magnitude are told apart no longer.

    Args:
        residual: ``z - Q(z)``, ``[..., blocks, elements]``; 0 where the block is NaN.
        amax: largest magnitude of ``z`` per block.
        divisor: the macro factor ``f`` per block by which results are divided, or `None`.
        multiplier: the blockwise factor by which they are multiplied, or `None`.
    """
    unit = inverse_power_of_two(amax)
    count = sum_of_squares(residual * unit.unsqueeze(-1))
    error = count.to(torch.float32).mul_(1.0 / SQUARE_UNITS)
    # The factors have at most nine bits, hence exact squares.
    if divisor is not None:
        error.div_(divisor.square())
    if multiplier is not None:
        error.mul_(multiplier.square())
    # Twice a power of two, since 4**E may leave float32 where the result does not; subnormal ones end as the smallest.
    power = ((254 << 23) - unit.view(torch.int32)).clamp_(min=1 << 23).view(torch.float32)
    error.mul_(power).mul_(power).clamp_(SMALLEST_ERROR, LARGEST_ERROR)
    return error.masked_fill_(count == 0, 0.0)


def blocks_at_rate(rate: float, total: int) -> int:
    """``ceil(rate * total)`` for the decimal number that ``rate`` is written as: 3 for 0.1 of 30, not 4."""
    return math.ceil(Fraction(repr(float(rate))) * total)


def select_blocks(errors: torch.Tensor, rate: float) -> torch.Tensor:
    """Mask of the ``ceil(rate * blocks)`` blocks with the largest errors of each row of ``errors``, ``[..., blocks]``.
    The lowest index wins a tie. Blocks without error are never selected."""
    count = blocks_at_rate(rate, errors.shape[-1])
    chosen = torch.sort(errors, dim=-1, descending=True, stable=True).indices[..., :count]
    return torch.zeros_like(errors, dtype=torch.bool).scatter_(-1, chosen, True).logical_and_(errors > 0)
