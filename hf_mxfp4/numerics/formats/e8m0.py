# SPDX-License-Identifier: Apache-2.0
"""The E8M0 block scale: its byte, its value, and the rules that choose it from a block's largest magnitude.

All arithmetic is on the bits of float32 numbers (exponent and mantissa fields): a ``log2`` in a low precision misplaces
magnitudes next to a power of two.
"""

from enum import Enum

import torch


E8M0_BIAS = 127
E8M0_NAN = 255
#: Elements that share one E8M0 scale (OCP MX v1.0, table 1).
BLOCK_SIZE = 32
# The largest grid value at this byte, 4 * 2**126, is the first power of two outside float32.
_LAST_UNRESTRICTED_BYTE = 252


class ScaleRule(str, Enum):
    """How the exponent of a block scale follows from the block's largest magnitude ``a = m * 2**E``, m in [1, 2)."""

    #: ``E - 2 + [m > 1.5]`` = ceil(log2(a / 6)). Never clips. The ceiling rule of arXiv 2605.20402; torchao's RCEIL.
    RCEIL = "rceil"
    #: ``E - 2``. Clips magnitudes above 6 scales. OCP MX v1.0, section 6.3; torchao's FLOOR.
    FLOOR = "floor"
    #: ``E - 2 + [m >= 1.75]``. Clips a little. Quark's, compressed-tensors' and torchao's EVEN; the "OAS" rule of
    #: arXiv 2603.08713 but for one tie.
    EVEN = "even"
    #: The one of ``{E - 2, E - 1, E - 3}`` with the least squared error over the block; the earlier one wins a tie.
    MSE = "mse"

    @property
    def clips(self) -> bool:
        """Whether a block's largest magnitude can exceed 6 scales and saturate."""
        return self is not ScaleRule.RCEIL


#: Added to the float32 bits of the block maximum so that the exponent field rounds up where the rule says.
CARRY = {ScaleRule.RCEIL: 0x3FFFFF, ScaleRule.FLOOR: 0, ScaleRule.EVEN: 0x200000, ScaleRule.MSE: 0}


def scale_from_amax(amax: torch.Tensor, rule: ScaleRule) -> torch.Tensor:
    """Scale bytes (int32, 0..255) of block maxima (non-negative float32). For [`ScaleRule.MSE`] the first candidate.

    A maximum of zero gives byte 0, a NaN or infinite one 255; exponents outside the range saturate at 0 and 254.
    """
    # Reductions may give a NaN with its sign bit set.
    bits = amax.view(torch.int32) & 0x7FFFFFFF
    byte = (((bits + CARRY[rule]) >> 23) - 2).clamp_(0, 254)
    return byte.masked_fill_(bits >= 0x7F800000, E8M0_NAN)


def decode_e8m0(byte: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values ``2**(byte - 127)`` of scale bytes (any integer dtype); byte 255 is NaN, byte 0 a float32 subnormal."""
    byte = byte.to(torch.int32)
    # Byte 0 has no normal float32; byte 255 would read as infinity.
    bits = (byte << 23).masked_fill_(byte == 0, 0x00400000).masked_fill_(byte == E8M0_NAN, 0x7FC00000)
    return bits.view(torch.float32).to(dtype)


def inverse_scale(byte: torch.Tensor) -> torch.Tensor:
    """Float32 ``2**(127 - byte)`` of scale bytes (int32, 0..254); 0 for byte 255, whose elements mean nothing."""
    bits = ((254 - byte) << 23).masked_fill_(byte == 254, 0x00400000).masked_fill_(byte == E8M0_NAN, 0)
    return bits.view(torch.float32)


def largest_finite_magnitude(byte: torch.Tensor) -> torch.Tensor | None:
    """Per block, the largest E2M1 magnitude whose product with the scale is finite in float32, or `None` when that is
    6 everywhere. Only blocks whose maximum is 2**127 or more are restricted."""
    restricted = (byte > _LAST_UNRESTRICTED_BYTE) & (byte != E8M0_NAN)
    if byte.device.type == "cpu" and not restricted.any():
        return None
    limit = torch.full(byte.shape, 6.0, dtype=torch.float32, device=byte.device)
    limit = limit.masked_fill_(byte == 253, 3.0)
    return limit.masked_fill_(byte == 254, 1.5)
