# SPDX-License-Identifier: Apache-2.0
"""The linear layer on quantized operands, with the straight-through gradient.

Forward ``y = Q(x) Q(W)^T + b``. The quantizers are passed over by the gradient (straight-through estimator), and the
backward products run on the operands of the forward one: ``dx = g Q(W)``, ``dW = g^T Q(x)``, ``db = sum g``
(arXiv 2605.20402, section 2: forward operands in MXFP4, output gradients in full precision).
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable


Quantizer = Callable[[torch.Tensor, torch.dtype], torch.Tensor]


def quantized_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    quantize_input: Quantizer,
    quantize_weight: Quantizer,
) -> torch.Tensor:
    """``Q(x) Q(W)^T + b`` with straight-through gradients.

    Args:
        x: ``[..., K]``.
        weight: master weight ``[N, K]``; read, never written.
        bias: ``[N]`` or `None`.
        quantize_input, quantize_weight: map an operand and the dtype of the product to the operand's quantized values
            in that dtype. The weight's is called again in the backward pass, on the weight as it is then: a sharded
            engine may have freed what the forward pass saw.

    Returns:
        ``[..., N]`` in the autocast dtype when autocast is on, otherwise in the dtype of ``x``.
    """
    dtype = autocast_dtype(x) or x.dtype
    return _QuantizedLinear.apply(x, weight, bias, quantize_input, quantize_weight, dtype)


def autocast_dtype(x: torch.Tensor) -> torch.dtype | None:
    """What autocast would compute a product of ``x`` in; `None` when it is off or leaves ``x`` alone (float64)."""
    device = x.device.type
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return None
    return None if x.dtype == torch.float64 else torch.get_autocast_dtype(device)


class _QuantizedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, quantize_input, quantize_weight, dtype):
        quantized_x = quantize_input(x, dtype)
        # A frozen weight, as under LoRA, needs no input kept for its gradient.
        ctx.save_for_backward(quantized_x if ctx.needs_input_grad[1] else None, weight)
        ctx.quantize_weight = quantize_weight
        ctx.input_dtype = x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        bias = None if bias is None else bias.to(dtype)
        return F.linear(quantized_x, quantize_weight(weight, dtype), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        quantized_x, weight = ctx.saved_tensors
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = (grad @ ctx.quantize_weight(weight, grad.dtype)).to(ctx.input_dtype)
        rows = grad.reshape(-1, grad.shape[-1])
        if ctx.needs_input_grad[1]:
            grad_weight = (rows.t() @ quantized_x.reshape(-1, quantized_x.shape[-1])).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            grad_bias = rows.sum(dim=0).to(ctx.bias_dtype)
        return grad_x, grad_weight, grad_bias, None, None, None
