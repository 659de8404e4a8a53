# SPDX-License-Identifier: Apache-2.0
"""FP8 E4M3 with one power-of-two scale per row: the format of output gradients beside MXFP4 operands."""

import torch

from .packed import saturate


def fake_quantize_e4m3(x: torch.Tensor) -> torch.Tensor:
    """The E4M3 values of ``x`` in its own shape and dtype, rounded to nearest (ties to even); no gradient flows.

    Each row along the last axis, the contraction axis, has the smallest power-of-two scale that lets nothing clip:
    ``2**(E - 8 + [m > 1.75])`` for a largest magnitude ``m * 2**E``, at least ``2**-126``. A power of two passes
    through a product unchanged, so that a kernel can apply it to the output. A finite value never becomes infinite. A
    row that holds NaN or infinity becomes NaN as a whole, as a block of MXFP4 does.

    Raises `TypeError` for a tensor that is not floating-point.
    """
    if not x.is_floating_point():
        raise TypeError(f"FP8 quantization needs a floating-point tensor, got {x.dtype}")
    if x.numel() == 0:
        return x.detach().clone()
    with torch.no_grad():
        values = x.detach()
        if x.dtype == torch.float64:
            limit = torch.finfo(torch.float32).max
            values = torch.where(values.isfinite(), values.clamp(-limit, limit), values)
        values = values.float()
        amax = values.abs().amax(dim=-1, keepdim=True)
        bits = amax.view(torch.int32)
        # The largest finite E4M3 value is 448 = 1.75 * 2**8 (OCP 8-bit floating point; it has no infinity).
        exponent = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(torch.int32)
        scale = (exponent.clamp(min=1) << 23).view(torch.float32)
        quantized = (values / scale).to(torch.float8_e4m3fn).float() * scale
        return saturate(quantized.masked_fill_(~amax.isfinite(), torch.nan), x.dtype).to(x.dtype)
