# SPDX-License-Identifier: Apache-2.0
"""FP8 E4M3 with one power-of-two scale per row: the format of output gradients beside MXFP4 operands, and of inputs
that are saved for the backward pass."""

import torch

from ..packed import saturate
from .e8m0 import decode_e8m0


#: The scale byte of a row that holds NaN or infinity.
_NAN_BYTE = 255


def quantize_e4m3(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``x [..., K]`` as E4M3 elements (``float8_e4m3fn [..., K]``) and one scale byte per row (E8M0, uint8
    ``[..., 1]``), rounded to nearest (ties to even); no gradient flows.

    Each row along the last axis has the smallest power-of-two scale that lets nothing clip: ``2**(E - 8 + [m > 1.75])``
    for a largest magnitude ``m * 2**E``, at least ``2**-126``. A row that holds NaN or infinity has scale byte 255.

    Raises `TypeError` for a tensor that is not floating-point.
    """
    if not x.is_floating_point():
        raise TypeError(f"FP8 quantization needs a floating-point tensor, got {x.dtype}")
    with torch.no_grad():
        values = x.detach()
        if x.numel() == 0:
            return values.to(torch.float8_e4m3fn), torch.zeros(*x.shape[:-1], 1, dtype=torch.uint8, device=x.device)
        if x.dtype == torch.float64:
            limit = torch.finfo(torch.float32).max
            values = torch.where(values.isfinite(), values.clamp(-limit, limit), values)
        values = values.float()
        byte = e4m3_scale_byte(values.abs().amax(dim=-1, keepdim=True))
        return (values / decode_e8m0(byte)).to(torch.float8_e4m3fn), byte


def e4m3_scale_byte(amax: torch.Tensor) -> torch.Tensor:
    """Scale bytes (uint8) of rows whose largest magnitudes are ``amax`` (float32): see [`quantize_e4m3`]."""
    bits = amax.view(torch.int32)
    # The largest finite E4M3 value is 448 = 1.75 * 2**8 (OCP 8-bit floating point; it has no infinity).
    exponent = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(torch.int32)
    return exponent.clamp(min=1).masked_fill_(~amax.isfinite(), _NAN_BYTE).to(torch.uint8)


def dequantize_e4m3(elements: torch.Tensor, byte: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The values ``[..., K]`` of what [`quantize_e4m3`] returned, in ``dtype``. What that cannot hold saturates; a row
    with scale byte 255 is NaN as a whole."""
    return saturate(elements.float() * decode_e8m0(byte), dtype).to(dtype)


def fake_quantize_e4m3(x: torch.Tensor) -> torch.Tensor:
    """The E4M3 values of ``x`` in its own shape and dtype; see [`quantize_e4m3`].

    Rows are along the contraction axis: a power of two passes through a product unchanged, so that a kernel can apply
    it to the output. A finite value never becomes infinite. A row that holds NaN or infinity becomes NaN as a whole, as
    a block of MXFP4 does.

    Raises `TypeError` for a tensor that is not floating-point.
    """
    return dequantize_e4m3(*quantize_e4m3(x), x.dtype)
