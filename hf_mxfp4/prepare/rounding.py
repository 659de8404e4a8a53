# SPDX-License-Identifier: Apache-2.0
"""Round one weight column by column, and correct the columns that follow by what each loses (GPTQ, arXiv 2210.17323,
algorithm 1, with the block scales of MXFP4)."""

import dataclasses

import torch

from ..numerics import (
    BLOCK_SIZE,
    QuantScheme,
    Rotation,
    apply_scheme,
    quantize,
    rotate,
    round_nearest,
    unrotate,
)


#: Two E2M1 codes of 1.0.
_ONES = 0x22
#: Columns after which all that follow are corrected, where the scheme has no macro blocks.
_GROUP = 128
#: Share of the mean second moment that is added to all of them, and how often ten times more is tried.
DAMPING = 0.01
_TRIES = 4
#: How much of the nearest values' error may come back when weights are quantized again that are not on the grid
#: themselves: rotated ones, and those with residuals, which have more bits than bfloat16.
_LARGEST_RETURN = 0.25
#: A scale under which every residual is rounded to zero.
_NO_RESIDUAL = 2.0**100


def unsupported_reason(scheme: QuantScheme, rotation: Rotation | None = None) -> str | None:
    """Return why weights under ``scheme`` cannot be rounded so that quantizing them again gives the same values."""
    if rotation is not None and rotation.random:
        return "the signs of a random rotation are others in every run; use a deterministic one"
    if scheme.outlier_fallback not in (None, 1):
        return (
            f"of a residual times {scheme.outlier_fallback:g} another one is left the next time; use outlier fallback 1"
        )
    if scheme.rounding != "nearest":
        return f"{scheme.rounding} rounding does not give the same values twice"
    if scheme.macro_block is not None and not scheme.mantissas:
        return (
            f"the factors of {scheme.macro_search} macro blocks are others once weights are rounded; use "
            "macro_search='block_mantissas' or 'block_mantissas_fp8', or no macro blocks"
        )
    return None


def round_weight(
    weight: torch.Tensor, moments: torch.Tensor, scheme: QuantScheme, rotation: Rotation | None = None
) -> torch.Tensor:
    """Return the values under ``scheme`` that change the layer's outputs little, where
    [`hf_mxfp4.numerics.apply_scheme`] takes those nearest to each weight.

    Args:
        weight: ``[N, K]``; blocks run along ``K``.
        moments: ``x.T @ x`` of the layer's inputs ``[K, K]``, summed over tokens.
        scheme: one without [`unsupported_reason`].
        rotation: of both operands along ``K`` before they are quantized; its size must divide ``K``.

    Returns:
        ``[N, K]`` in the weight's dtype. Quantized again they stay as they are, bit for bit; with residuals, or rotated
        first, nearly so, since their dtype rounds them once.

    Raises:
        ValueError: an unsupported scheme; a weight or moments that are not finite; moments that no damping makes
            invertible; a dtype that cannot hold the values.
    """
    if reason := unsupported_reason(scheme, rotation):
        raise ValueError(f"{scheme}: {reason}")
    if not weight.isfinite().all():
        raise ValueError("the weight is not finite")
    rest = weight.detach().float().clone()
    if rotation is not None:
        if rest.shape[1] % rotation.size:
            raise ValueError(f"a rotation of size {rotation.size} does not divide the {rest.shape[1]} inputs")
        rest = rotate(rest, rotation.size)
        moments = rotate(rotate(moments, rotation.size), rotation.size, axis=0)
    is_exact = rotation is None and scheme.outlier_fallback is None
    allowed = 0.0
    if not is_exact:
        allowed = _LARGEST_RETURN * float((apply_scheme(rest, scheme) - rest).square().sum())
    rounded = _rounded(rest, _inverse_factor(moments), scheme)
    stored = rounded if rotation is None else unrotate(rounded, rotation.size)
    stored = stored.to(weight.dtype)
    again = quantized_again(stored, scheme, rotation, rotated=True)
    stays = float((again - rounded).square().sum()) <= allowed
    if not stays or (is_exact and not torch.equal(stored.float(), rounded)):
        raise ValueError(
            f"{weight.dtype} cannot hold weights rounded under {scheme} so that they stay when they are quantized "
            "again; use bfloat16 or float32, and with a rotation the scale rule 'even'"
        )
    return stored


def quantized_again(
    weight: torch.Tensor, scheme: QuantScheme, rotation: Rotation | None, *, rotated: bool = False
) -> torch.Tensor:
    """Return the quantized values of a weight ``[N, K]``, float32: as it is, or ``rotated`` as in products."""
    if rotation is None:
        return apply_scheme(weight.float(), scheme)
    values = apply_scheme(rotate(weight.float(), rotation.size), scheme)
    return values if rotated else unrotate(values, rotation.size)


def output_error(change: torch.Tensor, moments: torch.Tensor) -> float:
    """Return the sum of squares of what a change of the weights ``[N, K]`` does to the layer's outputs."""
    change = change.to(moments.dtype)
    return float((change @ moments).mul_(change).sum())


def _rounded(rest: torch.Tensor, inverse: torch.Tensor, scheme: QuantScheme) -> torch.Tensor:
    """Return values of the grid ``[N, K]``, float32. ``rest`` is consumed."""
    rounded = torch.empty_like(rest)
    size = int(scheme.macro_block or _GROUP)
    for begin in range(0, rest.shape[1], size):
        end = min(begin + size, rest.shape[1])
        rounded[:, begin:end], lost = _round_group(rest[:, begin:end], inverse[begin:end, begin:end], scheme)
        rest[:, end:].sub_(lost @ inverse[begin:end, end:])
    return rounded


def _round_group(group: torch.Tensor, factor: torch.Tensor, scheme: QuantScheme) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rounded columns ``[N, size]`` of one macro block, and the errors that later columns are corrected by.
    ``group`` is consumed."""
    rounded = torch.empty_like(group)
    lost = torch.empty_like(group)
    for j in range(group.shape[1]):
        if j % BLOCK_SIZE == 0:
            # From what the columns are by now.
            scale, residual_scale = _scales(group[:, j : j + BLOCK_SIZE], scheme)
        column = group[:, j]
        rounded[:, j] = round_nearest(column / scale) * scale
        if residual_scale is not None:
            rounded[:, j] += round_nearest((column - rounded[:, j]) / residual_scale) * residual_scale
        lost[:, j] = (column - rounded[:, j]) / factor[j, j]
        group[:, j + 1 :].sub_(torch.outer(lost[:, j], factor[j, j + 1 :]))
    return rounded, lost


def _scales(block: torch.Tensor, scheme: QuantScheme) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the value of a code of 1.0 in each row of a block, ``[N]``, 1 in rows of zeros; and that of a residual's
    code, so large in rows without one that all residuals are rounded to zero."""
    packed = quantize(block, **dataclasses.asdict(scheme))
    ones = torch.full_like(packed.codes, _ONES)
    first_pass = dataclasses.replace(packed, codes=ones, residual_codes=None, residual_scale=None)
    scale = first_pass.dequantize()[:, 0]
    scale = torch.where(scale > 0, scale, 1.0)
    if packed.residual_codes is None:
        return scale, None
    # A residual's code stands for this much before it is weighted.
    whole = dataclasses.replace(scheme, outlier_fallback=1.0)
    second_pass = dataclasses.replace(packed, codes=torch.zeros_like(ones), residual_codes=ones, scheme=whole)
    residual = second_pass.dequantize()[:, 0]
    has_residual = (packed.residual_codes != 0).any(1) & (residual > 0)
    return scale, torch.where(has_residual, residual, _NO_RESIDUAL)


def _inverse_factor(moments: torch.Tensor) -> torch.Tensor:
    """Return the upper Cholesky factor of the inverse of the damped second moments, float32 ``[K, K]``."""
    if not moments.isfinite().all():
        raise ValueError("the inputs of the layer are not finite on these texts")
    moments = moments.double()
    mean = moments.diagonal().mean()
    for attempt in range(_TRIES):
        # An input that is always zero says nothing; any positive number leaves its weights to themselves.
        added = DAMPING * 10**attempt * (mean if mean > 0 else 1.0)
        lower, failed = torch.linalg.cholesky_ex(moments + added * torch.eye(len(moments)).to(moments))
        if not failed:
            return torch.linalg.cholesky(torch.cholesky_inverse(lower), upper=True).float()
    raise ValueError("the second moments of the layer's inputs cannot be inverted; give more texts")
