# SPDX-License-Identifier: Apache-2.0
"""Operands of the forward product as every layer of trainable weights makes them."""

import torch

from ..backends import fake_quantize
from ..backends.functional import quantize
from ..gemm import Draws, pack_rows, quantize_operand, rotate_operand
from ..numerics import FallbackThreshold, GemmScheme, MXFP4Tensor, QuantScheme
from ..numerics import quantize_delayed as pack_delayed
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
    scheme = fprop.left if isinstance(fprop.left, QuantScheme) else None
    if scheme is not None and threshold is None:
        return quantize_operand(x, scheme, "fprop", "x", draws, backend, rotation=fprop.rotation, dtype=dtype)
    return nearest_input(rotate_operand(x, fprop.rotation, "fprop", draws), dtype, scheme, threshold, backend)


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
        return quantize(x, **vars(fprop.left), seed=draws.seed_of("fprop", "x"), backend=backend)
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
    return quantize_operand(weight.detach(), fprop.right, "fprop", "weight", draws, backend, rotation=fprop.rotation)
