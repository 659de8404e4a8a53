# SPDX-License-Identifier: Apache-2.0
"""The linear layers of many experts at once, on quantized operands, with the straight-through gradient.

What [`hf_mxfp4.ops.quantized_linear`] is for one weight, for a stack of weights of which each gets its own rows of the
input: every expert's product, forward and backward, is the one that a linear layer of its own would compute.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from .gemms import BackwardProducts, Quantizer
from .linear import autocast_dtype, check_step
from .packed import PACKED_FIELDS, PackedWeight
from .saved import SavedInput, keep_input, restore_input


@dataclass(frozen=True)
class Groups:
    """Rows sorted by expert: the first ``counts[0]`` belong to expert 0, and so on."""

    counts: tuple[int, ...]

    def __iter__(self) -> Iterator[tuple[int, slice]]:
        """Experts that have rows, and the rows."""
        start = 0
        for expert, count in enumerate(self.counts):
            if count:
                yield expert, slice(start, start + count)
            start += count

    @cached_property
    def _ends(self) -> torch.Tensor:
        return torch.tensor(self.counts).cumsum(0, dtype=torch.int32)

    def offsets(self, device: torch.device) -> torch.Tensor:
        """int32 ``[experts]``: where the rows of each expert end."""
        return self._ends.to(device)

    def per_row(self, values: torch.Tensor) -> torch.Tensor:
        """``values [experts, ...]`` repeated for the rows of each expert: ``[rows, ...]``."""
        counts = torch.tensor(self.counts, device=values.device)
        return values.repeat_interleave(counts, dim=0, output_size=sum(self.counts))


def group_by_expert(expert_ids: torch.Tensor, n_experts: int) -> tuple[torch.Tensor, Groups]:
    """The order that sorts rows by expert, rows of one expert as they were, and their groups.

    Args:
        expert_ids: the expert of each row, an integer vector.

    Raises `ValueError` for a row of an expert that does not exist, as in expert parallelism.
    """
    counts = torch.bincount(expert_ids, minlength=n_experts).tolist()
    if len(counts) > n_experts:
        raise ValueError(
            f"a token was sent to expert {len(counts) - 1} of {n_experts}; MXFP4 experts know no expert parallelism"
        )
    return torch.sort(expert_ids, stable=True).indices, Groups(tuple(counts))


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

    Returns:
        ``[S, N]`` in the autocast dtype when autocast is on, otherwise in the dtype of ``x``.
    """
    dtype = autocast_dtype(x) or x.dtype
    # Frozen weights, as under LoRA, need no input kept for their gradient.
    needed = weight.requires_grad and torch.is_grad_enabled()
    options = products, transposed, dtype, saved or SavedInput(), needed
    return _GroupedLinear.apply(x, weight, bias, groups, quantize_input, quantize_weight, *options)


def packed_grouped_linear(
    x: torch.Tensor,
    packed: PackedWeight,
    bias: torch.Tensor | None,
    groups: Groups,
    quantize_input: Quantizer,
    dequantize_expert: Callable[[PackedWeight, int, torch.dtype], torch.Tensor],
) -> torch.Tensor:
    """[`grouped_linear`] on frozen packed weights, with the gradient to ``x`` and ``b``.

    The weights of one expert at a time are dequantized, of those alone that have rows, and again in the backward pass.

    Args:
        packed: the tensors of [`PACKED_FIELDS`], each ``[E, ...]``, `None` for those that the scheme has not.
        dequantize_expert: maps ``packed``, an expert and the dtype of the product to its ``Q(W)`` ``[N, K]``.
    """
    dtype = autocast_dtype(x) or x.dtype
    return _PackedGroupedLinear.apply(x, bias, groups, quantize_input, dequantize_expert, dtype, *packed)


def runs_grouped(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether PyTorch's grouped product takes these operands, in one kernel launch for all experts: bfloat16 on CUDA
    devices of compute capability 8.0 and up, rows of a multiple of 16 bytes."""
    return (
        left.device.type == "cuda"
        and left.dtype == right.dtype == torch.bfloat16
        and all(size % 8 == 0 for size in (*left.shape[1:], *right.shape[1:]))
        and torch.cuda.get_device_capability(left.device) >= (8, 0)
    )


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, x, weight, bias, groups, quantize_input, quantize_weight, products, transposed, dtype, saved, needed
    ):
        itself = products is not None and products[0].keeps_input
        quantized_x, kept, ctx.kept_as = keep_input(x, dtype, quantize_input, saved, needed=needed, itself=itself)
        ctx.save_for_backward(weight, *kept)
        ctx.groups, ctx.quantize_weight, ctx.products, ctx.transposed = groups, quantize_weight, products, transposed
        ctx.step = None if products is None else products[0].draws.step
        ctx.input_dtype = x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        bias = None if bias is None else bias.to(dtype)
        right = quantize_weight(weight, dtype)
        if runs_grouped(quantized_x, right):
            out = F.grouped_mm(quantized_x, right.transpose(1, 2), offs=groups.offsets(x.device))
            return out if bias is None else out + groups.per_row(bias)
        return _each(quantized_x, bias, groups, right.__getitem__, right.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        weight, *tensors = ctx.saved_tensors
        groups, products = ctx.groups, ctx.products
        if products is not None:
            check_step(products[0].draws, ctx.step)
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = _grad_x(ctx, grad, weight).to(ctx.input_dtype)
        if ctx.needs_input_grad[1]:
            grad_weight = _grad_weight(ctx, grad, restore_input(tuple(tensors), ctx.kept_as), weight)
        if ctx.needs_input_grad[2]:
            grad_bias = _grad_bias(grad, groups, ctx.bias_dtype)
        for expert, _ in groups if products is not None else ():
            products[expert].draws.n_backward += 1
        return grad_x, grad_weight, grad_bias, *(None,) * 8


def _grad_x(ctx, grad: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    masters = weight.transpose(1, 2) if ctx.transposed else weight
    reused = None
    if ctx.products is None or ctx.products[0].reuses_weight:
        reused = ctx.quantize_weight(weight, grad.dtype)
    if ctx.products is None and runs_grouped(grad, reused):
        return F.grouped_mm(grad.contiguous(), reused, offs=ctx.groups.offsets(grad.device))
    grad_x = grad.new_empty(grad.shape[0], masters.shape[2])
    for expert, rows in ctx.groups:
        if ctx.products is None:
            grad_x[rows] = grad[rows] @ reused[expert]
        else:
            own = None if reused is None else reused[expert]
            grad_x[rows] = ctx.products[expert].grad_x(grad[rows], masters[expert], lambda *_, own=own: own)
    return grad_x


def _grad_weight(ctx, grad: torch.Tensor, kept: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    groups, products = ctx.groups, ctx.products
    if products is None and runs_grouped(grad, kept):
        left, right = (kept, grad) if ctx.transposed else (grad, kept)
        grad_weight = F.grouped_mm(left.contiguous().t(), right.contiguous(), offs=groups.offsets(grad.device))
        grad_weight[[expert for expert, count in enumerate(groups.counts) if not count]] = 0
        return grad_weight.to(weight.dtype)
    grad_weight = torch.zeros_like(weight)
    rows_first = grad_weight.transpose(1, 2) if ctx.transposed else grad_weight
    for expert, rows in groups:
        if products is None:
            rows_first[expert] = grad[rows].t() @ kept[rows]
        else:
            rows_first[expert] = products[expert].grad_weight(grad[rows], kept[rows], rows_first.shape[2])
    return grad_weight


def _grad_bias(grad: torch.Tensor, groups: Groups, dtype: torch.dtype) -> torch.Tensor:
    grad_bias = grad.new_zeros(len(groups.counts), grad.shape[1], dtype=dtype)
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


class _PackedGroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bias, groups, quantize_input, dequantize_expert, dtype, *packed):
        ctx.save_for_backward(*packed)
        ctx.groups, ctx.dequantize_expert = groups, dequantize_expert
        ctx.in_features, ctx.input_dtype = x.shape[1], x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        bias = None if bias is None else bias.to(dtype)
        out_features = packed[0].shape[1]
        return _each(
            quantize_input(x, dtype), bias, groups, lambda e: dequantize_expert(packed, e, dtype), out_features
        )

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        grad_x = grad_bias = None
        if ctx.needs_input_grad[0]:
            packed = ctx.saved_tensors  # once: under gradient checkpointing they can be unpacked only once
            grad_x = grad.new_empty(grad.shape[0], ctx.in_features)
            for expert, rows in ctx.groups:
                grad_x[rows] = grad[rows] @ ctx.dequantize_expert(packed, expert, grad.dtype)
            grad_x = grad_x.to(ctx.input_dtype)
        if ctx.needs_input_grad[1]:
            grad_bias = _grad_bias(grad, ctx.groups, ctx.bias_dtype)
        return (grad_x, grad_bias) + (None,) * (4 + len(PACKED_FIELDS))
