# SPDX-License-Identifier: Apache-2.0
"""The linear layer on quantized operands as a differentiable function, of one weight or of all experts."""

import torch
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

from .experts import ExpertsPlan
from .fp8 import FP8Operand
from .groups import Groups
from .plan import LinearPlan
from .state import PLAIN_STATE, GemmState
from .weights import is_cached, keeps_fp8


#: Types of devices that have autocast at all. Dynamo of torch 2.11 does not trace the question.
_AUTOCASTS = frozenset(filter(torch.amp.is_autocast_available, ("cpu", "cuda", "xpu", "mps", "hpu", "mtia")))


def quantized_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: GemmState = PLAIN_STATE,
    groups: Groups | None = None,
) -> torch.Tensor:
    """Return ``Q(x) Q(W)^T + b`` with straight-through gradients; see [`hf_mxfp4.ops.plan`].

    The backward pass quantizes the weight as it is then, where neither a cache nor, on CPUs, the forward pass kept it:
    a sharded engine may have freed what the forward pass saw.

    Args:
        x: ``[..., K]``; with groups ``[S, K]``, rows sorted by expert.
        weight: master weight ``[N, K]``, with groups ``[E, N, K]``, or ``[E, K, N]`` if the spec says transposed; read,
            never written.
        bias: ``[N]``, ``[E, N]`` or `None`.
        state: of the layer, with its spec; by default operands are not quantized.
        groups: the rows of each expert; `None` for one weight.

    Returns:
        ``[..., N]`` in the autocast dtype when autocast is on, otherwise in the dtype of ``x``.
    """
    dtype = autocast_dtype(x) or x.dtype
    if needs_gradient(x, bias, weight):
        return _QuantizedLinear.apply(x, weight, bias, state, groups, dtype, weight.requires_grad)
    return plan_of(state, x, weight, dtype).forward(x, weight, bias, state, groups)[0]


def plan_of(state: GemmState, x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> LinearPlan:
    """Return how a layer multiplies ``x`` and a weight of this shape in ``dtype``.

    A plan depends on nothing else: parameters, caches and random numbers are given to each product, so that one that
    was made before they changed is not stale. Another spec of the layer has other plans.
    """
    key = x.device, dtype, weight.shape
    plan = state.plans.get(key)
    if plan is None or plan.spec is not state.spec:
        plan_class = LinearPlan if weight.dim() == 2 else ExpertsPlan
        plan = state.plans[key] = plan_class(state.spec, *key)
    return plan


class _QuantizedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, state, groups, dtype, weight_needs_grad):
        plan = plan_of(state, x, weight, dtype)
        # A frozen weight, as under LoRA, needs no input saved for its gradient.
        out, saved, operand = plan.forward(x, weight, bias, state, groups, True, weight_needs_grad)
        kept: tuple[torch.Tensor | None, ...] = ()
        if ctx.needs_input_grad[0] and state.spec.reuses_weight:
            kept = _kept_of_operand(operand, weight, state, dtype)
        ctx.save_for_backward(weight, *kept, *saved)
        ctx.n_kept = len(kept)
        ctx.plan = plan
        ctx.state = state
        ctx.groups = groups
        ctx.step = state.step
        return not_a_view(out)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        weight, *tensors = ctx.saved_tensors  # once: checkpointing computes them by another forward pass
        kept = tensors[: ctx.n_kept]
        saved = tensors[ctx.n_kept :]
        operand = None
        if kept:
            operand = kept[0] if len(kept) == 1 else FP8Operand.of_columns(*kept)
        check_step(ctx.state, ctx.step)
        needs = ctx.needs_input_grad[:3]
        gradients = ctx.plan.backward(grad, weight, tuple(saved), operand, ctx.state, ctx.groups, needs)
        return *gradients, *(None,) * 4


def check_step(state: GemmState, step: int | None) -> None:
    """Raise `RuntimeError` when the quantization step is no longer that of the forward pass, for layers whose gradients
    are not plain: their random numbers would be others."""
    if state.spec.is_plain or state.step == step:
        return
    raise RuntimeError(
        f"the quantization step of {state.rngs[0].layer or 'a layer'} went from {step} to {state.step} between its "
        "forward and its backward pass; set it before the forward pass"
    )


def _kept_of_operand(
    operand: torch.Tensor | FP8Operand | None, weight: torch.Tensor, state: GemmState, dtype: torch.dtype
) -> tuple[torch.Tensor | None, ...]:
    """Return what is kept of ``Q(W)`` from the forward pass to the backward pass: its values, or what
    [`FP8Operand.of_columns`] takes, or nothing.

    Nothing is kept in jobs that may shard weights, where copies of all of them would be another model in memory, and
    not where a cache keeps it, which writes the next step's values to the same memory. Values are kept on CPUs alone.
    Transposed E4M3 elements are kept where the forward pass made them.
    """
    dist = torch.distributed
    if operand is None or dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return ()
    if isinstance(operand, torch.Tensor):
        return (operand,) if operand.is_cpu and not is_cached(operand, weight, state) else ()
    if operand.columns is None or keeps_fp8(weight, dtype, state):
        return ()
    return operand.columns, operand.scale, operand.column_scale


# ---- dtypes and gradients -------------------------------------------------------------------------------------------


def needs_gradient(x: torch.Tensor, bias: torch.Tensor | None, weight: torch.Tensor | None = None) -> bool:
    """Whether a product of these has a gradient, so that it must be a function of autograd's. One in forward mode too,
    which that function then refuses."""
    if forward_ad._current_level >= 0:
        return True
    if not torch.is_grad_enabled():
        return False
    return x.requires_grad or weight is not None and weight.requires_grad or bias is not None and bias.requires_grad


def autocast_dtype(x: torch.Tensor) -> torch.dtype | None:
    """Return what autocast would compute a product of ``x`` in; `None` when it is off or leaves ``x`` alone."""
    device = x.device.type
    if device not in _AUTOCASTS or not torch.is_autocast_enabled(device):
        return None
    return None if x.dtype == torch.float64 else torch.get_autocast_dtype(device)


def not_a_view(out: torch.Tensor) -> torch.Tensor:
    """Return a result that nothing else refers to as a tensor of its own: autograd forbids to change a view in place
    that a function of its returned, and `F.linear` of more than two axes returns a view."""
    return torch.ops.aten._unsafe_view(out, out.shape) if out._is_view() else out


def as_dtype(bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """Return the bias in the dtype of the product."""
    return bias if bias is None or bias.dtype is dtype else bias.to(dtype)
