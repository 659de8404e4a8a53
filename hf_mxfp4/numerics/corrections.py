# SPDX-License-Identifier: Apache-2.0
"""Corrections of block scales: macro factors and block mantissas.

Macro-block scaling (MBS): one factor ``f = 1 + m8 / 256`` per macro block, applied before and undone after the ordinary
quantization (arXiv 2603.08713; used for RL in arXiv 2605.20402). The factor and both of its uses stay in float32:
bfloat16 has one mantissa bit too few to hold it.

Block mantissas spend the same byte otherwise: two bits for the scale of each of the four blocks, so that a scale is
``2**e * (1 + m / 4)`` with the ``m`` of least squared error. Products of the grid with these scales are exact in
bfloat16. Without ``m = 3`` they have three fraction bits, as E4M3 numbers do: 1 or 1.5 times 1, 1.25 or 1.5.
"""

import torch


#: Factors tried by the dynamic search: ``1 + j / 16``.
DYNAMIC_CANDIDATES = 16
#: Blocks whose mantissas share a byte.
BLOCKS_PER_BYTE = 4
#: Squared errors are cut to multiples of ``1 / SQUARE_UNITS``.
SQUARE_UNITS = 2.0**23
# Twice such a maximum, which a factor can come close to, is infinite in float32.
_TOO_LARGE_TO_SCALE = 2.0**127


# ---- macro factors --------------------------------------------------------------------------------------------------


def static_macro(amax: torch.Tensor) -> torch.Tensor:
    """Return the static macro bytes ``m8`` (int32, 0..255) of macro blocks whose largest magnitudes are ``amax``: the
    top eight mantissa bits of ``6 / amax``, truncated, never rounded up.

    ``f * amax`` then sits just below ``6 * 2**k``, the top of the grid (for 7 of the 2**23 mantissas one unit in the
    last place above, where the division rounds up; none of them is a bfloat16). Zero, non-finite and the largest maxima
    (2**127 and more, where ``f * amax`` would leave float32) get 0, that is ``f = 1``.
    """
    # Not `6.0 / amax`, which torch computes as a product with the rounded reciprocal.
    quotient = torch.full_like(amax, 6.0).div_(amax)
    m8 = (quotient.view(torch.int32) >> 15) & 0xFF
    # Not `>=`, which is false for NaN.
    unusable = ~(amax < _TOO_LARGE_TO_SCALE)
    return m8.masked_fill_(unusable, 0)


def dynamic_candidates(amax: torch.Tensor) -> torch.Tensor:
    """Return the macro bytes (int32 ``[16, ...]``) that the dynamic search tries for every macro block, from the
    smallest factor on; 0 where [`static_macro`] is too."""
    m8 = torch.arange(0, 256, 256 // DYNAMIC_CANDIDATES, dtype=torch.int32, device=amax.device)
    candidates = m8.view(-1, *[1] * amax.dim())
    return torch.where(amax < _TOO_LARGE_TO_SCALE, candidates, 0)


def macro_factor(m8: torch.Tensor) -> torch.Tensor:
    """Return the float32 factors ``1 + m8 / 256`` of macro bytes (any integer dtype, 0..255); exact."""
    return m8.to(torch.float32).mul_(1.0 / 256.0).add_(1.0)


# ---- block mantissas ------------------------------------------------------------------------------------------------


def mantissa_factor(mantissa: torch.Tensor) -> torch.Tensor:
    """Return the float32 scale factors ``1 + m / 4`` of two-bit block mantissas (any integer dtype, 0..3); exact."""
    return mantissa.to(torch.float32).mul_(0.25).add_(1.0)


def pack_mantissas(mantissa: torch.Tensor) -> torch.Tensor:
    """Return the bytes ``[..., blocks / 4]`` (int32) that hold block mantissas ``[..., blocks]``; block j of four has
    bits 2j and 2j+1."""
    n_bytes = mantissa.shape[-1] // BLOCKS_PER_BYTE
    fields = mantissa.view(*mantissa.shape[:-1], n_bytes, BLOCKS_PER_BYTE)
    shifts = torch.arange(0, 2 * BLOCKS_PER_BYTE, 2, dtype=torch.int32, device=mantissa.device)
    return (fields << shifts).sum(dim=-1, dtype=torch.int32)


def unpack_mantissas(packed: torch.Tensor) -> torch.Tensor:
    """Return the block mantissas ``[..., 4 * bytes]`` in bytes of [`pack_mantissas`] (any integer dtype)."""
    shifts = torch.arange(0, 2 * BLOCKS_PER_BYTE, 2, dtype=torch.int32, device=packed.device)
    fields = (packed.to(torch.int32).unsqueeze(-1) >> shifts) & 3
    return fields.flatten(-2)


# ---- squared errors, by which both searches choose ------------------------------------------------------------------


def sum_of_squares(error: torch.Tensor) -> torch.Tensor:
    """Return sums over the last axis of ``error**2``, in units of 2**-23, as int64: no sum depends on its order, so
    that all backends compare alike.

    Each square is cut to an int32 first: ``error`` is below 16 in magnitude (scaled by [`inverse_power_of_two`], below
    4) and is consumed.
    """
    units = error.square_().mul_(SQUARE_UNITS).to(torch.int32)
    return units.sum(dim=-1)


def inverse_power_of_two(amax: torch.Tensor) -> torch.Tensor:
    """Return ``2**-floor(log2 amax)``, cut to exponents -126..127, so that squares of errors neither overflow nor
    vanish."""
    exponent = (amax.view(torch.int32) >> 23) & 0xFF
    return ((254 - exponent).clamp_(1, 254) << 23).view(torch.float32)
