# SPDX-License-Identifier: Apache-2.0
"""Operands of the forward product as every layer of trainable weights makes them."""

import torch

from ..numerics import FallbackThreshold, GemmScheme, MXFP4Tensor, QuantScheme
from ..numerics import quantize as quantize_eagerly
from ..numerics import quantize_delayed as pack_delayed
from ..ops import Draws, fake_quantize, pack_rows, quantize_operand, rotate_operand
from .fallback import quantize_delayed


def input_operand(
    x: torch.Tensor,
    dtype: torch.dtype,
    fprop: GemmScheme,
    draws: Draws,
    threshold: FallbackThreshold | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """``Q(x)`` along the last axis in ``dtype``, of the rotated and padded input where ``fprop`` rotates."""
    x = rotate_operand(x, fprop.rotation, "fprop", draws)
    scheme = fprop.left if isinstance(fprop.left, QuantScheme) else None
    if scheme is not None and scheme.rounding == "stochastic":
        return quantize_operand(x, scheme, "fprop", "x", draws).to(dtype)
    return nearest_input(x, dtype, scheme, threshold, backend)


def packed_operand(
    x: torch.Tensor,
    fprop: GemmScheme,
    draws: Draws,
    threshold: FallbackThreshold | None = None,
    backend: str = "auto",
) -> MXFP4Tensor:
    """[`input_operand`] as codes and scale bytes. Only under a scheme that quantizes activations."""
    x = rotate_operand(x.detach(), fprop.rotation, "fprop", draws)
    if threshold is not None:
        return pack_delayed(x, fprop.left, threshold)
    if fprop.left.rounding == "stochastic":
        return quantize_eagerly(x, **vars(fprop.left), generator=draws.generator("fprop", "x", x.device))
    return pack_rows(x, fprop.left, backend)


def nearest_input(
    x: torch.Tensor,
    dtype: torch.dtype,
    scheme: QuantScheme | None,
    threshold: FallbackThreshold | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """``Q(x)`` along the last axis in ``dtype``, rounded to nearest; ``x`` itself without a scheme. With a threshold,
    blocks above it get outlier fallback."""
    if scheme is None:
        return x.to(dtype)
    if threshold is not None:
        return quantize_delayed(x, scheme, threshold, backend).to(dtype)
    return fake_quantize(x, scheme, backend).to(dtype)


@torch.no_grad()
def weight_operand(weight: torch.Tensor, fprop: GemmScheme, draws: Draws, backend: str = "auto") -> torch.Tensor:
    """``Q(W)`` along the last axis, of the rotated and padded weight where ``fprop`` rotates."""
    rotated = rotate_operand(weight.detach(), fprop.rotation, "fprop", draws)
    if not isinstance(fprop.right, QuantScheme) or fprop.right.rounding != "nearest":
        return quantize_operand(rotated, fprop.right, "fprop", "weight", draws)
    return fake_quantize(rotated, fprop.right, backend)
