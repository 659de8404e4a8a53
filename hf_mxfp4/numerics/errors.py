# SPDX-License-Identifier: Apache-2.0
"""Squared errors of blocks as integers, so that no sum depends on its order and all backends compare alike."""

import torch

from .schemes import QuantScheme


#: Squared errors are cut to multiples of ``1 / SQUARE_UNITS``.
SQUARE_UNITS = 2.0**23


def sum_of_squares(error: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
    """Sums over the last axis, in units of 2**-23, as int64, of ``error**2`` or of ``error**2 * weight``.

    Each square is cut to an int32 first: ``error`` is below 16 in magnitude (scaled by [`inverse_power_of_two`], below
    4) and is consumed; ``weight`` is in [0, 1] and broadcasts.
    """
    square = error.square_()
    if weight is not None:
        square.mul_(weight)
    return square.mul_(SQUARE_UNITS).to(torch.int32).sum(dim=-1)


def inverse_power_of_two(amax: torch.Tensor) -> torch.Tensor:
    """``2**-floor(log2 amax)``, to bring errors into a range whose squares neither overflow nor vanish. Its exponent is
    cut to -126..127."""
    exponent = (amax.view(torch.int32) >> 23) & 0xFF
    return ((254 - exponent).clamp_(1, 254) << 23).view(torch.float32)


def importance_weights(importance: torch.Tensor, length: int, scheme: QuantScheme) -> torch.Tensor:
    """``importance`` (``[length]``) over its maximum, in float32.

    Raises `ValueError` for another shape, negative, non-finite or only zero values, and for a scheme that chooses
    nothing by its error.
    """
    if not scheme.searches:
        raise ValueError(
            f"importance has no effect on {scheme}, which searches nothing: use scale_rule='mse', or macro_block with "
            "macro_search='dynamic' or 'blockwise'"
        )
    if not isinstance(importance, torch.Tensor) or tuple(importance.shape) != (length,):
        shape = tuple(importance.shape) if isinstance(importance, torch.Tensor) else type(importance).__name__
        raise ValueError(
            f"importance must be a tensor of shape ({length},), one weight per element of the axis; {shape}"
        )
    weights = importance.detach().double()
    if length == 0:
        return weights.float()
    if not bool((weights.isfinite() & (weights >= 0)).all()):
        raise ValueError("importance holds negative or non-finite values; it must be finite and at least 0")
    largest = weights.max()
    if not bool(largest > 0):
        raise ValueError("importance is zero everywhere; at least one element must count")
    return (weights / largest).float()
