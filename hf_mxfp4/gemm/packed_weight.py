# SPDX-License-Identifier: Apache-2.0
"""Packed weights: their tensors, how they are made and read back, and the linear layer on them.

A weight ``[N, K]`` is kept as codes and scale bytes, in memory as on disk. The forward product runs on those where a
kernel can; other products run on dequantized values, which exist only while a product needs them.
"""

from collections.abc import Callable, Mapping

import torch
from torch.autograd.function import once_differentiable

from ..backends import select as backends
from ..backends.functional import quantize
from ..backends.select import dequantize as dequantize
from ..numerics import BLOCK_SIZE, MXFP4Tensor, QuantScheme
from .linear import Quantizer, autocast_dtype
from .packed import packed_product


#: Names of a packed weight's tensors on its layer and on disk -> the fields of [`MXFP4Tensor`] that they hold.
PACKED_FIELDS = {
    "weight": "codes",
    "weight_scale": "scale",
    "weight_macro": "macro",
    "weight_residual": "residual_codes",
    "weight_residual_scale": "residual_scale",
}

#: What those names have after that of the weight.
PACKED_SUFFIXES = tuple(name.removeprefix("weight") for name in PACKED_FIELDS)

#: Weights that no fused function covers are quantized in portions of about this many elements, to bound what lies
#: between input and output.
_EAGER_PORTION = 1 << 22

PackedWeight = tuple[torch.Tensor | None, ...]


def packed_shapes(out_features: int, in_features: int, scheme: QuantScheme) -> dict[str, tuple[int, int]]:
    """Shapes of the uint8 tensors that a weight ``[out_features, in_features]`` consists of under ``scheme``, by name,
    in the order of [`PACKED_FIELDS`]."""
    columns = {"weight": -(-in_features // 2), "weight_scale": -(-in_features // BLOCK_SIZE)}
    if scheme.macro_block is not None:
        columns["weight_macro"] = 1 if scheme.macro_block == "row" else -(-in_features // scheme.macro_block)
    if scheme.outlier_fallback is not None:
        columns["weight_residual"] = columns["weight"]
        columns["weight_residual_scale"] = columns["weight_scale"]
    return {name: (out_features, n) for name, n in columns.items()}


def check_packed(
    owner: str, tensors: Mapping[str, torch.Tensor | None], shapes: Mapping[str, tuple[int, ...]], scheme: QuantScheme
) -> None:
    """Raise `ValueError` unless every tensor of ``shapes``, and no other, is there, uint8, and of its shape."""
    for name, tensor in tensors.items():
        shape = shapes.get(name)
        found = None if tensor is None else tuple(tensor.shape)
        if found != shape or tensor is not None and tensor.dtype != torch.uint8:
            what = "is missing" if found is None else f"is {tensor.dtype} {list(found)}"
            expected = f"uint8 {list(shape)}" if shape else f"no such tensor for {scheme}"
            raise ValueError(f"{owner}.{name} {what}; expected {expected}")


@torch.no_grad()
def quantize_weight(weight: torch.Tensor, scheme: QuantScheme, backend: str = "auto") -> dict[str, torch.Tensor]:
    """The tensors of [`packed_shapes`] for a weight ``[N, K]``; without memory when it is a meta tensor."""
    if weight.is_meta:
        shapes = packed_shapes(*weight.shape, scheme)
        return {name: torch.empty(shape, dtype=torch.uint8, device="meta") for name, shape in shapes.items()}
    rows = weight.shape[0]
    # Selective fallback ranks the blocks of the whole weight.
    if scheme.fallback_rate is None and backends.choose_backend(weight, scheme, backend) == "eager":
        rows = max(1, _EAGER_PORTION // max(1, weight.shape[1]) // BLOCK_SIZE) * BLOCK_SIZE
    portions = [quantize(portion, **vars(scheme), backend=backend) for portion in weight.detach().split(rows)]
    packed = {}
    for name, field in PACKED_FIELDS.items():
        parts = [getattr(portion, field) for portion in portions]
        if parts[0] is not None:
            packed[name] = (torch.cat(parts) if len(parts) > 1 else parts[0]).contiguous()
    return packed


def packed_tensor(
    packed: Mapping[str, torch.Tensor | None], length: int, scheme: QuantScheme, dtype: torch.dtype
) -> MXFP4Tensor:
    """The tensors of [`packed_shapes`] as a [`MXFP4Tensor`] of ``length`` columns that shares their memory."""
    found = {field: packed.get(name) for name, field in PACKED_FIELDS.items()}
    parts = {field: None if tensor is None else tensor.detach() for field, tensor in found.items()}
    return MXFP4Tensor(**parts, length=length, axis=1, scheme=scheme, dtype=dtype)


def packed_linear(
    x: torch.Tensor,
    packed: PackedWeight,
    bias: torch.Tensor | None,
    quantize_input: Quantizer,
    dequantize_weight: Callable[[PackedWeight, torch.dtype], torch.Tensor],
    scheme: QuantScheme,
    backend: str = "auto",
) -> torch.Tensor:
    """``Q(x) Q(W)^T + b`` on a frozen packed weight, with the straight-through gradient to ``x``.

    Only the packed tensors are kept for the backward pass, which dequantizes them again.

    Args:
        x: ``[..., K]``.
        packed: the tensors of [`packed_shapes`], `None` for those that the scheme has not.
        bias: ``[N]`` or `None`.
        quantize_input: maps ``x`` and the dtype of the product to ``Q(x)`` in that dtype.
        dequantize_weight: maps ``packed`` and the dtype of the product to ``Q(W)`` ``[N, K]`` in that dtype.
        scheme, backend: of the weight; what the forward product runs on, see [`packed_product`].

    Returns:
        ``[..., N]`` in the autocast dtype when autocast is on, otherwise in the dtype of ``x``.
    """
    dtype = autocast_dtype(x) or x.dtype
    return _PackedLinear.apply(x, bias, quantize_input, dequantize_weight, dtype, scheme, backend, *packed)


class _PackedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bias, quantize_input, dequantize_weight, dtype, scheme, backend, *packed):
        ctx.save_for_backward(*packed)
        ctx.dequantize_weight = dequantize_weight
        ctx.input_dtype = x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        bias = None if bias is None else bias.to(dtype)
        weight = packed_tensor(dict(zip(PACKED_FIELDS, packed, strict=True)), x.shape[-1], scheme, dtype)
        operand = quantize_input(x, dtype)
        return packed_product(operand, weight, bias, lambda: dequantize_weight(packed, dtype), backend)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        grad_x = grad_bias = None
        if ctx.needs_input_grad[0]:
            weight = ctx.dequantize_weight(ctx.saved_tensors, grad.dtype)
            grad_x = (grad @ weight).to(ctx.input_dtype)
        if ctx.needs_input_grad[1]:
            grad_bias = grad.reshape(-1, grad.shape[-1]).sum(dim=0).to(ctx.bias_dtype)
        return (grad_x, grad_bias) + (None,) * (5 + len(PACKED_FIELDS))
