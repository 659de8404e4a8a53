# SPDX-License-Identifier: Apache-2.0
"""The number formats: E2M1 elements, E8M0 block scales, and E4M3 with a power-of-two scale per row or block.

E2M1 (OCP Microscaling Formats (MX) v1.0, section 5.3.3): 1 sign, 2 exponent and 1 mantissa bit, bias 1, one subnormal
magnitude (0.5), no infinity and no NaN. A code is ``sign << 3 | exponent << 1 | mantissa``.

E8M0: a byte of a block scale, chosen from the block's largest magnitude by arithmetic on the bits of float32 numbers: a
``log2`` in a low precision misplaces magnitudes next to a power of two.

E4M3: the format of inputs and output gradients beside MXFP4 operands, and of inputs that are saved for the backward
pass. MXFP8 is E4M3 with an E8M0 scale for each block of 32 (MX v1.0, table 1).
"""

from collections.abc import Callable

import torch

from mxfp4_kernels.scale_rules import ScaleRule


# ---- E2M1 -----------------------------------------------------------------------------------------------------------


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
    anchor = _grid_step(y).mul_(_ROUND_MAGIC)
    return y.add_(anchor).sub_(anchor)


def round_stochastic(y: torch.Tensor, noise: torch.Generator | torch.Tensor | None = None) -> torch.Tensor:
    """Round float32 values to one of the two neighbouring grid points, each with the probability that makes the
    expectation equal to ``y`` (for ``|y| <= 6``; beyond, values saturate). ``y`` is consumed. A zero result is +0.

    ``noise`` is uniform in [0, 1), float32 in the shape of ``y``, or the generator to draw it from.
    """
    y = y.clamp_(-E2M1_MAX, E2M1_MAX)
    step = _grid_step(y)
    if not isinstance(noise, torch.Tensor):
        noise = torch.rand(y.shape, dtype=torch.float32, device=y.device, generator=noise)
    position = y.abs().div_(step)
    below = position.floor()
    share = position.sub_(below)
    # floor(position + noise) would do, were it not for the rounding of the sum at the largest draws.
    magnitude = below.add_(noise >= 1.0 - share).mul_(step)
    # Codes have one zero only.
    return torch.copysign(magnitude, y).add_(0.0)


def _grid_step(y: torch.Tensor) -> torch.Tensor:
    """Return the distance between neighbours on the grid around ``y``: half of its power of two, at least 0.5."""
    bits = (y.view(torch.int32) & _EXPONENT_FIELD).clamp_(min=_ONE_BITS)
    return bits.view(torch.float32).mul_(0.5)


def encode_e2m1(values: torch.Tensor) -> torch.Tensor:
    """Return the codes (uint8, 0..15) of float32 values that lie on the grid; see [`round_nearest`] for values
    that do not.

    Zeros of either sign become code 0.
    """
    bits = values.view(torch.int32)
    # Exponent and first mantissa bit; 0.5 is 252, 1 is 254, 6 is 259.
    top = (bits >> 22) & 0x1FF
    magnitude = (top - 252).clamp_(min=0) + (top == 252)
    sign = (bits < 0) & (magnitude > 0)
    return (magnitude + sign * _SIGN_BIT).to(torch.uint8)


def decode_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """Return the float32 values of 4-bit codes (any integer dtype, 0..15). Code 8 is -0.0."""
    # The table is computed on the device: copying it there makes the host wait, which CUDA graphs refuse.
    code = torch.arange(_SIGN_BIT, dtype=torch.float32, device=codes.device)
    # A step is half, and doubles at codes 4 and 6.
    beyond_4 = (code - 4).clamp_(min=0)
    beyond_6 = (code - 6).clamp_(min=0).mul_(2)
    magnitudes = (code + beyond_4 + beyond_6).mul_(0.5)
    table = torch.cat((magnitudes, -magnitudes))
    return table[codes.long()]


def pack_codes(codes: torch.Tensor) -> torch.Tensor:
    """Pack two codes per byte along the last axis, even index in the low nibble: uint8 ``[..., K]`` to
    ``[..., ceil(K/2)]``. The last high nibble is 0 when ``K`` is odd."""
    if codes.shape[-1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    low = codes[..., 0::2]
    high = codes[..., 1::2]
    return low | (high << 4)


def unpack_codes(packed: torch.Tensor, length: int) -> torch.Tensor:
    """Return the first ``length`` codes of packed bytes: uint8 ``[..., ceil(length/2)]`` to ``[..., length]``."""
    n_bytes = (length + 1) // 2
    if packed.shape[-1] != n_bytes:
        raise ValueError(f"{packed.shape[-1]} packed bytes cannot hold {length} 4-bit codes; expected {n_bytes} bytes")
    codes = torch.stack((packed & 0xF, packed >> 4), dim=-1)
    return codes.flatten(-2)[..., :length]


# ---- E8M0 -----------------------------------------------------------------------------------------------------------


E8M0_NAN = 255
#: Elements that share one E8M0 scale (OCP MX v1.0, table 1).
BLOCK_SIZE = 32
# The largest grid value at this byte, 4 * 2**126, is the first power of two outside float32.
_LAST_UNRESTRICTED_BYTE = 252


def scale_from_amax(amax: torch.Tensor, rule: ScaleRule) -> torch.Tensor:
    """Return the scale bytes (int32, 0..255) of block maxima (non-negative float32); for a rule of least squares its
    first candidate.

    A maximum of zero gives byte 0, a NaN or infinite one 255; exponents outside the range saturate at 0 and 254.
    """
    # Reductions may give a NaN with its sign bit set.
    bits = amax.view(torch.int32) & 0x7FFFFFFF
    # The exponent of the maximum, less that of 4, the largest power of two on the grid.
    byte = (((bits + rule.carry) >> 23) - 2).clamp_(0, 254)
    return byte.masked_fill_(bits >= 0x7F800000, E8M0_NAN)


def decode_e8m0(byte: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the values ``2**(byte - 127)`` of scale bytes (any integer dtype); byte 255 is NaN, byte 0 a
    float32 subnormal."""
    byte = byte.to(torch.int32)
    # Byte 0 has no normal float32; byte 255 would read as infinity.
    bits = (byte << 23).masked_fill_(byte == 0, 0x00400000).masked_fill_(byte == E8M0_NAN, 0x7FC00000)
    return bits.view(torch.float32).to(dtype)


def inverse_scale(byte: torch.Tensor) -> torch.Tensor:
    """Return float32 ``2**(127 - byte)`` of scale bytes (int32, 0..254); 0 for byte 255, whose elements mean
    nothing."""
    # 2**-127, the inverse of byte 254, is subnormal.
    bits = ((254 - byte) << 23).masked_fill_(byte == 254, 0x00400000).masked_fill_(byte == E8M0_NAN, 0)
    return bits.view(torch.float32)


def largest_finite_magnitude(byte: torch.Tensor) -> torch.Tensor | None:
    """Return for each block the largest E2M1 magnitude whose product with the scale is finite in float32, or `None`
    when that is 6 everywhere. Only blocks whose maximum is 2**127 or more are restricted."""
    restricted = (byte > _LAST_UNRESTRICTED_BYTE) & (byte != E8M0_NAN)
    if byte.device.type == "cpu" and not restricted.any():
        return None
    limit = torch.full(byte.shape, 6.0, dtype=torch.float32, device=byte.device)
    limit = limit.masked_fill_(byte == 253, 3.0)
    return limit.masked_fill_(byte == 254, 1.5)


# ---- E4M3 -----------------------------------------------------------------------------------------------------------


def quantize_e4m3(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``x [..., K]`` as E4M3 elements (``float8_e4m3fn [..., K]``) and one scale byte per row (E8M0, uint8
    ``[..., 1]``), rounded to nearest (ties to even); no gradient flows.

    Each row along the last axis has the smallest power-of-two scale that lets nothing clip: ``2**(E - 8 + [m > 1.75])``
    for a largest magnitude ``m * 2**E``, at least ``2**-126``. A row that holds NaN or infinity has scale byte 255.

    Raises `TypeError` for a tensor that is not floating-point.
    """
    if not x.is_floating_point():
        raise TypeError(f"FP8 quantization needs a floating-point tensor, got {x.dtype}")
    values = to_float32(x.detach())
    if x.numel() == 0:
        byte = torch.zeros(*x.shape[:-1], 1, dtype=torch.uint8, device=x.device)
        return values.to(torch.float8_e4m3fn), byte
    byte = e4m3_scale_byte(values.abs().amax(dim=-1, keepdim=True))
    return (values / decode_e8m0(byte)).to(torch.float8_e4m3fn), byte


def e4m3_scale_byte(amax: torch.Tensor) -> torch.Tensor:
    """Return the scale bytes (uint8) of rows whose largest magnitudes are ``amax`` (float32): see [`quantize_e4m3`]."""
    bits = amax.view(torch.int32)
    # The largest finite E4M3 value is 448 = 1.75 * 2**8 (OCP 8-bit floating point; it has no infinity).
    is_above_1_75 = (bits & 0x7FFFFF) > 0x600000
    byte = (bits >> 23) - 8 + is_above_1_75.to(torch.int32)
    return byte.clamp(min=1).masked_fill_(~amax.isfinite(), E8M0_NAN).to(torch.uint8)


def dequantize_e4m3(elements: torch.Tensor, byte: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the values ``[..., K]`` of what [`quantize_e4m3`] returned, in ``dtype``. What that cannot hold saturates;
    a row with scale byte 255 is NaN as a whole."""
    return saturate(elements.float() * decode_e8m0(byte), dtype).to(dtype)


def fake_quantize_e4m3(x: torch.Tensor) -> torch.Tensor:
    """Return the E4M3 values of ``x`` in its own shape and dtype; see [`quantize_e4m3`].

    Rows are along the contraction axis: a power of two passes through a product unchanged, so that a kernel can apply
    it to the output. A finite value never becomes infinite. A row that holds NaN or infinity becomes NaN as a whole, as
    a block of MXFP4 does.

    Raises `TypeError` for a tensor that is not floating-point.
    """
    return dequantize_e4m3(*quantize_e4m3(x), x.dtype)


def quantize_mxfp8(
    x: torch.Tensor, quantize_rows: Callable[..., tuple[torch.Tensor, torch.Tensor]] = quantize_e4m3
) -> tuple[torch.Tensor, torch.Tensor]:
    """``x [..., K]`` in MXFP8: E4M3 elements (``float8_e4m3fn [..., K]``) and one scale byte for each block of 32 along
    the last axis (E8M0, uint8 ``[..., ceil(K/32)]``); the last block may be shorter.

    A block is a row of [`quantize_e4m3`], so that nothing clips: torchao's RCEIL. (``2**(E - 8)``, which section 6.3 of
    MX v1.0 describes, clips magnitudes above 1.75 * 2**E.) ``quantize_rows`` may be another backend's.

    Raises `TypeError` for a tensor that is not floating-point.
    """
    elements, byte = quantize_rows(_in_blocks(x))
    return elements.flatten(-2)[..., : x.shape[-1]], byte.squeeze(-1)


def dequantize_mxfp8(
    elements: torch.Tensor,
    byte: torch.Tensor,
    dtype: torch.dtype,
    dequantize_rows: Callable[..., torch.Tensor] = dequantize_e4m3,
) -> torch.Tensor:
    """Return the values ``[..., K]`` of what [`quantize_mxfp8`] returned, in ``dtype``, as [`dequantize_e4m3`] does."""
    values = dequantize_rows(_in_blocks(elements), byte.unsqueeze(-1), dtype)
    return values.flatten(-2)[..., : elements.shape[-1]]


def _in_blocks(x: torch.Tensor) -> torch.Tensor:
    """Return ``x [..., K]``, padded with zeros, as ``[..., ceil(K/32), 32]``."""
    if padding := -x.shape[-1] % BLOCK_SIZE:
        x = torch.nn.functional.pad(x, (0, padding))
    return x.unflatten(-1, (x.shape[-1] // BLOCK_SIZE, BLOCK_SIZE))


def to_float32(x: torch.Tensor, copy: bool = False) -> torch.Tensor:
    """Float32 values of a tensor; those of float64 that are finite stay so."""
    if x.dtype == torch.float64:
        largest = torch.finfo(torch.float32).max
        x = torch.where(x.isinf(), x, x.clamp(-largest, largest))
    return x.to(torch.float32, copy=copy)


def saturate(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Clamp to the finite range of ``dtype`` and of the computation; NaN passes. ``values`` is consumed."""
    largest = min(torch.finfo(dtype).max, torch.finfo(values.dtype).max)
    return values.clamp_(-largest, largest)
