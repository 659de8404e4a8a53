# SPDX-License-Identifier: Apache-2.0
"""The linear layer on packed weights, of one weight or of all experts: on the codes where a kernel or the CPU's library
does that, otherwise with their dequantized values, which exist only while a product needs them."""

import functools
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from ...backends import select as backends
from ...backends import triton as triton_kernels
from ...backends.cpu import packed_product as on_cpu
from ...numerics import MXFP4Tensor, QuantScheme
from .. import grouped
from ..groups import Groups
from ..linear import as_dtype, autocast_dtype, needs_gradient, not_a_view
from ..operands import nearest_input, unrotated_gradient
from ..spec import PackedSpec
from ..state import GemmState
from ..weight_cache import WeightCache
from .copies import of_expert
from .packed_plan import PackedPlan
from .packed_weight import PACKED_FIELDS, PackedWeight, packed_tensor


def packed_linear(
    x: torch.Tensor,
    packed: PackedWeight,
    bias: torch.Tensor | None,
    state: GemmState,
    groups: Groups | None = None,
) -> torch.Tensor:
    """``Q(x) Q(W)^T + b`` on frozen packed weights, with the straight-through gradient to ``x`` and ``b``. Of a spec
    that rotates, ``x`` as a weight was that is stored rotated, and the gradient back.

    Only the packed tensors are kept for the backward pass, which dequantizes them again; of experts, without kernels
    for it, those of one at a time, and of those alone that have rows.

    Args:
        x: ``[..., K]``; with groups ``[S, K]``, rows sorted by expert.
        packed: the tensors of [`PACKED_FIELDS`], of experts each ``[E, ...]``, `None` for those that the scheme has
            not.
        bias: ``[N]``, ``[E, N]`` or `None`.
        state: of the layer, with its [`PackedSpec`].
        groups: the rows of each expert; `None` for one weight.

    Returns:
        ``[..., N]`` in the autocast dtype when autocast is on, otherwise in the dtype of ``x``.
    """
    dtype = autocast_dtype(x) or x.dtype
    if not needs_gradient(x, bias):
        return packed_forward(x, packed, bias, state.spec, groups, dtype, state.cache)
    return _PackedLinear.apply(x, bias, state, groups, dtype, None, *packed)


def planned_packed_linear(
    x: torch.Tensor, bias: torch.Tensor | None, state: GemmState, plan: PackedPlan
) -> torch.Tensor:
    """[`packed_linear`] of one weight, by the plan of its layer."""
    if needs_gradient(x, bias):
        return _PackedLinear.apply(x, bias, state, None, plan.dtype, plan, *plan.packed)
    return _planned_forward(x, bias, state, plan)


def _planned_forward(x: torch.Tensor, bias: torch.Tensor | None, state: GemmState, plan: PackedPlan) -> torch.Tensor:
    spec, weight = state.spec, plan.weight
    if plan.on_codes is not None:
        return on_cpu.product(plan.operand(x, state), weight, as_dtype(bias, plan.dtype), None, plan.on_codes)
    values = functools.partial(_values, plan.packed, weight, spec, state.cache)
    return packed_product(plan.operand(x, state), weight, as_dtype(bias, plan.dtype), values, spec.backend)


def packed_forward(
    x: torch.Tensor,
    packed: PackedWeight,
    bias: torch.Tensor | None,
    spec: PackedSpec,
    groups: Groups | None,
    dtype: torch.dtype,
    cache: WeightCache | None = None,
) -> torch.Tensor:
    """The forward pass of [`packed_linear`], without a gradient. ``cache`` keeps dequantized values of one weight."""
    weight = _tensor(packed, spec, dtype)
    bias = as_dtype(bias, dtype)
    inputs = None
    if spec.inputs is not None and _quantizes_within(x, dtype, weight, spec):
        inputs = spec.inputs
    else:
        x = nearest_input(x, dtype, spec.inputs, spec.backend, spec.rotation)
    if groups is None:
        return packed_product(x, weight, bias, lambda: _values(packed, weight, spec, cache), spec.backend, inputs)
    return packed_groups(x, weight, bias, groups, spec.backend, inputs)


def packed_groups(
    x: torch.Tensor,
    weight: MXFP4Tensor,
    bias: torch.Tensor | None,
    groups: Groups,
    backend: str,
    inputs: QuantScheme | None = None,
) -> torch.Tensor:
    """``Q(x) [S, K] Q(W_e)^T + b_e`` for the rows of each expert, ``[S, N]``, without gradients: on the codes of all at
    once, or with the values of one expert at a time.

    Args:
        weight: the codes and scales of all experts, ``[E, N, ...]``.
        inputs: as of [`packed_product`].
    """
    if grouped.uses_kernels(x, backend, "dequantize", "packed experts") and grouped.reads_packed(weight, x):
        return triton_kernels.grouped_matmul_packed(x, weight, groups.offsets(x.device), bias)
    if _backend(x, weight.scheme, backend) == "cpu":
        return _experts_on_cpu(x, weight, bias, groups, inputs)
    values = lambda expert: _matrix(weight, expert, x.dtype, backend)  # noqa: E731
    return grouped.each(x, bias, groups, values, weight.codes.shape[1])


def packed_grad_x(
    grad: torch.Tensor,
    packed: PackedWeight,
    spec: PackedSpec,
    groups: Groups | None,
    cache: WeightCache | None = None,
) -> torch.Tensor:
    """The gradient ``[..., K]`` of the input of [`packed_linear`], in float32 or wider where the spec rotates."""
    return unrotated_gradient(_grad_operand(grad, packed, spec, groups, cache), spec.rotation, spec.backend)


def _grad_operand(
    grad: torch.Tensor, packed: PackedWeight, spec: PackedSpec, groups: Groups | None, cache: WeightCache | None
) -> torch.Tensor:
    """The gradient of the operand that is multiplied with the weight as it is stored."""
    weight = _tensor(packed, spec, grad.dtype)
    if groups is None:
        return grad @ _values(packed, weight, spec, cache)
    if grouped.uses_kernels(grad, spec.backend, "dequantize") and grouped.reads_packed(weight, grad):
        return grouped.product(grad, grouped.dequantized(weight, grad.dtype).transpose(1, 2), groups)
    grad_x = grad.new_empty(grad.shape[0], spec.in_features)
    for expert, rows in groups:
        grad_x[rows] = grad[rows] @ _matrix(weight, expert, grad.dtype, spec.backend)
    return grad_x


def grad_bias(grad: torch.Tensor, groups: Groups | None, dtype: torch.dtype, backend: str) -> torch.Tensor:
    """The gradient of a bias, ``[N]`` or ``[E, N]``."""
    if groups is None:
        return grad.reshape(-1, grad.shape[-1]).sum(dim=0).to(dtype)
    return grouped.grad_bias(grad, groups, dtype, backend)


class _PackedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bias, state, groups, dtype, plan, *packed):
        ctx.save_for_backward(*packed)
        ctx.state, ctx.groups, ctx.input_dtype = state, groups, x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        if plan is not None:
            return not_a_view(_planned_forward(x, bias, state, plan))
        return not_a_view(packed_forward(x, packed, bias, state.spec, groups, dtype, state.cache))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        grad_x, of_bias, state = None, None, ctx.state
        if ctx.needs_input_grad[0]:
            packed = ctx.saved_tensors  # once: under gradient checkpointing they can be unpacked only once
            grad_x = packed_grad_x(grad, packed, state.spec, ctx.groups, state.cache).to(ctx.input_dtype)
        if ctx.needs_input_grad[1]:
            of_bias = grad_bias(grad, ctx.groups, ctx.bias_dtype, state.spec.backend)
        return (grad_x, of_bias) + (None,) * (4 + len(PACKED_FIELDS))


def _tensor(packed: Sequence[torch.Tensor | None], spec: PackedSpec, dtype: torch.dtype) -> MXFP4Tensor:
    """A weight, or those of all experts, sharing the memory of ``packed``; ``dtype`` is that of its values."""
    return packed_tensor(dict(zip(PACKED_FIELDS, packed, strict=True)), spec.in_features, spec.weights, dtype)


def _values(packed: PackedWeight, weight: MXFP4Tensor, spec: PackedSpec, cache: WeightCache | None) -> torch.Tensor:
    """``Q(W)`` ``[N, K]``, kept as the cache says."""

    def compute() -> torch.Tensor:
        return backends.dequantize(weight, weight.dtype, spec.backend)

    return compute() if cache is None else cache.get(packed[0], weight.dtype, compute)


def _matrix(weight: MXFP4Tensor, expert: int, dtype: torch.dtype, backend: str) -> torch.Tensor:
    """``Q(W)`` ``[N, K]`` of one expert."""
    return backends.dequantize(of_expert(weight, expert), dtype, backend)


def _quantizes_within(x: torch.Tensor, dtype: torch.dtype, weight: MXFP4Tensor, spec: PackedSpec) -> bool:
    """Whether the CPU's product quantizes its input."""
    if x.dtype != dtype or spec.rotation is not None:
        return False
    if _backend(x, weight.scheme, spec.backend) != "cpu":
        return False
    return backends.choose_backend(x, spec.inputs, spec.backend) == "cpu"


def _experts_on_cpu(
    x: torch.Tensor,
    weight: MXFP4Tensor,
    bias: torch.Tensor | None,
    groups: Groups,
    inputs: QuantScheme | None,
) -> torch.Tensor:
    """``[S, N]``, all experts at once where each has few rows."""
    if max(groups.counts, default=0) <= on_cpu.most_rows():
        return on_cpu.grouped_product(x, weight, groups.offsets(x.device), bias, inputs)
    out = x.new_empty(x.shape[0], weight.codes.shape[1])
    for expert, rows in groups:
        own = None if bias is None else bias[expert]
        out[rows] = on_cpu.product(x[rows], of_expert(weight, expert), own, inputs)
    return out


def packed_product(
    x: torch.Tensor,
    weight: MXFP4Tensor,
    bias: torch.Tensor | None,
    dequantize: Callable[[], torch.Tensor],
    backend: str = "auto",
    inputs: QuantScheme | None = None,
) -> torch.Tensor:
    """``Q(x) Q(W)^T + b`` without gradients.

    On the codes, exact products are summed in float32; dequantized values are rounded to the dtype of ``x`` first. With
    macro factors or residuals the two differ by about one rounding of the result.

    Args:
        x: ``[..., K]`` in the dtype of the product.
        weight: ``[N, K]``.
        bias: ``[N]`` in that dtype, or `None`.
        dequantize: gives ``Q(W)`` in that dtype, where no kernel computes on the codes: none that can, or too many
            rows for one. What it keeps between calls is then not dequantized again. The CPU's product does without.
        backend: as for [`hf_mxfp4.fake_quantize`].
        inputs: how the CPU's product quantizes ``x`` first; elsewhere `None`.
    """
    name = _backend(x, weight.scheme, backend)
    if name == "cpu":
        return on_cpu.product(x, weight, bias, inputs)
    n_tokens, sizes = x.shape[:-1].numel(), (weight.codes.shape[0], weight.length)
    fused = name == "triton" and _is_fused(n_tokens, *sizes, weight.scheme, x.dtype)
    if fused and (backend != "auto" or backends.works("decode", x.device)):
        return triton_kernels.linear(x, weight, bias)
    return F.linear(x, dequantize(), bias)


def _backend(x: torch.Tensor, scheme: QuantScheme, backend: str) -> str:
    return backends.choose_backend(x, backends.as_read(scheme), backend)


def packed_product_route(
    n_tokens: int,
    out_features: int,
    in_features: int,
    scheme: QuantScheme,
    device_type: str,
    dtype: torch.dtype = torch.bfloat16,
    backend: str = "auto",
) -> tuple[str, str]:
    """Say how [`packed_product`] computes, in a word, and why: ``"fused"`` on the codes, ``"dense"`` on values that the
    kernels dequantize (and layers keep within [`hf_mxfp4.cached_weights`]), ``"panels"`` on those of some rows of the
    weight after the other, ``"eager"`` on values that this backend dequantizes."""
    name, reason = backends.backend_for(device_type, dtype, backends.as_read(scheme), backend)
    if name == "cpu":
        most = on_cpu.most_rows()
        return ("fused", f"up to {most} rows") if n_tokens <= most else ("panels", f"more than {most} rows")
    if name != "triton":
        return name, reason or f"the tensor is on {device_type}"
    plan = triton_kernels.plan_linear(n_tokens, out_features, in_features, scheme, dtype)
    return plan.route, plan.reason


@functools.lru_cache(maxsize=4096)
def _is_fused(n_tokens: int, out_features: int, in_features: int, scheme: QuantScheme, dtype: torch.dtype) -> bool:
    """Whether the kernels multiply with the codes, not with a copy that they would dequantize at every call."""
    if 0 in (n_tokens, out_features, in_features):
        return True
    return triton_kernels.plan_linear(n_tokens, out_features, in_features, scheme, dtype).route == "fused"
