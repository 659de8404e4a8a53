# SPDX-License-Identifier: Apache-2.0
"""The linear layer on quantized operands, with the straight-through gradient.

Forward ``y = Q(x) Q(W)^T + b``. The quantizers are passed over by the gradient (straight-through estimator), and the
backward products run on the operands of the forward one: ``dx = g Q(W)``, ``dW = g^T Q(x)``, ``db = sum g``
(arXiv 2605.20402, section 2: forward operands in MXFP4, output gradients in full precision), unless
[`BackwardProducts`] say otherwise.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from .fast_products import FastProducts
from .layer_rng import Draws
from .operands import BackwardProducts, Quantizer
from .saved import SavedInput, SavedRecord, SavedTensors, keep_input, restore_input


def quantized_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    quantize_input: Quantizer,
    quantize_weight: Quantizer,
    products: BackwardProducts | None = None,
    saved: SavedInput | None = None,
    fast: FastProducts | None = None,
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
        fast: takes over products that its engines can compute, from the master weight and the input themselves; by
            default all are dense.

    Returns:
        ``[..., N]`` in the autocast dtype when autocast is on, otherwise in the dtype of ``x``.
    """
    dtype = autocast_dtype(x) or x.dtype
    # A frozen weight, as under LoRA, needs no input kept for its gradient.
    needed = weight.requires_grad and torch.is_grad_enabled()
    return _QuantizedLinear.apply(
        x, weight, bias, quantize_input, quantize_weight, products, dtype, saved or SavedInput(), fast, needed
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


@dataclass(frozen=True)
class LinearRecord:
    """What the backward pass must know of the forward pass beside tensors.

    Attributes:
        kept_as: how the input was kept.
        step: the quantization step, of layers whose backward products may draw random numbers; otherwise `None`.
        input_dtype, bias_dtype: of the gradients; `None` for a bias that is not there.
    """

    kept_as: SavedRecord
    step: int | None
    input_dtype: torch.dtype
    bias_dtype: torch.dtype | None


def forward_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    quantize_input: Quantizer,
    quantize_weight: Quantizer,
    products: BackwardProducts | None,
    dtype: torch.dtype,
    saved: SavedInput,
    fast: FastProducts | None,
    needed: bool,
) -> tuple[torch.Tensor, SavedTensors, LinearRecord]:
    """The forward pass of [`quantized_linear`], without a gradient.

    Args:
        x, weight, bias, quantize_input, quantize_weight, products, saved, fast: as there.
        dtype: of the product.
        needed: whether the gradient of the weight will be asked for.

    Returns:
        The output, and for [`backward_linear`] what was kept of ``x``, and the record.
    """
    itself = products is not None and products.keeps_input
    engine = None if fast is None else fast.engine("fprop", x, weight, dtype=dtype)
    is_fast = engine is not None and engine.name != "dense"
    if is_fast and (itself or not needed):
        quantize_input = unquantized
    operand, kept, kept_as = keep_input(x, dtype, quantize_input, saved, needed=needed, itself=itself)
    step = None if products is None else products.draws.step
    record = LinearRecord(kept_as, step, x.dtype, None if bias is None else bias.dtype)
    bias = None if bias is None else bias.to(dtype)
    if is_fast:
        return fast.forward(engine, x, weight, bias, dtype), kept, record
    return F.linear(operand, quantize_weight(weight, dtype), bias), kept, record


def unquantized(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Stands for the operand of a product that makes its own."""
    return x


def backward_linear(
    grad: torch.Tensor,
    weight: torch.Tensor,
    kept: SavedTensors,
    record: LinearRecord,
    quantize_weight: Quantizer | None,
    products: BackwardProducts | None,
    fast: FastProducts | None,
    needs: Sequence[bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """The gradients of ``x``, the weight and the bias, `None` for those that ``needs`` does not ask for.

    Args:
        grad: ``[..., N]``.
        weight: the master weight as it is now.
        kept, record: from [`forward_linear`].
        quantize_weight, products, fast: as there; the first `None` where the gradient of ``x`` does not take it.

    Raises `RuntimeError` when the quantization step has moved on since the forward pass.
    """
    if products is not None:
        check_step(products.draws, record.step)
    grad_x = grad_weight = grad_bias = None
    rows = grad.reshape(-1, grad.shape[-1])

    def values() -> torch.Tensor:
        found = restore_input(kept, record.kept_as)
        return found.reshape(-1, found.shape[-1])

    if fast is not None:
        grad_x, grad_weight = fast.gradients(rows, weight, values, (needs[0], needs[1]))
    left = left_t = None
    if products is not None and all(needs[:2]) and grad_x is None and grad_weight is None:
        left, left_t = products.quantized_grad(rows)
    if needs[0]:
        if grad_x is not None:
            grad_x = grad_x.view(*grad.shape[:-1], grad_x.shape[-1])
        elif products is None:
            grad_x = grad @ quantize_weight(weight, grad.dtype)
        else:
            grad_x = products.grad_x(grad, weight, quantize_weight, left)
        grad_x = grad_x.to(record.input_dtype)
    if needs[1]:
        if grad_weight is None and products is None:
            grad_weight = rows.t() @ values()
        elif grad_weight is None:
            grad_weight = products.grad_weight(rows, values(), weight.shape[-1], left_t)
        grad_weight = grad_weight.to(weight.dtype)
    if needs[2]:
        grad_bias = rows.sum(dim=0).to(record.bias_dtype)
    if products is not None:
        products.draws.n_backward += 1
    return grad_x, grad_weight, grad_bias


class _QuantizedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, quantize_input, quantize_weight, products, dtype, saved, fast, needed):
        out, kept, ctx.record = forward_linear(
            x, weight, bias, quantize_input, quantize_weight, products, dtype, saved, fast, needed
        )
        ctx.save_for_backward(weight, *kept)
        # It may hold what it has made of the weight, and is let go where that is not used again.
        reused = ctx.needs_input_grad[0] and (products is None or products.reuses_weight)
        ctx.quantize_weight = quantize_weight if reused else None
        ctx.products, ctx.fast = products, fast
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        weight, *kept = ctx.saved_tensors
        needs = ctx.needs_input_grad[:3]
        how = ctx.quantize_weight, ctx.products, ctx.fast
        return *backward_linear(grad, weight, tuple(kept), ctx.record, *how, needs), *(None,) * 7
