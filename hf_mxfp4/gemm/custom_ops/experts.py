# SPDX-License-Identifier: Apache-2.0
"""Linear layers of many experts as operators: the very passes of [`hf_mxfp4.gemm.experts`], opaque to compiled code.

As [`hf_mxfp4.gemm.custom_ops.linear`] and `packed` have it for one weight, with the ends of each expert's rows as a
tensor. They are tagged as unsafe in CUDA graphs: where no kernel takes the operands, the host reads the ends. Packed
weights have a second operator without the tag, for where a kernel always does.
"""

from collections.abc import Sequence
from typing import Any

import torch

from ...backends import select as backends
from ...numerics import MXFP4Tensor
from ..experts import (
    GroupedPass,
    backward_grouped,
    forward_grouped,
    forward_packed_grouped,
    grad_bias_of,
    grouped_linear,
    packed_grad_x,
)
from ..groups import Groups
from ..linear import LinearRecord, autocast_dtype
from ..saved import SavedInput
from .linear import LinearForm, kept_shapes, kept_tensors, outputs, own_tensor
from .registry import new_handle, owner_of
from .tensors import read_scheme


_TAGS = (torch.Tag.cudagraph_unsafe,)
_KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def trainable_experts(layer: Any, projection: str, x: torch.Tensor, groups: Groups) -> torch.Tensor:
    """[`hf_mxfp4.gemm.grouped_linear`] of a projection of a layer, where Dynamo traces.

    Args:
        layer: has the weight by the projection's name, ``bias_of(projection)``, ``forms`` (a [`LinearForm`] by
            projection), ``is_transposed``, ``handle`` ([`new_handle`]) and ``parts(projection, groups)``, the other
            arguments of [`hf_mxfp4.gemm.grouped_linear`] by name.
        x: ``[S, K]``, rows sorted by expert.
    """
    weight, form = getattr(layer, projection), layer.forms[projection]
    return _apply(x, weight, layer.bias_of(projection), groups, layer.handle, projection, form, layer.is_transposed)


def plain_grouped_linear(x: torch.Tensor, weight: torch.Tensor, groups: Groups) -> torch.Tensor:
    """[`hf_mxfp4.gemm.grouped_linear`] with operands that are not quantized, as adapters have them.

    Args:
        x: ``[S, K]``, rows sorted by expert.
        weight: ``[E, N, K]``.
    """
    if torch.compiler.is_compiling():
        return _apply(x, weight, None, groups, _PLAIN_HANDLE, "", _PLAIN.forms[""], transposed=False)
    return grouped_linear(x, weight, None, groups, **_PLAIN.parts("", groups))


class _PlainExperts:
    """What the operators ask a layer for, of one that quantizes nothing."""

    forms = {"": LinearForm(columns=0, scheme="", rotated=False, saved="full", itself=False, draws=False)}

    def parts(self, projection: str, groups: Groups) -> dict[str, Any]:
        operands = {"quantize_input": _in_dtype, "quantize_weight": _in_dtype}
        return {
            **operands,
            "products": None,
            "transposed": False,
            "saved": SavedInput(),
            "backend": "auto",
            "fast": None,
        }

    def master(self, projection: str) -> None:
        return None


def _in_dtype(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype)


_PLAIN = _PlainExperts()
_PLAIN_HANDLE = new_handle(_PLAIN)


def _apply(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    groups: Groups,
    handle: torch.Tensor,
    projection: str,
    form: LinearForm,
    transposed: bool,
) -> torch.Tensor:
    dtype = autocast_dtype(x) or x.dtype
    kept = form.kept(x.dtype, dtype) if weight.requires_grad and torch.is_grad_enabled() else "nothing"
    options = projection, dtype, kept, form.columns or x.shape[-1], form.scheme, form.draws, transposed
    return torch.ops.hf_mxfp4.trainable_experts(x, weight, bias, groups.offsets(x.device), handle, *options)[0]


@torch.library.custom_op("hf_mxfp4::trainable_experts", mutates_args=(), tags=_TAGS)
def _forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    ends: torch.Tensor,
    layer: torch.Tensor,
    projection: str,
    dtype: torch.dtype,
    kept: str,
    columns: int,
    scheme: str,
    draws: bool,
    transposed: bool,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    owner, groups = owner_of(layer), Groups.of_ends(ends, x.shape[0])
    check_ends(ends, x.shape[0])
    weight, parts = own_tensor(owner.master(projection), weight), owner.parts(projection, groups)
    out, tensors, done = forward_grouped(x, weight, bias, groups, dtype=dtype, needed=kept != "nothing", **parts)
    found = outputs(kept, tensors)
    if draws:
        found.append(torch.tensor(done.record.step, device="cpu"))
    return out.contiguous(), found


@_forward.register_fake
def _(x, weight, bias, ends, layer, projection, dtype, kept, columns, scheme, draws, transposed):
    found = kept_shapes(x, dtype, kept, columns, scheme)
    if draws:
        found.append(torch.empty((), dtype=torch.int64, device="cpu"))
    return x.new_empty(x.shape[0], weight.shape[2 if transposed else 1], dtype=dtype), found


@torch.library.custom_op("hf_mxfp4::trainable_experts_backward", mutates_args=(), tags=_TAGS)
def _backward(
    grad: torch.Tensor,
    weight: torch.Tensor,
    ends: torch.Tensor,
    tensors: list[torch.Tensor],
    layer: torch.Tensor,
    projection: str,
    dtype: torch.dtype,
    kept: str,
    transposed: bool,
    x_dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
    needs: list[bool],
) -> list[torch.Tensor]:
    owner, groups = owner_of(layer), Groups.of_ends(ends, grad.shape[0])
    form, parts, step = owner.forms[projection], owner.parts(projection, groups), None
    if form.draws:
        *tensors, step = tensors
        step = int(step)
    record = LinearRecord(form.record(kept, x_dtype, dtype), step, x_dtype, bias_dtype)
    how = parts["quantize_weight"], parts["products"], transposed, parts["backend"], parts["fast"]
    done = GroupedPass(groups, *how, record)
    weight = own_tensor(owner.master(projection), weight)
    gradients = backward_grouped(grad, weight, kept_tensors(kept, form.scheme, tensors), done, needs)
    return [gradient.contiguous() for gradient in gradients if gradient is not None]


@_backward.register_fake
def _(grad, weight, ends, tensors, layer, projection, dtype, kept, transposed, x_dtype, bias_dtype, needs):
    x = grad.new_empty(grad.shape[0], weight.shape[1 if transposed else 2], dtype=x_dtype)
    bias = grad.new_empty(weight.shape[0], grad.shape[1], dtype=bias_dtype or grad.dtype)
    masters = weight.new_empty(weight.shape)
    return [like for like, need in zip((x, masters, bias), needs, strict=True) if need]


def _setup(ctx, inputs, output):
    x, weight, bias, ends, layer, projection, dtype, kept, *_, transposed = inputs
    ctx.mark_non_differentiable(*output[1])
    tensors = [x, *output[1]] if kept == "x" else output[1]
    ctx.save_for_backward(weight, ends, layer, *tensors)
    ctx.options = projection, dtype, kept, transposed, x.dtype, None if bias is None else bias.dtype


def _gradients(ctx, grad, _):
    weight, ends, layer, *tensors = ctx.saved_tensors
    needs = list(ctx.needs_input_grad[:3])
    arguments = grad, weight, ends, tensors, layer, *ctx.options, needs
    found = iter(torch.ops.hf_mxfp4.trainable_experts_backward(*arguments))
    return *(next(found) if need else None for need in needs), *(None,) * 9


_forward.register_autograd(_gradients, setup_context=_setup)


def check_ends(ends: torch.Tensor, n_rows: int) -> None:
    """Raise `ValueError` for rows of an expert that does not exist; on a GPU that is found there, and stops it."""
    if ends.device.type != "cpu":
        torch._assert_async(ends[-1] == n_rows, "a token was sent to an expert that does not exist")
    elif int(ends[-1]) != n_rows:
        raise ValueError(
            f"a token was sent to an expert beyond the {len(ends)}; MXFP4 experts know no expert parallelism"
        )


# ---- packed weights -------------------------------------------------------------------------------------------------


def frozen_experts(layer: Any, projection: str, x: torch.Tensor, groups: Groups) -> torch.Tensor:
    """[`hf_mxfp4.gemm.packed_grouped_linear`] of a projection of a layer, where Dynamo traces.

    Args:
        layer: has ``packed_weight(projection)``, ``bias_of(projection)``, ``form`` ([`PackedForm`]),
            ``reads_on_gpus`` (whether a kernel is certain to read the weights there), ``fallback_thresholds`` and
            ``handle`` ([`new_handle`]).
        x: ``[S, K]``, rows sorted by expert.
    """
    dtype, form = autocast_dtype(x) or x.dtype, layer.form
    scheme = form.inputs
    if projection in layer.fallback_thresholds:
        x, scheme = torch.ops.hf_mxfp4.delayed_input(x, layer.handle, projection), ""
    tensors = *layer.packed_weight(projection), layer.bias_of(projection), groups.offsets(x.device)
    by_kernel = layer.reads_on_gpus and x.device.type == "cuda" and dtype in _KERNEL_DTYPES
    operator = torch.ops.hf_mxfp4.packed_experts_grouped if by_kernel else torch.ops.hf_mxfp4.packed_experts
    return operator(x, *tensors, dtype, form.weights, scheme, form.backend)


def _packed_forward(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    macro: torch.Tensor | None,
    residual_codes: torch.Tensor | None,
    residual_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    ends: torch.Tensor,
    dtype: torch.dtype,
    weight_scheme: str,
    input_scheme: str,
    backend: str,
) -> torch.Tensor:
    def quantize_input(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return (backends.fake_quantize(x, read_scheme(input_scheme), backend) if input_scheme else x).to(dtype)

    check_ends(ends, x.shape[0])
    packed = codes, scale, macro, residual_codes, residual_scale
    reading = _reading(x.shape[1], weight_scheme, dtype, backend)
    groups = Groups.of_ends(ends, x.shape[0])
    return forward_packed_grouped(x.detach(), packed, bias, groups, dtype, quantize_input, *reading).contiguous()


def _packed_shape(
    x, codes, scale, macro, residual_codes, residual_scale, bias, ends, dtype, weight_scheme, input_scheme, backend
):
    return x.new_empty(x.shape[0], codes.shape[1], dtype=dtype)


def _packed_backward(
    grad: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    macro: torch.Tensor | None,
    residual_codes: torch.Tensor | None,
    residual_scale: torch.Tensor | None,
    ends: torch.Tensor,
    length: int,
    dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
    weight_scheme: str,
    backend: str,
    needs: list[bool],
) -> list[torch.Tensor]:
    packed, groups = (codes, scale, macro, residual_codes, residual_scale), Groups.of_ends(ends, grad.shape[0])
    found = []
    if needs[0]:
        reading = _reading(length, weight_scheme, grad.dtype, backend)
        found.append(packed_grad_x(grad, packed, groups, length, *reading).to(dtype).contiguous())
    if needs[1]:
        found.append(grad_bias_of(grad, groups, bias_dtype, backend))
    return found


def _packed_gradient_shapes(
    grad,
    codes,
    scale,
    macro,
    residual_codes,
    residual_scale,
    ends,
    length,
    dtype,
    bias_dtype,
    weight_scheme,
    backend,
    needs,
):
    x = grad.new_empty(grad.shape[0], length, dtype=dtype)
    bias = grad.new_empty(codes.shape[0], grad.shape[1], dtype=bias_dtype or grad.dtype)
    return [like for like, need in zip((x, bias), needs, strict=True) if need]


def _packed_setup(ctx, inputs, output):
    x, *packed, bias, ends, _, weight_scheme, _, backend = inputs
    ctx.save_for_backward(*packed, ends)
    ctx.options = x.shape[1], x.dtype, None if bias is None else bias.dtype, weight_scheme, backend


def _define_packed(name: str, tags: Sequence[torch.Tag]) -> None:
    """The operators ``name`` and ``<name>_backward``."""
    forward, backward = (
        torch.library.custom_op(f"hf_mxfp4::{name}{suffix}", function, mutates_args=(), tags=tags)
        for suffix, function in (("", _packed_forward), ("_backward", _packed_backward))
    )
    forward.register_fake(_packed_shape)
    backward.register_fake(_packed_gradient_shapes)

    def gradients(ctx, grad):
        needs = [ctx.needs_input_grad[0], ctx.needs_input_grad[6]]
        found = iter(backward(grad, *ctx.saved_tensors, *ctx.options, needs))
        grad_x, grad_bias = (next(found) if need else None for need in needs)
        return grad_x, *(None,) * 5, grad_bias, *(None,) * 5

    forward.register_autograd(gradients, setup_context=_packed_setup)


_define_packed("packed_experts", _TAGS)
_define_packed("packed_experts_grouped", ())


def _reading(length: int, scheme: str, dtype: torch.dtype, backend: str) -> tuple[Any, ...]:
    """How weights are read: of one expert, of all of them, and by what backend."""

    def tensor(packed: Sequence[torch.Tensor | None]) -> MXFP4Tensor:
        return MXFP4Tensor(*packed, length=length, axis=1, scheme=read_scheme(scheme), dtype=dtype)

    def of_expert(packed: Sequence[torch.Tensor | None], expert: int, dtype: torch.dtype) -> torch.Tensor:
        return backends.dequantize(tensor([t if t is None else t[expert] for t in packed]), dtype, backend)

    return of_expert, tensor, backend
