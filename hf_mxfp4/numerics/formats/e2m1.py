# SPDX-License-Identifier: Apache-2.0
"""The E2M1 element format: rounding onto its grid, 4-bit codes, and two codes per byte.

OCP Microscaling Formats (MX) v1.0, section 5.3.3: 1 sign, 2 exponent and 1 mantissa bit, bias 1, one subnormal
magnitude (0.5), no infinity and no NaN. A code is ``sign << 3 | exponent << 1 | mantissa``.
"""

import torch


#: The eight magnitudes, indexed by the three low bits of a code.
E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_MAX = 6.0

_SIGN_BIT = 8
# 1.5 * 2**23 pushes the units digit of a float32 into the last mantissa bit: adding and subtracting it rounds to an
# integer, ties to even.
_ROUND_MAGIC = 1.5 * 2.0**23
_EXPONENT_FIELD = 0x7F800000
_ONE_BITS = 0x3F800000


def round_nearest(y: torch.Tensor) -> torch.Tensor:
    """Round float32 values onto the E2M1 grid, to nearest, ties to the even code. Values beyond 6 saturate.

    ``y`` is consumed: its storage holds the result.
    """
    y = y.clamp_(-E2M1_MAX, E2M1_MAX)
    # 2**max(floor(log2|y|), 0), the start of the binade of y, is twice the grid step there.
    binade = (y.view(torch.int32) & _EXPONENT_FIELD).clamp_(min=_ONE_BITS).view(torch.float32)
    anchor = binade.mul_(0.5 * _ROUND_MAGIC)
    return y.add_(anchor).sub_(anchor)


def round_stochastic(y: torch.Tensor, noise: torch.Generator | torch.Tensor | None = None) -> torch.Tensor:
    """Round float32 values to one of the two neighbouring grid points, each with the probability that makes the
    expectation equal to ``y`` (for ``|y| <= 6``; beyond, values saturate). ``y`` is consumed. A zero result is +0.

    ``noise`` is uniform in [0, 1), float32 in the shape of ``y``, or the generator to draw it from.
    """
    y = y.clamp_(-E2M1_MAX, E2M1_MAX)
    binade = (y.view(torch.int32) & _EXPONENT_FIELD).clamp_(min=_ONE_BITS).view(torch.float32)
    step = binade.mul_(0.5)
    if not isinstance(noise, torch.Tensor):
        noise = torch.rand(y.shape, dtype=torch.float32, device=y.device, generator=noise)
    position = y.abs().div_(step)
    below = position.floor()
    share = position.sub_(below)
    # floor(position + noise) would do, were it not for the rounding of the sum at the largest draws.
    magnitude = below.add_(noise >= 1.0 - share).mul_(step)
    # Codes have one zero only.
    return torch.copysign(magnitude, y).add_(0.0)


def encode_e2m1(values: torch.Tensor) -> torch.Tensor:
    """Codes (uint8, 0..15) of float32 values that lie on the grid; see [`round_nearest`] for values that do not.

    Zeros of either sign become code 0.
    """
    bits = values.view(torch.int32)
    # Exponent and first mantissa bit; 0.5 is 252, 1 is 254, 6 is 259.
    top = (bits >> 22) & 0x1FF
    magnitude = (top - 252).clamp_(min=0) + (top == 252)
    sign = (bits < 0) & (magnitude > 0)
    return (magnitude + sign * _SIGN_BIT).to(torch.uint8)


def decode_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """Float32 values of 4-bit codes (any integer dtype, 0..15). Code 8 is -0.0."""
    # Computed on the device: a table copied there makes the host wait, which CUDA graphs refuse. Steps double at codes
    # 4 and 6.
    code = torch.arange(_SIGN_BIT, dtype=torch.float32, device=codes.device)
    magnitudes = (code + (code - 4).clamp_(min=0) + (code - 6).clamp_(min=0).mul_(2)).mul_(0.5)
    return torch.cat((magnitudes, -magnitudes))[codes.long()]


def pack_codes(codes: torch.Tensor) -> torch.Tensor:
    """Two codes per byte along the last axis, even index in the low nibble: uint8 ``[..., K]`` to ``[..., ceil(K/2)]``.
    The last high nibble is 0 when ``K`` is odd."""
    if codes.shape[-1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_codes(packed: torch.Tensor, length: int) -> torch.Tensor:
    """The first ``length`` codes of packed bytes: uint8 ``[..., ceil(length/2)]`` to ``[..., length]``."""
    if packed.shape[-1] != (length + 1) // 2:
        raise ValueError(
            f"{packed.shape[-1]} packed bytes cannot hold {length} 4-bit codes; expected {(length + 1) // 2} bytes"
        )
    codes = torch.stack((packed & 0xF, packed >> 4), dim=-1)
    return codes.flatten(-2)[..., :length]
