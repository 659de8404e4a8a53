# SPDX-License-Identifier: Apache-2.0
"""The linear layer on quantized operands, with the straight-through gradient: of one weight, or of all experts.

Forward ``y = Q(x) Q(W)^T + b``. The quantizers are passed over by the gradient (straight-through estimator), and the
backward products run on the operands of the forward one: ``dx = g Q(W)``, ``dW = g^T Q(x)``, ``db = sum g``
(arXiv 2605.20402, section 2: forward operands in MXFP4, output gradients in full precision), unless the scheme of the
layer says otherwise. With groups, each expert's rows of the input meet the expert's weight, and every expert's product,
forward and backward, is the one that a linear layer of its own would compute.

What a product does, in this order: choose its kernel ([`choose`]), make its operands ([`operands`]) and what is saved
of the input ([`saved`]), multiply ([`fast`] and [`fast_grouped`], or dense values: [`dense`] and [`grouped`]).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

from . import dense, grouped
from .groups import Groups
from .layer_rng import LayerRng
from .operands import input_operand, kept_weight_operand, weight_by_macro, weight_with_macro
from .saved import SavedInput, SavedRecord, SavedTensors, restore_input, save_input
from .spec import FULL_PRECISION, GemmSpec
from .state import GemmState
from .tensor_cores import fast, fast_grouped
from .tensor_cores.choose import expected_kernel, kernel_of_product
from .weight_cache import backward_pass, kept_for_backward


#: Operands that were made already: of the input, also with what is saved of it, and of the weight.
Given = tuple[torch.Tensor | SavedInput | None, torch.Tensor | None]

#: Types of devices that have autocast at all. Dynamo of torch 2.11 does not trace the question.
_AUTOCASTS = frozenset(filter(torch.amp.is_autocast_available, ("cpu", "cuda", "xpu", "mps", "hpu", "mtia")))

#: Of products whose operands are not quantized.
PLAIN_STATE = GemmState(FULL_PRECISION)


def quantized_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: GemmState = PLAIN_STATE,
    groups: Groups | None = None,
    *,
    input_operand: torch.Tensor | SavedInput | None = None,
    weight_operand: torch.Tensor | None = None,
) -> torch.Tensor:
    """``Q(x) Q(W)^T + b`` with straight-through gradients.

    The backward pass quantizes the weight as it is then: a sharded engine may have freed what the forward pass saw
    (but see [`kept_for_backward`] and [`GemmState.hand_over`]). An expert without rows has zero gradients, and nothing
    random is drawn for it.

    Args:
        x: ``[..., K]``; with groups ``[S, K]``, rows sorted by expert.
        weight: master weight ``[N, K]``, with groups ``[E, N, K]``, or ``[E, K, N]`` if the spec says transposed; read,
            never written.
        bias: ``[N]``, ``[E, N]`` or `None`.
        state: of the layer, with its spec; by default operands are not quantized.
        groups: the rows of each expert; `None` for one weight.
        input_operand, weight_operand: take the place of ``Q(x)`` and of ``Q(W)``, in the dtype of the product; or of
            ``Q(x)`` and what is saved of it.

    Returns:
        ``[..., N]`` in the autocast dtype when autocast is on, otherwise in the dtype of ``x``.
    """
    dtype, given = autocast_dtype(x) or x.dtype, (input_operand, weight_operand)
    if not needs_gradient(x, bias, weight):
        return linear_forward(x, weight, bias, state, groups, dtype, False, given)[0]
    return linear_with_gradient(x, weight, bias, state, groups, dtype, given)


def linear_with_gradient(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: GemmState,
    groups: Groups | None,
    dtype: torch.dtype,
    given: Given = (None, None),
) -> torch.Tensor:
    """[`quantized_linear`] where a gradient is asked for, with a product of this dtype and the operands ``given``."""
    # A frozen weight, as under LoRA, needs no input saved for its gradient.
    weight_needs_grad = weight.requires_grad and torch.is_grad_enabled()
    return _QuantizedLinear.apply(x, weight, bias, state, groups, dtype, weight_needs_grad, given)


def needs_gradient(x: torch.Tensor, bias: torch.Tensor | None, weight: torch.Tensor | None = None) -> bool:
    """Whether a product of these has a gradient, so that it must be a function of autograd's. One in forward mode too,
    which that function then refuses."""
    if forward_ad._current_level >= 0:
        return True
    if not torch.is_grad_enabled():
        return False
    return x.requires_grad or weight is not None and weight.requires_grad or bias is not None and bias.requires_grad


def can_autocast(device_type: str) -> bool:
    """Whether devices of a type have autocast at all."""
    return device_type in _AUTOCASTS


def autocast_dtype(x: torch.Tensor) -> torch.dtype | None:
    """Return what autocast would compute a product of ``x`` in; `None` when it is off or leaves ``x`` alone
    (float64)."""
    device = x.device.type
    if not can_autocast(device) or not torch.is_autocast_enabled(device):
        return None
    return None if x.dtype == torch.float64 else torch.get_autocast_dtype(device)


def not_a_view(out: torch.Tensor) -> torch.Tensor:
    """Return a result that nothing else refers to as a tensor of its own: autograd forbids to change a view in place
    that a function of its returned, and `F.linear` of more than two axes returns a view."""
    return torch.ops.aten._unsafe_view(out, out.shape) if out._is_view() else out


def as_dtype(bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """The bias in the dtype of the product."""
    return bias if bias is None or bias.dtype is dtype else bias.to(dtype)


@dataclass(frozen=True)
class LinearRecord:
    """What the backward pass must know of the forward pass beside tensors.

    Attributes:
        saved: how the input was saved.
        step: the quantization step, of layers whose gradients are not plain; otherwise `None`.
        input_dtype, bias_dtype: of the gradients; `None` for a bias that is not there.
        macro: macro bytes of the weight that a search found and Dgrad needs again; see [`weight_by_macro`].
    """

    saved: SavedRecord
    step: int | None
    input_dtype: torch.dtype
    bias_dtype: torch.dtype | None
    macro: torch.Tensor | None = None


def linear_forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: GemmState,
    groups: Groups | None,
    dtype: torch.dtype,
    weight_needs_grad: bool,
    given: Given = (None, None),
    saves_operand: bool = False,
) -> tuple[torch.Tensor, SavedTensors, LinearRecord, torch.Tensor | None]:
    """The forward pass of [`quantized_linear`], without a gradient.

    Args:
        x, weight, bias, state, groups: as there.
        dtype: of the product.
        weight_needs_grad: whether the gradient of the weight will be asked for.
        given: operands that were made already.
        saves_operand: whether what is saved may be what a kernel for tensor cores will take in the backward pass. Not
            in compiled code, which must know the shapes beforehand.

    Returns:
        The output, what was saved of ``x``, the record, and the operand of the weight, `None` where there was none.
    """
    spec, kernel, right = state.spec, "dense", given[1]
    if right is None and spec.gemm_kernel != "dense":
        kernel = kernel_of_product("fprop", spec, x, weight, dtype=dtype, experts=groups is not None)
    left = found = None
    if weight_needs_grad and kernel != "dense":
        of_experts = None if groups is None else weight.dtype
        left, found = _saved_operand(kernel, x, dtype, bias is not None, state, saves_operand, of_experts)
    if found is None:
        found = save_input(
            x,
            dtype,
            state,
            groups,
            weight_needs_grad=weight_needs_grad,
            multiplies=kernel == "dense",
            given=given[0],
        )
    operand, tensors, saved = found
    step = None if spec.is_plain else state.rngs[0].step
    record = LinearRecord(saved, step, x.dtype, None if bias is None else bias.dtype)
    bias = as_dtype(bias, dtype)
    if kernel != "dense":
        if groups is None:
            out, macro = fast.forward(kernel, x, weight, bias, dtype, state, left)
            return out, tensors, _with_macro(record, macro, spec, saves_operand), None
        return fast_grouped.forward(x, weight, bias, dtype, groups, state, left), tensors, record, None
    if right is None and groups is None and saves_operand and not kept_for_backward(weight):
        right, macro = weight_with_macro(weight, dtype, state)
        record = _with_macro(record, macro, spec, saves_operand)
    if right is None:
        right = kept_weight_operand(weight, dtype, state)
    if groups is None:
        return F.linear(operand, right, bias), tensors, record, right
    return grouped.forward(operand, right, bias, groups, spec.backend), tensors, record, right


def _with_macro(record: LinearRecord, macro: torch.Tensor | None, spec: GemmSpec, keeps: bool) -> LinearRecord:
    return replace(record, macro=macro) if keeps and macro is not None and spec.reuses_weight else record


def _saved_operand(
    kernel: str,
    x: torch.Tensor,
    dtype: torch.dtype,
    has_bias: bool,
    state: GemmState,
    in_any_form: bool,
    of_experts: torch.dtype | None,
) -> tuple[Any, SavedInput | None]:
    """For an input whose quantized values Wgrad takes as well, and a forward product on tensor cores: the operand of
    that, where it is made together with what is saved, and what is saved. `None` twice for another input, and where a
    form was asked for. ``in_any_form``: as [`linear_forward`] has ``saves_operand``; ``of_experts``: the dtype of their
    weights, `None` for one weight.
    """
    spec, fprop = state.spec, state.spec.scheme.fprop
    if spec.saved != "full" or spec.saves_raw_input or fprop.left.block_rows != 1 or not x.numel():
        return None, None
    experts = of_experts is not None
    folds = expected_kernel("wgrad", spec, x, dtype=of_experts or dtype, experts=experts) == "fp8"
    if in_any_form and folds and not experts and fast.folds_input(spec.scheme, has_bias, kernel):
        return fast.fold_input(kernel, x, dtype, state)
    if fprop.left.rounding != "nearest" or fprop.rotation is not None:
        return None, None
    if in_any_form and folds and x.element_size() <= dtype.itemsize:
        return None, SavedInput(None, (x,), SavedRecord("input", dtype))
    if x.dtype == dtype:
        whole = not experts and fast.whole_rows(spec.scheme, has_bias)
        left, values = fast.input_with_values(kernel, x, whole, state)
        return left, SavedInput(None, (values,), SavedRecord("full", dtype))
    return None, None


def linear_backward(
    grad: torch.Tensor,
    weight: torch.Tensor,
    tensors: SavedTensors,
    record: LinearRecord,
    state: GemmState,
    groups: Groups | None,
    needs: Sequence[bool],
    reused: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """The gradients of ``x``, the weight and the bias, `None` for those that ``needs`` does not ask for.

    Args:
        grad: ``[..., N]``.
        weight: the master weight as it is now.
        tensors, record: from [`linear_forward`].
        state, groups: as there.
        reused: the operand of the weight in the forward product where that was kept.

    Raises `RuntimeError` when the quantization step has moved on since the forward pass.
    """
    spec, rng = state.spec, state.rng_of(0)
    if not spec.is_plain:
        check_step(rng, record.step)
    grad_x = grad_weight = grad_bias = left = left_t = None
    rows = grad.reshape(-1, grad.shape[-1])

    def saved_rows() -> torch.Tensor:
        values = restore_input(tensors, record.saved)
        return values.reshape(-1, values.shape[-1])

    if spec.gemm_kernel != "dense":
        folded = tensors if record.saved.form == "folded" else None
        grad_x, grad_weight = _fast_gradients(rows, weight, saved_rows, state, groups, needs, folded)
    if groups is None and not spec.is_plain and needs[0] and needs[1] and grad_x is None and grad_weight is None:
        left, left_t = dense.quantized_grads(rows, spec, rng)
    if needs[0]:
        if grad_x is not None:
            grad_x = grad_x.view(*grad.shape[:-1], grad_x.shape[-1])
        else:
            if not spec.reuses_weight:
                reused = None
            elif reused is None or reused.dtype != grad.dtype:
                reused = weight_by_macro(weight, record.macro, grad.dtype, state)
            if groups is None:
                grad_x = dense.grad_x(grad, weight, reused, spec, rng, left)
            else:
                grad_x = grouped.grad_x(grad, weight, reused, groups, state)
        grad_x = grad_x.to(record.input_dtype)
    if needs[1]:
        if grad_weight is None:
            values = saved_rows()
            if record.saved.form == "input":
                values = input_operand(values, record.saved.dtype, state, groups)
            if groups is None:
                grad_weight = dense.grad_weight(rows, values, weight.shape[-1], spec, rng, left_t)
            else:
                grad_weight = grouped.grad_weight(grad, values, weight, groups, state)
        grad_weight = grad_weight.to(weight.dtype)
    if needs[2] and groups is None:
        grad_bias = rows.sum(dim=0).to(record.bias_dtype)
    elif needs[2]:
        grad_bias = grouped.grad_bias(grad, groups, record.bias_dtype, spec.backend)
    if spec.is_random:
        _count_pass(state, groups)
    return grad_x, grad_weight, grad_bias


def _fast_gradients(
    rows, weight, saved_rows, state, groups, needs, folded
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """``dx`` and ``dW`` as far as they are needed and a fast kernel takes them; see [`fast.gradients`]."""
    spec, experts = state.spec, groups is not None
    dgrad = wgrad = "dense"
    if needs[0]:
        dgrad = kernel_of_product("dgrad", spec, rows, weight, dtype=rows.dtype, experts=experts)
    if needs[1]:
        wgrad = kernel_of_product("wgrad", spec, rows, dtype=weight.dtype if experts else rows.dtype, experts=experts)
    if groups is None:
        return fast.gradients(rows, weight, saved_rows, state, dgrad, wgrad, folded)
    return fast_grouped.gradients(rows, weight, saved_rows, groups, state, dgrad, wgrad)


def check_step(rng: LayerRng, step: int) -> None:
    """Raise `RuntimeError` unless ``rng`` is still at the ``step`` of the forward pass."""
    if rng.step != step:
        raise RuntimeError(
            f"the quantization step of {rng.layer or 'a layer'} went from {step} to {rng.step} between its forward "
            "and its backward pass; set it before the forward pass"
        )


def _count_pass(state: GemmState, groups: Groups | None) -> None:
    """Let the next backward pass of the step draw other numbers, of each expert that had rows in this one."""
    if groups is None:
        state.rngs[0].n_backward += 1
        return
    for expert, _ in groups:
        state.rngs[expert].n_backward += 1


class _QuantizedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, state, groups, dtype, weight_needs_grad, given):
        out, tensors, ctx.record, right = linear_forward(
            x, weight, bias, state, groups, dtype, weight_needs_grad, given, saves_operand=True
        )
        ctx.save_for_backward(weight, *tensors)
        reused = ctx.needs_input_grad[0] and state.spec.reuses_weight
        keeps = given[1] is not None or kept_for_backward(weight) or backward_pass() is not None
        ctx.weight_operand = right if reused and keeps else None
        if reused and given[1] is None:
            state.hand_over(right)
        ctx.state, ctx.groups, ctx.keeps_operand = state, groups, given[1] is not None
        return not_a_view(out)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        weight, *tensors = ctx.saved_tensors  # which checkpointing computes by another forward pass
        handed, reused = ctx.state.take_over(), ctx.weight_operand
        reused = handed if reused is None else reused
        if not ctx.keeps_operand:  # it is as large as the weight, and only `retain_graph` asks a second time
            ctx.weight_operand = None
        needs = ctx.needs_input_grad[:3]
        gradients = linear_backward(grad, weight, tuple(tensors), ctx.record, ctx.state, ctx.groups, needs, reused)
        return *gradients, *(None,) * 5
