# SPDX-License-Identifier: Apache-2.0
"""The linear layer on frozen packed weights, of one weight or of all experts."""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from ..numerics import QuantScheme
from . import quantization
from .autograd import as_dtype, autocast_dtype, needs_gradient, not_a_view
from .codes import decodes, multiply_codes
from .fp4 import to_fp4
from .groups import Groups, sum_rows
from .operands import quantize_input
from .packed_weight import PACKED_FIELDS, PackedWeight, of_expert, packed_tensor
from .products import fp4_products, multiply_values
from .spec import GemmSpec
from .state import GemmState


def packed_linear(
    x: torch.Tensor,
    packed: PackedWeight,
    bias: torch.Tensor | None,
    state: GemmState,
    groups: Groups | None = None,
) -> torch.Tensor:
    """``Q(x) Q(W)^T + b`` on frozen packed weights, with the straight-through gradient to ``x`` and ``b``. Of a spec
    that rotates, ``x`` as a weight was that is stored rotated, and the gradient back.

    Only the packed tensors are kept for the backward pass, which dequantizes them again; of experts, those of one at a
    time, and of those alone that have rows.

    Args:
        x: ``[..., K]``; with groups ``[S, K]``, rows sorted by expert.
        packed: the tensors of [`PACKED_FIELDS`], of experts each ``[E, ...]``, `None` for those that the scheme has
            not.
        bias: ``[N]``, ``[E, N]`` or `None`.
        state: of the layer.
        groups: the rows of each expert; `None` for one weight.

    Returns:
        ``[..., N]`` in the autocast dtype when autocast is on, otherwise in the dtype of ``x``.
    """
    dtype = autocast_dtype(x) or x.dtype
    if needs_gradient(x, bias):
        return _PackedLinear.apply(x, bias, state, groups, dtype, *packed)
    return _forward(x, packed, bias, state, groups, dtype)


def packed_forward(
    x: torch.Tensor,
    packed: PackedWeight,
    bias: torch.Tensor | None,
    spec: GemmSpec,
    groups: Groups | None,
    dtype: torch.dtype,
    values: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the forward pass of [`packed_linear`], without a gradient; ``values`` take the place of the codes."""
    bias = as_dtype(bias, dtype)
    rotation, backend = spec.scheme.fprop.rotation, spec.backend
    if values is not None:
        return F.linear(quantize_input(x, dtype, spec.input_scheme, backend, rotation), values, bias)
    weight = packed_tensor(packed, x.shape[-1], spec.weight_scheme, dtype)
    if groups is None:
        shape = weight.codes.shape[0], weight.length
        way = fp4_products(spec, x.device, dtype, shape)
        recipe = None if way is None else way.recipe_for(x)
        if recipe is not None:
            if recipe == "mxfp8":
                codes: Any = quantization.quantize_mxfp8(x.detach(), backend)
            else:
                codes = quantization.quantize(x.detach(), cast(QuantScheme, spec.input_scheme), backend)
            out = way.multiply(codes, to_fp4(weight, recipe), recipe, bias, dtype)
            if out is not None:
                return out
    operand = quantize_input(x, dtype, spec.input_scheme, backend, rotation)
    codes_backend = quantization.choose_backend(operand, weight.scheme, backend, family="decode")
    if groups is not None or decodes(operand, dtype, codes_backend, None):
        return multiply_codes(operand, weight, bias, groups, codes_backend, backend)
    if codes_backend == "cpu" and spec.matmul_backend != "fp8":
        return multiply_codes(operand, weight, bias, None, codes_backend, backend)
    return multiply_values(operand, quantization.dequantize(weight, dtype, backend), bias, spec)


def packed_grad_x(
    grad: torch.Tensor, packed: PackedWeight, in_features: int, spec: GemmSpec, groups: Groups | None
) -> torch.Tensor:
    """Return the input gradient ``[..., K]`` of [`packed_linear`], in float32 or wider where the spec rotates."""
    weight, rotation = packed_tensor(packed, in_features, spec.weight_scheme, grad.dtype), spec.scheme.fprop.rotation
    if groups is None:
        grad_x = grad @ quantization.dequantize(weight, grad.dtype, spec.backend)
    else:
        grad_x = grad.new_empty(grad.shape[0], in_features)
        for expert, rows in groups:
            grad_x[rows] = grad[rows] @ quantization.dequantize(of_expert(weight, expert), grad.dtype, spec.backend)
    # The inverse of a deterministic rotation is its transpose, and itself.
    return grad_x if rotation is None else quantization.rotate_rows(grad_x, rotation.size, spec.backend)


def _forward(
    x: torch.Tensor,
    packed: PackedWeight,
    bias: torch.Tensor | None,
    state: GemmState,
    groups: Groups | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """[`packed_forward`], with dequantized values where a cache shall keep those and products are none on codes."""
    spec, cache, values = state.spec, state.cache, None

    def dequantize(_: torch.Tensor | None) -> torch.Tensor:
        return quantization.dequantize(
            packed_tensor(packed, x.shape[-1], spec.weight_scheme, dtype), dtype, spec.backend
        )

    if cache is not None and cache.form == "dense" and groups is None:
        if quantization.choose_backend(x, spec.weight_scheme, spec.backend, family="decode") != "cpu":
            values = cache.get(packed[0], (state, dtype), dequantize)
    return packed_forward(x, packed, bias, spec, groups, dtype, values)


class _PackedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bias, state, groups, dtype, *packed):
        ctx.save_for_backward(*packed)
        ctx.spec, ctx.groups, ctx.in_features, ctx.input_dtype = state.spec, groups, x.shape[-1], x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        return not_a_view(_forward(x, packed, bias, state, groups, dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        grad_x = grad_bias = None
        if ctx.needs_input_grad[0]:
            packed = ctx.saved_tensors  # once: under gradient checkpointing they can be unpacked only once
            grad_x = packed_grad_x(grad, packed, ctx.in_features, ctx.spec, ctx.groups).to(ctx.input_dtype)
        if ctx.needs_input_grad[1]:
            grad_bias = sum_rows(grad.reshape(-1, grad.shape[-1]), ctx.groups).to(ctx.bias_dtype)
        return (grad_x, grad_bias) + (None,) * (3 + len(PACKED_FIELDS))
