# SPDX-License-Identifier: Apache-2.0
"""The linear layer on quantized operands, with the straight-through gradient.

Forward ``y = Q(x) Q(W)^T + b``. The quantizers are passed over by the gradient (straight-through estimator), and the
backward products run on the operands of the forward one: ``dx = g Q(W)``, ``dW = g^T Q(x)``, ``db = sum g``
(arXiv 2605.20402, section 2: forward operands in MXFP4, output gradients in full precision), unless
[`BackwardProducts`] say otherwise.
"""

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from .draws import Draws
from .gemms import BackwardProducts, Quantizer
from .saved import SavedInput, keep_input, restore_input


def quantized_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    quantize_input: Quantizer,
    quantize_weight: Quantizer,
    products: BackwardProducts | None = None,
    saved: SavedInput | None = None,
) -> torch.Tensor:
    """``Q(x) Q(W)^T + b`` with straight-through gradients.

    Args:
        x: ``[..., K]``.
        weight: master weight ``[N, K]``; read, never written.
        bias: ``[N]`` or `None`.
        quantize_input, quantize_weight: map an operand and the dtype of the product to the operand's quantized values
            in that dtype. The weight's is called again in the backward pass, on the weight as it is then: a sharded
            engine may have freed what the forward pass saw. Both may return more than K columns, of a rotation that
            ``products`` knows.
        products: how gradients are computed; by default from the operands above and the output gradient as it is.
        saved: what is kept of ``x`` for the gradient of the weight; by default what that product takes, as it is.

    Returns:
        ``[..., N]`` in the autocast dtype when autocast is on, otherwise in the dtype of ``x``.
    """
    dtype = autocast_dtype(x) or x.dtype
    # A frozen weight, as under LoRA, needs no input kept for its gradient.
    needed = weight.requires_grad and torch.is_grad_enabled()
    return _QuantizedLinear.apply(
        x, weight, bias, quantize_input, quantize_weight, products, dtype, saved or SavedInput(), needed
    )


def autocast_dtype(x: torch.Tensor) -> torch.dtype | None:
    """What autocast would compute a product of ``x`` in; `None` when it is off or leaves ``x`` alone (float64)."""
    device = x.device.type
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return None
    return None if x.dtype == torch.float64 else torch.get_autocast_dtype(device)


def check_step(draws: Draws, step: int) -> None:
    """Raise `RuntimeError` unless ``draws`` is still at the ``step`` of the forward pass."""
    if draws.step != step:
        raise RuntimeError(
            f"the quantization step of {draws.layer or 'a layer'} went from {step} to {draws.step} between its forward "
            "and its backward pass; set it before the forward pass"
        )


class _QuantizedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, quantize_input, quantize_weight, products, dtype, saved, needed):
        itself = products is not None and products.keeps_input
        operand, kept, ctx.kept_as = keep_input(x, dtype, quantize_input, saved, needed=needed, itself=itself)
        ctx.save_for_backward(weight, *kept)
        ctx.quantize_weight = quantize_weight
        ctx.products = products
        ctx.step = None if products is None else products.draws.step
        ctx.input_dtype = x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        bias = None if bias is None else bias.to(dtype)
        return F.linear(operand, quantize_weight(weight, dtype), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        weight, *tensors = ctx.saved_tensors
        products = ctx.products
        if products is not None:
            check_step(products.draws, ctx.step)
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            if products is None:
                grad_x = grad @ ctx.quantize_weight(weight, grad.dtype)
            else:
                grad_x = products.grad_x(grad, weight, ctx.quantize_weight)
            grad_x = grad_x.to(ctx.input_dtype)
        rows = grad.reshape(-1, grad.shape[-1])
        if ctx.needs_input_grad[1]:
            kept = restore_input(tuple(tensors), ctx.kept_as)
            kept = kept.reshape(-1, kept.shape[-1])
            if products is None:
                grad_weight = rows.t() @ kept
            else:
                grad_weight = products.grad_weight(rows, kept, weight.shape[-1])
            grad_weight = grad_weight.to(weight.dtype)
        if ctx.needs_input_grad[2]:
            grad_bias = rows.sum(dim=0).to(ctx.bias_dtype)
        if products is not None:
            products.draws.n_backward += 1
        return grad_x, grad_weight, grad_bias, None, None, None, None, None, None
