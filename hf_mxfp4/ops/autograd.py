# SPDX-License-Identifier: Apache-2.0
"""The linear layer on quantized operands, with the straight-through gradient: of one weight, or of all experts.

Fprop ``y = Q(x) Q(W)^T + b``. The quantizers are passed over by the gradient (straight-through estimator), and the
backward products take the operands of the forward one: Dgrad ``dx = g Q(W)``, Wgrad ``dW = g^T Q(x)``, ``db = sum g``
(arXiv 2605.20402, section 2: forward operands in MXFP4, output gradients in full precision), unless the scheme of the
layer gives them operands of their own (arXiv 2605.09825: all six in MXFP4, rotated). Every expert's product, forward
and backward, is the one that a linear layer of its own would compute on its rows."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

from ..numerics import FP8, FULL, GEMM_OPERANDS, REUSE, GemmScheme, QuantScheme
from . import quantization
from .fp8 import FP8Operand, fold_scales
from .groups import Groups, sum_rows
from .matmul import decodes, fp4_recipe, is_dense_on, matmul, matmul_tokens, multiply, multiply_packed, runs_on_fp8
from .operands import (
    count_weight,
    fp4_weight,
    fp8_weight,
    input_operand,
    packed_input,
    padded_length,
    quantize_operand,
    reader_of_codes,
    rotate_back,
    rotate_operand,
    rows_and_columns,
    rows_first,
    weight_codes,
    weight_operand,
)
from .rng import LayerRng
from .saved import SavedRecord, SavedTensors, restore_input, save_input
from .spec import GemmSpec
from .state import PLAIN_STATE, GemmState


#: Types of devices that have autocast at all. Dynamo of torch 2.11 does not trace the question.
_AUTOCASTS = frozenset(filter(torch.amp.is_autocast_available, ("cpu", "cuda", "xpu", "mps", "hpu", "mtia")))


def quantized_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: GemmState = PLAIN_STATE,
    groups: Groups | None = None,
) -> torch.Tensor:
    """``Q(x) Q(W)^T + b`` with straight-through gradients.

    The backward pass quantizes the weight as it is then, where neither a cache nor, on CPUs, the forward pass kept it:
    a sharded engine may have freed what the forward pass saw. An expert without rows has zero gradients, and nothing
    random is drawn for it.

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
        # A frozen weight, as under LoRA, needs no input saved for its gradient.
        return _QuantizedLinear.apply(x, weight, bias, state, groups, dtype, weight.requires_grad)
    return linear_without_gradient(x, weight, bias, state, groups, dtype)


def linear_without_gradient(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: GemmState,
    groups: Groups | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return the forward product alone, on the weight's codes where a cache keeps them and something multiplies with
    them, but for many rows on tensor cores."""
    reader, recipe, right = reader_of_codes(x, dtype, state), None, None
    if reader is not None:
        recipe = fp4_recipe(x, weight.shape, dtype, state.spec) if groups is None else None
        if recipe is None and not (is_dense_on(x, state.spec) or decodes(x, dtype, reader, groups)):
            right = _fp8_weight("fprop", x, weight, dtype, state, groups)
        if recipe is None and right is None:
            operand, codes = input_operand(x, dtype, state, groups), weight_codes(weight, state)
            return matmul(operand, codes, as_dtype(bias, dtype), groups, spec=state.spec, reader=reader)
    return linear_forward(x, weight, bias, state, groups, dtype, False, recipe, right)[0]


class LinearRecord(NamedTuple):
    """What the backward pass must know of the forward pass beside tensors.

    Attributes:
        saved: how the input was saved.
        step: the quantization step, of layers whose gradients are not plain; otherwise `None`.
        input_dtype, bias_dtype: of the gradients; `None` for a bias that is not there.
    """

    saved: SavedRecord | None
    step: int | None
    input_dtype: torch.dtype
    bias_dtype: torch.dtype | None


def linear_forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: GemmState,
    groups: Groups | None,
    dtype: torch.dtype,
    weight_needs_grad: bool,
    recipe: str | None = None,
    right: FP8Operand | None = None,
) -> tuple[torch.Tensor, SavedTensors, LinearRecord, torch.Tensor | FP8Operand | None]:
    """Fprop: the output, what was saved of ``x`` if ``weight_needs_grad``, the record, and ``Q(W)``, `None` where its
    codes were multiplied. Arguments as of [`quantized_linear`]; ``dtype`` is that of the product, and ``recipe`` or
    ``right`` what FP4 or FP8 tensor cores take, where the caller has found it already."""
    spec, saved, packed, out = state.spec, None, None, None
    tensors: SavedTensors = ()
    if groups is None and right is None:
        recipe = recipe or fp4_recipe(x, weight.shape, dtype, spec)
    if recipe is not None:
        packed = packed_input(x, state)
        out = multiply_packed(packed, fp4_weight(weight, state, recipe), recipe, as_dtype(bias, dtype), dtype)
    if out is None:
        packed, right = None, right or _fp8_weight("fprop", x, weight, dtype, state, groups)
    fp8 = right is not None
    if weight_needs_grad:
        left, tensors, saved = save_input(x, dtype, state, groups, packed, fp8)
    elif out is None:
        left = input_operand(x, dtype, state, groups, fp8)
    if out is None:
        right = right if fp8 else weight_operand(weight, dtype, state)
        out = multiply("fprop", left, right, spec, as_dtype(bias, dtype), groups, dtype if fp8 else None)
    step = None if spec.is_plain else state.rngs[0].step
    return out, tensors, LinearRecord(saved, step, x.dtype, None if bias is None else bias.dtype), right


def _fp8_weight(
    gemm: str, left: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype, state: GemmState, groups: Groups | None
) -> FP8Operand | None:
    """Return the weight of a product with ``left [..., K]`` (Dgrad: ``[..., N]``) where FP8 tensor cores compute it."""
    spec = state.spec
    if is_dense_on(left, spec):
        return None
    n, k = rows_first(weight, spec).shape[-2:]
    size = left.shape[:-1].numel(), n, padded_length(k, spec)
    found = fp8_weight(weight, dtype, state) if runs_on_fp8(gemm, spec, left, dtype, size, groups) else None
    # Scales of rows would go into the gradient, whose blocks of MXFP4 would be others.
    folds = gemm == "dgrad" and found is not None and found.scale.shape[-2] > 1
    return None if folds and spec.scheme.dgrad.left is not FP8 else found


def linear_backward(
    grad: torch.Tensor,
    weight: torch.Tensor,
    tensors: SavedTensors,
    record: LinearRecord,
    state: GemmState,
    groups: Groups | None,
    needs: Sequence[bool],
    right: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Dgrad and Wgrad: the gradients of ``x``, the weight and the bias, `None` for those that ``needs`` does not ask
    for.

    Args:
        grad: ``[..., N]``.
        weight: the master weight as it is now.
        tensors, record: from [`linear_forward`].
        state, groups: as there.
        right: ``Q(W)`` of the forward product where that was kept.

    Raises `RuntimeError` when the quantization step has moved on since the forward pass.
    """
    spec, rng = state.spec, state.rng_of(0)
    if not spec.is_plain and rng.step != record.step:
        raise RuntimeError(
            f"the quantization step of {rng.layer or 'a layer'} went from {record.step} to {rng.step} between its "
            "forward and its backward pass; set it before the forward pass"
        )
    rows, saved = grad.reshape(-1, grad.shape[-1]), None
    if needs[0] and spec.reuses_weight:
        fp8 = _fp8_weight("dgrad", rows, weight, grad.dtype, state, groups)
        if fp8 is not None:
            right = fp8
        elif right is None or right.dtype != grad.dtype:
            right = weight_operand(weight, grad.dtype, state)
    scaled = rows.t()
    if needs[1] and spec.folds_scales and rows.numel():
        elements, scale = FP8Operand.of_bytes(*(tensor.reshape(-1, tensor.shape[-1]) for tensor in tensors))
        scaled, scale = fold_scales(scaled, scale)
        saved = FP8Operand(elements, scale)
    elif needs[1]:
        saved = restore_input(tensors, record.saved, spec.backend)
        saved = saved.reshape(-1, saved.shape[-1])
    masters = rows_first(weight, spec)
    gradients = _gradients if groups is None else _expert_gradients
    grad_x, grad_weight = gradients(rows, scaled, masters, right, saved, state, groups, needs)
    if grad_x is not None:
        grad_x = grad_x.view(*grad.shape[:-1], grad_x.shape[-1]).to(record.input_dtype)
    if grad_weight is not None:
        grad_weight = rows_first(grad_weight, spec).to(weight.dtype)
    grad_bias = sum_rows(rows, groups).to(record.bias_dtype) if needs[2] else None
    _count_pass(state, groups)
    return grad_x, grad_weight, grad_bias


def _gradients(
    rows: torch.Tensor,
    scaled: torch.Tensor,
    masters: torch.Tensor,
    right: torch.Tensor | FP8Operand | None,
    saved: torch.Tensor | FP8Operand | None,
    state: GemmState,
    group: Any,
    needs: Sequence[bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Dgrad ``[M, K]`` and Wgrad ``[N, K]`` of one weight matrix, as far as they are needed.

    Args:
        rows, scaled: the output gradient ``[M, N]``, and ``[N, M]`` as Wgrad takes it; see [`fold_scales`].
        masters, right: ``W`` and ``Q(W)``, of which the scheme takes one.
        saved: what the forward pass saved of the input, ``[M, K]``.
        group: the expert.
    """
    spec, rng = state.spec, state.rng_of(group or 0)
    forward = spec.scheme.fprop.rotation, "fprop", masters.shape[-1], rng  # back from what that product used
    left = left_t = grad_x = grad_weight = None
    if needs[0] and needs[1] and not spec.is_plain:
        left, left_t = rows_and_columns(rows, spec, rng)
    if needs[0]:
        weight = rotate_back(right, *forward) if spec.reuses_weight else masters
        grad_x = _product("dgrad", rows, weight, spec, rng, left)
    if needs[1]:
        values = saved if spec.saves_raw_input else rotate_back(saved, *forward)
        grad_weight = _product("wgrad", scaled, values, spec, rng, left_t)
    return grad_x, grad_weight


def _expert_gradients(
    rows: torch.Tensor,
    scaled: torch.Tensor,
    masters: torch.Tensor,
    right: torch.Tensor | FP8Operand | None,
    saved: torch.Tensor | FP8Operand | None,
    state: GemmState,
    groups: Groups,
    needs: Sequence[bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """[`_gradients`] of all experts: at once where operands are as they are at hand, otherwise one after the other."""
    if state.spec.is_plain:
        grad_x = matmul(rows, right.transpose(1, 2), groups=groups) if needs[0] else None
        return grad_x, matmul_tokens(rows, saved.to(rows.dtype), groups) if needs[1] else None
    grad_x = None
    if needs[0] and isinstance(right, FP8Operand):
        dgrad, backend, left = state.spec.scheme.dgrad, state.spec.backend, None
        if dgrad.is_random:  # each expert draws its own numbers; products with a rotation are not in FP8
            operand = dgrad.left, "dgrad", "grad"
            left = torch.cat([quantize_operand(rows[own], *operand, state.rng_of(e), backend) for e, own in groups])
        grad_x = _product("dgrad", rows, right, state.spec, None, left, groups)
        needs, right = (False, *needs[1:]), None
    elif needs[0]:
        grad_x = rows.new_empty(rows.shape[0], masters.shape[2])
    grad_weight = rows.new_zeros(masters.shape) if needs[1] else None
    for expert, own in groups:
        of_weight = masters[expert], None if right is None else right[expert]
        if isinstance(saved, FP8Operand):
            of_input = FP8Operand(saved.elements[own], saved.scale)
        else:
            of_input = None if saved is None else saved[own]
        found = _gradients(rows[own], scaled[:, own], *of_weight, of_input, state, expert, needs)
        if needs[0]:
            grad_x[own] = found[0]
        if needs[1]:
            grad_weight[expert] = found[1]
    return grad_x, grad_weight


def _product(
    gemm: str,
    left: torch.Tensor,
    right: torch.Tensor | FP8Operand,
    spec: GemmSpec,
    rng: LayerRng | None,
    quantized: torch.Tensor | None = None,
    groups: Groups | None = None,
) -> torch.Tensor:
    """Multiply ``left [R, C] right[C, D]``, both quantized along C, in the dtype of ``left``, which may already be
    ``quantized``; with groups ``right [e, C, D]`` for the rows of each expert."""
    scheme: GemmScheme = getattr(spec.scheme, gemm)
    left, right, fp8 = _oriented(gemm, left, right, spec, groups)
    operands = []
    for name, values, precision in zip(GEMM_OPERANDS[gemm], (left, right), (scheme.left, scheme.right), strict=True):
        if quantized is not None and values is left:
            values = quantized
        elif fp8 and precision is FP8:
            rotated = rotate_operand(values, scheme.rotation, gemm, rng, spec.backend)
            values = FP8Operand(*quantization.quantize_e4m3(rotated, spec.backend, torch.float32))
        elif scheme.rotation is not None or precision not in (FULL, REUSE):
            if name == "weight":
                count_weight(values, gemm)
            # The Triton kernels read transposes as they are.
            if not isinstance(precision, QuantScheme) or values.is_cpu:
                values = values.contiguous()
            options = {"rotation": scheme.rotation, "dtype": left.dtype}
            values = quantize_operand(values, precision, gemm, name, rng, spec.backend, **options)
        operands.append(values if isinstance(values, FP8Operand) else values.to(left.dtype))
    return multiply(gemm, operands[0], operands[1], spec, groups=groups, fp8_dtype=left.dtype if fp8 else None)


def _oriented(
    gemm: str, left: torch.Tensor, right: torch.Tensor | FP8Operand, spec: GemmSpec, groups: Groups | None
) -> tuple[torch.Tensor, torch.Tensor | FP8Operand, bool]:
    """Return the operands of [`_product`] with ``right [D, C]``, whose scales along C are in ``left``, and whether FP8
    tensor cores multiply them."""
    found = isinstance(right, FP8Operand)
    if found:
        left, scale = fold_scales(left, right.scale, groups)
        right = FP8Operand(right.elements.mT.contiguous(), scale)
    else:
        right = right.t()
    if gemm == "dgrad" and spec.reuses_weight:
        return left, right, found  # the weight is an FP8Operand where they do
    size = *left.shape, (right.elements if found else right).shape[0]
    fp8 = runs_on_fp8(gemm, spec, left, left.dtype, size)
    return left, right.values(left.dtype, spec.backend) if found and not fp8 else right, fp8


def _count_pass(state: GemmState, groups: Groups | None) -> None:
    """Let the next backward pass of the step draw other numbers, of each expert that had rows in this one."""
    if state.spec.scheme.is_random:
        for expert in (0,) if groups is None else (expert for expert, _ in groups):
            state.rngs[expert].n_backward += 1


def _keeps_operand(right: torch.Tensor | FP8Operand | None) -> bool:
    """Whether ``Q(W)`` is kept from the forward pass to the backward pass: not on accelerators and not in jobs that may
    shard weights, where copies of all of them would be another model in memory."""
    dist = torch.distributed
    is_one = not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)
    return is_one and isinstance(right, torch.Tensor) and right.is_cpu


class _QuantizedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, state, groups, dtype, weight_needs_grad):
        out, tensors, ctx.record, right = linear_forward(x, weight, bias, state, groups, dtype, weight_needs_grad)
        keeps = ctx.needs_input_grad[0] and state.spec.reuses_weight and _keeps_operand(right)
        ctx.save_for_backward(weight, right if keeps else None, *tensors)
        ctx.state, ctx.groups = state, groups
        return not_a_view(out)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        weight, right, *tensors = ctx.saved_tensors  # once: checkpointing computes them by another forward pass
        needs = ctx.needs_input_grad[:3]
        gradients = linear_backward(grad, weight, tuple(tensors), ctx.record, ctx.state, ctx.groups, needs, right)
        return *gradients, *(None,) * 4


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
