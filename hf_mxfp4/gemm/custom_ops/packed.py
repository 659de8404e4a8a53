# SPDX-License-Identifier: Apache-2.0
"""The linear layer on a frozen packed weight as an operator, a function of its arguments alone: safe in CUDA graphs."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ...backends import select as backends
from ...numerics import MXFP4Tensor, QuantScheme
from ..linear import autocast_dtype
from ..packed import packed_product
from .registry import owner_of
from .tensors import read_scheme


@dataclass(frozen=True)
class PackedForm:
    """The schemes of a packed layer as text, ``""`` for activations that are not quantized, and its backend."""

    weights: str
    inputs: str
    backend: str

    @classmethod
    def of(cls, weights: QuantScheme, inputs: QuantScheme | None, backend: str) -> "PackedForm":
        return cls(str(weights), "" if inputs is None else str(inputs), backend)


def frozen_linear(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """[`hf_mxfp4.gemm.packed_weight.packed_linear`] of a layer, where Dynamo traces.

    Args:
        layer: has ``packed_weight()``, ``bias``, ``form`` ([`PackedForm`]), ``fallback_threshold`` and ``handle``
            ([`new_handle`]).
        x: ``[..., K]``.
    """
    form, scheme = layer.form, layer.form.inputs
    if layer.fallback_threshold is not None:
        x, scheme = torch.ops.hf_mxfp4.delayed_input(x, layer.handle, ""), ""
    return linear_on(layer.packed_weight(), x, layer.bias, form, scheme)


def linear_on(
    packed: Sequence[torch.Tensor | None], x: torch.Tensor, bias: torch.Tensor | None, form: PackedForm, inputs: str
) -> torch.Tensor:
    """``Q(x) Q(W)^T + b`` on the tensors of a packed weight, where Dynamo traces; ``inputs`` is the scheme of ``x``."""
    options = autocast_dtype(x) or x.dtype, form.weights, inputs, form.backend
    return torch.ops.hf_mxfp4.packed_linear(x, *packed, bias, *options)


@torch.library.custom_op("hf_mxfp4::packed_linear", mutates_args=())
def _forward(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    macro: torch.Tensor | None,
    residual_codes: torch.Tensor | None,
    residual_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    weight_scheme: str,
    input_scheme: str,
    backend: str,
) -> torch.Tensor:
    length = x.shape[-1]
    if input_scheme:
        x = backends.fake_quantize(x.detach(), read_scheme(input_scheme), backend)
    packed = codes, scale, macro, residual_codes, residual_scale
    weight = MXFP4Tensor(*packed, length=length, axis=1, scheme=read_scheme(weight_scheme), dtype=dtype)
    values = partial(backends.dequantize, weight, dtype, backend)
    bias = None if bias is None else bias.to(dtype)
    return packed_product(x.to(dtype), weight, bias, values, backend).contiguous()


@_forward.register_fake
def _(x, codes, scale, macro, residual_codes, residual_scale, bias, dtype, weight_scheme, input_scheme, backend):
    return x.new_empty(*x.shape[:-1], codes.shape[0], dtype=dtype)


@torch.library.custom_op("hf_mxfp4::packed_linear_grad_x", mutates_args=())
def _grad_x(
    grad: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    macro: torch.Tensor | None,
    residual_codes: torch.Tensor | None,
    residual_scale: torch.Tensor | None,
    length: int,
    dtype: torch.dtype,
    weight_scheme: str,
    backend: str,
) -> torch.Tensor:
    packed = codes, scale, macro, residual_codes, residual_scale
    weight = MXFP4Tensor(*packed, length=length, axis=1, scheme=read_scheme(weight_scheme), dtype=grad.dtype)
    return (grad @ backends.dequantize(weight, grad.dtype, backend)).to(dtype).contiguous()


@_grad_x.register_fake
def _(grad, codes, scale, macro, residual_codes, residual_scale, length, dtype, weight_scheme, backend):
    return grad.new_empty(*grad.shape[:-1], length, dtype=dtype)


def _setup(ctx, inputs, output):
    x, *packed, bias, _, weight_scheme, _, backend = inputs
    ctx.save_for_backward(*packed)
    ctx.options = x.shape[-1], x.dtype, weight_scheme, backend
    ctx.bias_dtype = None if bias is None else bias.dtype


def _gradients(ctx, grad):
    grad_x = grad_bias = None
    if ctx.needs_input_grad[0]:
        grad_x = torch.ops.hf_mxfp4.packed_linear_grad_x(grad, *ctx.saved_tensors, *ctx.options)
    if ctx.needs_input_grad[6]:
        grad_bias = grad.reshape(-1, grad.shape[-1]).sum(dim=0).to(ctx.bias_dtype)
    return grad_x, *(None,) * 5, grad_bias, *(None,) * 4


_forward.register_autograd(_gradients, setup_context=_setup)


@torch.library.custom_op("hf_mxfp4::delayed_input", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _delayed_input(x: torch.Tensor, layer: torch.Tensor, projection: str) -> torch.Tensor:
    """``Q(x)`` under the fallback threshold of a layer, or of a projection of experts, straight through."""
    of = (projection,) if projection else ()
    return owner_of(layer).quantized_input(*of, x.detach(), x.dtype).contiguous()


@_delayed_input.register_fake
def _(x, layer, projection):
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


_delayed_input.register_autograd(lambda ctx, grad: (grad, None, None))
