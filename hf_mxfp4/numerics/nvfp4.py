# SPDX-License-Identifier: Apache-2.0
"""NVFP4, for comparison and import: E2M1 elements, an E4M3 scale per 16 of them, and a float32 scale per tensor.

The tensor scale is ``amax / (6 * 448)``, and a group's scale is ``amax / 6`` over it, rounded to the nearest E4M3
number (NVIDIA Model-Optimizer, compressed-tensors `nvfp4-pack-quantized`, torchao `NVFP4Tensor`). Where that rounds
down, magnitudes above six scales saturate, as under MXFP4's ``even`` rule.
"""

import torch

from .blocks import to_blocks
from .formats import decode_e2m1, encode_e2m1, pack_codes, round_nearest, saturate, to_float32, unpack_codes


#: Elements that share an E4M3 scale.
NVFP4_GROUP = 16
_LARGEST = 6.0 * 448.0
#: So that the reciprocal of the smallest product of both scales is finite.
_SMALLEST_TENSOR_SCALE = 2.0**-116
#: The least scale of a group with values. Libraries differ here: torchao takes 2**-6, compressed-tensors 2**-3 for a
#: scale that rounds to zero.
_SMALLEST_SCALE = 2.0**-9


def nvfp4_tensor_scale(x: torch.Tensor, per_row: bool = False) -> torch.Tensor:
    """Return ``amax / (6 * 448)`` of the finite elements, float32: ``[1]``, or ``[..., 1]`` with one for each row. At
    least 2**-116, and 1 where nothing is finite but zeros."""
    rows = to_float32(x).abs().nan_to_num(nan=0.0, posinf=0.0)
    if not per_row:
        rows = rows.flatten()
    if rows.numel():
        amax = rows.amax(dim=-1, keepdim=True)
    else:
        amax = rows.new_zeros(*rows.shape[:-1], 1)
    return (amax / _LARGEST).clamp_(min=_SMALLEST_TENSOR_SCALE).masked_fill_(amax == 0, 1.0)


@torch.no_grad()
def quantize_nvfp4(
    x: torch.Tensor, tensor_scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``x [..., K]`` as packed codes (uint8 ``[..., ceil(K/2)]``), group scales (``float8_e4m3fn [..., ceil(K/16)]``)
    and the tensor scale; no gradient flows.

    A group that holds NaN or infinity has the scale NaN and codes 0; a zero one has scale 1. K is padded with zeros.

    Args:
        tensor_scale: float32 that broadcasts to ``[..., 1]``; by default that of [`nvfp4_tensor_scale`].

    Raises `TypeError` for a tensor that is not floating-point.
    """
    if not x.is_floating_point():
        raise TypeError(f"NVFP4 quantization needs a floating-point tensor, got {x.dtype}")
    if tensor_scale is None:
        tensor_scale = nvfp4_tensor_scale(x)
    groups = to_blocks(to_float32(x), NVFP4_GROUP, 1, NVFP4_GROUP)
    amax = groups.abs().amax(dim=-1)
    scale = (amax / 6.0 / tensor_scale).clamp(_SMALLEST_SCALE, 448.0).masked_fill(amax == 0, 1.0)
    scale = scale.masked_fill(~amax.isfinite(), torch.nan).to(torch.float8_e4m3fn)
    # A product with the reciprocal, as in torchao and kernels: a quotient would round some ties otherwise.
    inverse = 1.0 / tensor_scale / scale.float()
    grid = round_nearest(groups * inverse.unsqueeze(-1))
    codes = encode_e2m1(grid.nan_to_num(nan=0.0)).flatten(-2)[..., : x.shape[-1]]
    return pack_codes(codes), scale, tensor_scale


def dequantize_nvfp4(
    codes: torch.Tensor, scale: torch.Tensor, tensor_scale: torch.Tensor, length: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return the values ``[..., length]`` of what [`quantize_nvfp4`] returned, in ``dtype``, in which they saturate."""
    scales = (scale.float() * tensor_scale).repeat_interleave(NVFP4_GROUP, dim=-1)[..., :length]
    return saturate(decode_e2m1(unpack_codes(codes, length)) * scales, dtype).to(dtype)


def fake_quantize_nvfp4(x: torch.Tensor, tensor_scale: torch.Tensor | None = None) -> torch.Tensor:
    """Return the NVFP4 values of ``x``, in its own shape and dtype. Arguments and errors as of [`quantize_nvfp4`]."""
    codes, scale, tensor_scale = quantize_nvfp4(x, tensor_scale)
    return dequantize_nvfp4(codes, scale, tensor_scale, x.shape[-1], x.dtype)
