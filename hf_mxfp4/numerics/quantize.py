# SPDX-License-Identifier: Apache-2.0
"""Quantize, dequantize and fake-quantize: the one numeric definition that every layer, kernel and file format follows.

Definition, per block of 32 elements along ``axis``, or per tile of 32 rows of them (all steps in float32):

1. with macro blocks, ``z = f * x`` ([`hf_mxfp4.numerics.corrections`]), otherwise ``z = x``; with blockwise mantissas
   ``z = x / g``, ``g = 1 + m / 4``, and the result is multiplied by ``g`` where it says ``/ f``;
2. scale ``s = 2**e`` from the largest ``|z|`` of the block ([`ScaleRule`]); ``q = round(z / s)`` on the E2M1 grid;
3. with outlier fallback, the residual ``z - s * q`` is quantized in the same way to ``s2 * q2``
   (arXiv 2605.20402, "outlier fallback");
4. the result is ``(s * q + alpha * s2 * q2) / f``.

Searches (the ``mse`` rule, dynamic macro factors) compare squared errors as integers: each error is divided by the
power of two below the block's (macro block's) largest magnitude, squared, cut to a multiple of 2**-23, and these are
added up. The sum then does not depend on its order, so all backends and processors choose alike.

Edge policy. An axis that is not a multiple of 32 (with tiles, two axes) is padded with zeros that no result shows. An
all-zero block has scale byte 0 and codes 0. A block that holds NaN or infinity has scale byte 255 and codes 0, and
dequantizes to NaN as a whole. Scale exponents saturate at bytes 0 and 254. A finite input never becomes infinite: where
the nearest grid value would not be finite in float32 (magnitudes above 3.5 * 2**126), or in the output dtype, it is the
largest finite one. The sign of a zero is not kept.
"""

from typing import Any

import torch

from .blocks import Blocks
from .packed import MXFP4Tensor
from .rng import check_seed
from .schemes import QuantScheme


def fake_quantize(
    x: torch.Tensor,
    *,
    axis: int = -1,
    seed: int | None = None,
    **options: Any,
) -> torch.Tensor:
    """Return the MXFP4 values of ``x``, in its own shape and dtype. No gradient flows; layers add the straight-through
    one.

    Args:
        x: floating-point tensor with at least one axis; computed on as float32 (larger float64 values as its largest).
        axis: the axis that blocks run along, normally the contraction axis of a matrix product.
        seed: of counted random numbers for stochastic rounding, the same on every device ([`hf_mxfp4.numerics.rng`]);
            by default those of PyTorch's own generator.
        options: the fields of a [`QuantScheme`].

    Raises:
        TypeError: ``x`` is not a floating-point tensor, or an option does not exist.
        ValueError: an argument is outside its supported set or has no effect, ``x`` has no axes, or one where
            ``block_rows`` needs two.
    """
    return apply_scheme(x, QuantScheme(**options), axis=axis, seed=seed)


def apply_scheme(
    x: torch.Tensor,
    scheme: QuantScheme,
    *,
    axis: int = -1,
    seed: int | None = None,
) -> torch.Tensor:
    """[`fake_quantize`] with its options given as a [`QuantScheme`]."""
    check_seed(scheme.rounding, seed)
    axis = check_input(x, axis, scheme.block_rows)
    with torch.no_grad():
        blocks = Blocks(x, scheme, axis)
        return blocks.dequantized(*blocks.quantize(seed), x.dtype)


def quantize(
    x: torch.Tensor,
    *,
    axis: int = -1,
    seed: int | None = None,
    **options: Any,
) -> MXFP4Tensor:
    """Return codes and scales of ``x``: ``quantize(x, ...).dequantize()`` equals ``fake_quantize(x, ...)`` bit for bit.

    Arguments and errors as in [`fake_quantize`].
    """
    scheme = QuantScheme(**options)
    check_seed(scheme.rounding, seed)
    axis = check_input(x, axis, scheme.block_rows)
    with torch.no_grad():
        blocks = Blocks(x, scheme, axis)
        first, residual = blocks.quantize(seed)
        codes, scale = blocks.packed(first)
        residual_codes, residual_scale = (None, None) if residual is None else blocks.packed(residual)
        return MXFP4Tensor(
            codes=codes,
            scale=scale,
            macro=None if blocks.m8 is None else blocks.bytes_per_row(blocks.m8),
            residual_codes=residual_codes,
            residual_scale=residual_scale,
            length=x.shape[axis],
            axis=axis,
            scheme=scheme,
            dtype=x.dtype,
        )


def check_input(x: torch.Tensor, axis: int, block_rows: int = 1) -> int:
    """Return the axis as a non-negative number. Raises `TypeError` or `ValueError` for what it cannot quantize."""
    if not isinstance(x, torch.Tensor) or not x.is_floating_point():
        kind = x.dtype if isinstance(x, torch.Tensor) else type(x).__name__
        raise TypeError(f"MXFP4 quantization needs a floating-point tensor, got {kind}")
    if x.dim() == 0:
        raise ValueError("MXFP4 quantization needs at least one axis, got a scalar tensor")
    if not -x.dim() <= axis < x.dim():
        raise ValueError(f"axis={axis} is out of range for a tensor with {x.dim()} axes")
    if block_rows > 1 and x.dim() < 2:
        raise ValueError(f"blocks of {block_rows} rows need a tensor with at least two axes, got {x.dim()}")
    return axis % x.dim()
