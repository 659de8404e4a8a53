# SPDX-License-Identifier: Apache-2.0
"""The linear layers of many experts at once, on quantized operands, with the straight-through gradient.

What [`hf_mxfp4.gemm.quantized_linear`] is for one weight, for a stack of weights of which each gets its own rows of the
input: every expert's product, forward and backward, is the one that a linear layer of its own would compute. On a GPU
those of all experts are computed together ([`hf_mxfp4.gemm.grouped`]), and the host never learns how many rows each
has.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from ..numerics import MXFP4Tensor
from . import grouped
from .fast_experts import FastExperts
from .groups import Groups
from .linear import LinearRecord, autocast_dtype, check_step, unquantized
from .operands import BackwardProducts, Quantizer
from .packed_weight import PACKED_FIELDS, PackedWeight
from .saved import SavedInput, SavedTensors, keep_input, restore_input


def grouped_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    groups: Groups,
    quantize_input: Quantizer,
    quantize_weight: Quantizer,
    products: Sequence[BackwardProducts] | None = None,
    transposed: bool = False,
    saved: SavedInput | None = None,
    backend: str = "auto",
    fast: FastExperts | None = None,
) -> torch.Tensor:
    """``Q(x) Q(W_e)^T + b_e`` for the rows of each expert ``e``, with straight-through gradients.

    An expert without rows has zero gradients, and nothing random is drawn for it.

    Args:
        x: ``[S, K]``, rows sorted by expert.
        weight: master weights ``[E, N, K]``, or ``[E, K, N]`` with ``transposed``; read, never written.
        bias: ``[E, N]`` or `None`.
        groups: the rows of each expert.
        quantize_input, quantize_weight: as in [`quantized_linear`]; the second maps all of ``weight`` to
            ``[E, N, K]``, and is called again in the backward pass.
        products: of each expert, how gradients are computed; by default from the operands of the forward pass.
        saved: as in [`quantized_linear`].
        backend: ``"triton"`` or, on a GPU, ``"auto"`` for grouped kernels; otherwise one expert after the other.
        fast: takes over products that its engines can compute, as in [`quantized_linear`].

    Returns:
        ``[S, N]`` in the autocast dtype when autocast is on, otherwise in the dtype of ``x``.
    """
    dtype = autocast_dtype(x) or x.dtype
    # Frozen weights, as under LoRA, need no input kept for their gradient.
    needed = weight.requires_grad and torch.is_grad_enabled()
    options = products, transposed, saved or SavedInput(), backend, fast, dtype, needed
    return _GroupedLinear.apply(x, weight, bias, groups, quantize_input, quantize_weight, *options)


def packed_grouped_linear(
    x: torch.Tensor,
    packed: PackedWeight,
    bias: torch.Tensor | None,
    groups: Groups,
    quantize_input: Quantizer,
    dequantize_expert: Callable[[PackedWeight, int, torch.dtype], torch.Tensor],
    stack: Callable[[PackedWeight], MXFP4Tensor] | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """[`grouped_linear`] on frozen packed weights, with the gradient to ``x`` and ``b``.

    Without kernels for it, the weights of one expert at a time are dequantized, of those alone that have rows, and
    again in the backward pass.

    Args:
        packed: the tensors of [`PACKED_FIELDS`], each ``[E, ...]``, `None` for those that the scheme has not.
        dequantize_expert: maps ``packed``, an expert and the dtype of the product to its ``Q(W)`` ``[N, K]``.
        stack: maps ``packed`` to the weights of all experts, codes ``[E, N, ceil(K / 2)]``, for the kernels.
        backend: as in [`grouped_linear`].
    """
    dtype = autocast_dtype(x) or x.dtype
    options = quantize_input, dequantize_expert, stack, backend
    return _PackedGroupedLinear.apply(x, bias, groups, dtype, options, *packed)


@dataclass(frozen=True)
class GroupedPass:
    """What the backward pass must know of the forward pass beside tensors.

    Attributes:
        groups, quantize_weight, products, transposed, backend, fast: as in [`grouped_linear`]; the second is `None`
            where the gradient of the input does not take it.
        record: of the input that was kept, the step and the dtypes, as in [`quantized_linear`].
    """

    groups: Groups
    quantize_weight: Quantizer | None
    products: Sequence[BackwardProducts] | None
    transposed: bool
    backend: str
    fast: FastExperts | None
    record: LinearRecord


def forward_grouped(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    groups: Groups,
    quantize_input: Quantizer,
    quantize_weight: Quantizer,
    products: Sequence[BackwardProducts] | None,
    transposed: bool,
    saved: SavedInput,
    backend: str,
    fast: FastExperts | None,
    dtype: torch.dtype,
    needed: bool,
) -> tuple[torch.Tensor, SavedTensors, GroupedPass]:
    """The forward pass of [`grouped_linear`], without a gradient; as [`hf_mxfp4.gemm.linear.forward_linear`] is."""
    itself = products is not None and products[0].keeps_input
    engine = None if fast is None else fast.engine("fprop", x, weight, dtype=dtype)
    is_fast = engine is not None and engine.name != "dense"
    if is_fast and (itself or not needed):
        quantize_input = unquantized
    quantized_x, kept, kept_as = keep_input(x, dtype, quantize_input, saved, needed=needed, itself=itself)
    step = None if products is None else products[0].draws.step
    record = LinearRecord(kept_as, step, x.dtype, None if bias is None else bias.dtype)
    done = GroupedPass(groups, quantize_weight, products, transposed, backend, fast, record)
    bias = None if bias is None else bias.to(dtype)
    if is_fast:
        return fast.forward(x, weight, transposed, groups, bias, dtype), kept, done
    right = quantize_weight(weight, dtype)
    if grouped.uses_kernels(quantized_x, backend):
        return grouped.product(quantized_x, right, groups, bias), kept, done
    return _each(quantized_x, bias, groups, right.__getitem__, right.shape[1]), kept, done


def backward_grouped(
    grad: torch.Tensor, weight: torch.Tensor, kept: SavedTensors, done: GroupedPass, needs: Sequence[bool]
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """The gradients of ``x``, the weight and the bias, `None` for those that ``needs`` does not ask for.

    Raises `RuntimeError` when the quantization step has moved on since the forward pass.
    """
    groups, products, record = done.groups, done.products, done.record
    if products is not None:
        check_step(products[0].draws, record.step)
    grad_x = grad_weight = grad_bias = None

    def values() -> torch.Tensor:
        return restore_input(kept, record.kept_as)

    if done.fast is not None:
        grad_x, grad_weight = done.fast.gradients(grad, weight, done.transposed, groups, values, (needs[0], needs[1]))
    if needs[0]:
        grad_x = _grad_x(done, grad, weight) if grad_x is None else grad_x
        grad_x = grad_x.to(record.input_dtype)
    if needs[1] and grad_weight is None:
        grad_weight = _grad_weight(done, grad, values(), weight)
    if needs[2]:
        grad_bias = grad_bias_of(grad, groups, record.bias_dtype, done.backend)
    # What was drawn for all experts together depends on no count.
    for expert, _ in groups if products is not None and not _is_grouped(done, grad) else ():
        products[expert].draws.n_backward += 1
    return grad_x, grad_weight, grad_bias


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, *options):
        out, kept, done = forward_grouped(x, weight, bias, *options)
        reused = ctx.needs_input_grad[0] and (done.products is None or done.products[0].reuses_weight)
        # It may hold what it has made of the weights.
        ctx.done = done if reused else replace(done, quantize_weight=None)
        ctx.save_for_backward(weight, *kept)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        weight, *kept = ctx.saved_tensors
        needs = ctx.needs_input_grad[:3]
        return *backward_grouped(grad, weight, tuple(kept), ctx.done, needs), *(None,) * 10


def _is_grouped(done: GroupedPass, grad: torch.Tensor) -> bool:
    """Whether the gradients of all experts are computed together."""
    return grouped.uses_kernels(grad, done.backend) and grouped.obstacle(done.products) is None


def _grad_x(done: GroupedPass, grad: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    masters = weight.transpose(1, 2) if done.transposed else weight
    reused = None
    if done.products is None or done.products[0].reuses_weight:
        reused = done.quantize_weight(weight, grad.dtype)
    if _is_grouped(done, grad):
        return grouped.grad_x(None if done.products is None else done.products[0], grad, masters, reused, done.groups)
    grad_x = grad.new_empty(grad.shape[0], masters.shape[2])
    for expert, rows in done.groups:
        if done.products is None:
            grad_x[rows] = grad[rows] @ reused[expert]
        else:
            own = None if reused is None else reused[expert]
            grad_x[rows] = done.products[expert].grad_x(grad[rows], masters[expert], lambda *_, own=own: own)
    return grad_x


def _grad_weight(done: GroupedPass, grad: torch.Tensor, kept: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    groups, products = done.groups, done.products
    if _is_grouped(done, grad):
        in_features = weight.shape[1 if done.transposed else 2]
        one = None if products is None else products[0]
        return grouped.grad_weight(one, grad, kept, in_features, groups, weight.dtype, done.transposed)
    grad_weight = torch.zeros_like(weight)
    rows_first = grad_weight.transpose(1, 2) if done.transposed else grad_weight
    for expert, rows in groups:
        if products is None:
            rows_first[expert] = grad[rows].t() @ kept[rows]
        else:
            rows_first[expert] = products[expert].grad_weight(grad[rows], kept[rows], rows_first.shape[2])
    return grad_weight


def grad_bias_of(grad: torch.Tensor, groups: Groups, dtype: torch.dtype, backend: str) -> torch.Tensor:
    """``[E, N]``, the sums of each expert's rows."""
    if grouped.uses_kernels(grad, backend):
        return grouped.grad_bias(grad, groups, dtype)
    grad_bias = grad.new_zeros(groups.n_experts, grad.shape[1], dtype=dtype)
    for expert, rows in groups:
        grad_bias[expert] = grad[rows].sum(dim=0)
    return grad_bias


def _each(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    groups: Groups,
    weight_of: Callable[[int], torch.Tensor],
    out_features: int,
) -> torch.Tensor:
    """One product for each expert that has rows."""
    out = x.new_empty(x.shape[0], out_features)
    for expert, rows in groups:
        out[rows] = F.linear(x[rows], weight_of(expert), None if bias is None else bias[expert])
    return out


def forward_packed_grouped(
    x: torch.Tensor,
    packed: PackedWeight,
    bias: torch.Tensor | None,
    groups: Groups,
    dtype: torch.dtype,
    quantize_input: Quantizer,
    dequantize_expert: Callable[[PackedWeight, int, torch.dtype], torch.Tensor],
    stack: Callable[[PackedWeight], MXFP4Tensor] | None,
    backend: str,
) -> torch.Tensor:
    """The forward pass of [`packed_grouped_linear`], without a gradient."""
    bias = None if bias is None else bias.to(dtype)
    x = quantize_input(x, dtype)
    weight = _kernel_weight(packed, stack, x, backend)
    if weight is not None:
        return grouped.packed_product(x, weight, groups, bias)
    return _each(x, bias, groups, lambda e: dequantize_expert(packed, e, dtype), packed[0].shape[1])


def packed_grad_x(
    grad: torch.Tensor,
    packed: PackedWeight,
    groups: Groups,
    in_features: int,
    dequantize_expert: Callable[[PackedWeight, int, torch.dtype], torch.Tensor],
    stack: Callable[[PackedWeight], MXFP4Tensor] | None,
    backend: str,
) -> torch.Tensor:
    """The gradient ``[S, K]`` of the input of [`packed_grouped_linear`]."""
    weight = _kernel_weight(packed, stack, grad, backend)
    if weight is not None:
        return grouped.product(grad, grouped.dequantized(weight, grad.dtype).transpose(1, 2), groups)
    grad_x = grad.new_empty(grad.shape[0], in_features)
    for expert, rows in groups:
        grad_x[rows] = grad[rows] @ dequantize_expert(packed, expert, grad.dtype)
    return grad_x


class _PackedGroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bias, groups, dtype, options, *packed):
        ctx.save_for_backward(*packed)
        ctx.groups, ctx.options = groups, options
        ctx.in_features, ctx.input_dtype = x.shape[1], x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        return forward_packed_grouped(x, packed, bias, groups, dtype, *options)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        grad_x = grad_bias = None
        if ctx.needs_input_grad[0]:
            packed = ctx.saved_tensors  # once: under gradient checkpointing they can be unpacked only once
            grad_x = packed_grad_x(grad, packed, ctx.groups, ctx.in_features, *ctx.options[1:]).to(ctx.input_dtype)
        if ctx.needs_input_grad[1]:
            grad_bias = grad_bias_of(grad, ctx.groups, ctx.bias_dtype, ctx.options[-1])
        return (grad_x, grad_bias) + (None,) * (3 + len(PACKED_FIELDS))


def _kernel_weight(
    packed: PackedWeight, stack: Callable[[PackedWeight], MXFP4Tensor] | None, x: torch.Tensor, backend: str
) -> MXFP4Tensor | None:
    """The weights of all experts where the kernels take them; else `None`."""
    weight = None if stack is None or not grouped.uses_kernels(x, backend) else stack(packed)
    return weight if weight is not None and grouped.reads_packed(weight, x) else None
