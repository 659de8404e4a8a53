# SPDX-License-Identifier: Apache-2.0
"""The linear layer on frozen packed weights, of one or of all experts, as an operator: a function of its arguments
alone.

There are two of it, of the same functions. ``packed_linear`` is safe in CUDA graphs. ``packed_experts`` is tagged as
unsafe: where no kernel takes the operands of experts, the host reads where their rows end.
"""

import functools
from collections.abc import Sequence

import torch

from ...backends import select as backends
from ...backends.cpu import packed_product as on_cpu
from ...numerics import Rotation
from ..groups import Groups
from ..linear import as_dtype, autocast_dtype
from ..operands import nearest_input, unrotated_gradient
from ..spec import PackedSpec
from ..storage.packed import grad_bias, packed_forward, packed_grad_x
from ..storage.packed_weight import PackedWeight
from .linear import groups_of
from .tensors import read_scheme


_KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def compiled_packed_linear(
    x: torch.Tensor,
    packed: PackedWeight,
    bias: torch.Tensor | None,
    spec: PackedSpec,
    groups: Groups | None = None,
    read_on_gpus: bool = False,
) -> torch.Tensor:
    """[`hf_mxfp4.gemm.packed_linear`] where Dynamo traces.

    Args:
        read_on_gpus: whether a kernel is certain to read the weights of experts there.
    """
    dtype, inputs = autocast_dtype(x) or x.dtype, spec.input_text
    if spec.rotation is not None:
        x, inputs = torch.ops.hf_mxfp4.rotated_input(x, spec.rotation.size, inputs, dtype, spec.backend), ""
    ends, operator = None, torch.ops.hf_mxfp4.packed_linear
    if groups is not None:
        ends = groups.offsets(x.device)
        if not (read_on_gpus and x.device.type == "cuda" and dtype in _KERNEL_DTYPES):
            operator = torch.ops.hf_mxfp4.packed_experts
    return operator(x, *packed, bias, ends, dtype, spec.weight_text, inputs, spec.backend)


def _forward(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    macro: torch.Tensor | None,
    residual_codes: torch.Tensor | None,
    residual_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    ends: torch.Tensor | None,
    dtype: torch.dtype,
    weight_scheme: str,
    input_scheme: str,
    backend: str,
) -> torch.Tensor:
    packed = codes, scale, macro, residual_codes, residual_scale
    if ends is None and not input_scheme and x.dtype is dtype:
        on_codes = _on_codes(x.device.type, dtype, weight_scheme, x.shape[-1], codes.shape[0], backend)
        if on_codes is not None and x.shape[:-1].numel() <= on_cpu.most_rows():
            return on_codes(x.detach(), packed, as_dtype(bias, dtype))
    spec = _spec(weight_scheme, input_scheme, x.shape[-1], backend)
    return packed_forward(x.detach(), packed, bias, spec, groups_of(ends, x.shape[0]), dtype).contiguous()


@functools.lru_cache(maxsize=256)
def _spec(weights: str, inputs: str, in_features: int, backend: str) -> PackedSpec:
    return PackedSpec(read_scheme(weights), read_scheme(inputs) if inputs else None, in_features, backend)


@functools.lru_cache(maxsize=256)
def _on_codes(
    device_type: str, dtype: torch.dtype, weights: str, in_features: int, out_features: int, backend: str
) -> on_cpu.OnCodes | None:
    """What computes the product of few rows where the CPU does that on codes: found by words and numbers alone, which
    takes less time than by a scheme."""
    scheme = read_scheme(weights)
    name, _ = backends.backend_for(device_type, dtype, backends.as_read(scheme), backend, in_features)
    return on_cpu.on_codes(scheme, in_features, out_features, dtype) if name == "cpu" else None


def _out_shape(
    x, codes, scale, macro, residual_codes, residual_scale, bias, ends, dtype, weight_scheme, input_scheme, backend
):
    return x.new_empty(*x.shape[:-1], codes.shape[-2], dtype=dtype)


def _backward(
    grad: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    macro: torch.Tensor | None,
    residual_codes: torch.Tensor | None,
    residual_scale: torch.Tensor | None,
    ends: torch.Tensor | None,
    in_features: int,
    dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
    weight_scheme: str,
    backend: str,
    needs: list[bool],
) -> list[torch.Tensor]:
    groups, spec = groups_of(ends, grad.shape[0]), _spec(weight_scheme, "", in_features, backend)
    packed, found = (codes, scale, macro, residual_codes, residual_scale), []
    if needs[0]:
        found.append(packed_grad_x(grad, packed, spec, groups).to(dtype).contiguous())
    if needs[1]:
        found.append(grad_bias(grad, groups, bias_dtype, backend))
    return found


def _gradient_shapes(grad, codes, scale, macro, residual_codes, residual_scale, ends, in_features, dtype, *rest):
    bias_dtype, _, _, needs = rest
    x = grad.new_empty(*grad.shape[:-1], in_features, dtype=dtype)
    bias = grad.new_empty(*codes.shape[:-2], grad.shape[-1], dtype=bias_dtype or grad.dtype)
    return [like for like, need in zip((x, bias), needs, strict=True) if need]


def _setup(ctx, inputs, output):
    x, *packed, bias, ends, _, weight_scheme, _, backend = inputs
    ctx.save_for_backward(*packed, ends)
    ctx.options = x.shape[-1], x.dtype, None if bias is None else bias.dtype, weight_scheme, backend


def _define(name: str, tags: Sequence[torch.Tag]) -> None:
    """The operators ``name`` and ``<name>_backward``."""
    forward, backward = (
        torch.library.custom_op(f"hf_mxfp4::{name}{suffix}", function, mutates_args=(), tags=tags)
        for suffix, function in (("", _forward), ("_backward", _backward))
    )
    forward.register_fake(_out_shape)
    backward.register_fake(_gradient_shapes)

    def gradients(ctx, grad):
        needs = [ctx.needs_input_grad[0], ctx.needs_input_grad[6]]
        found = iter(backward(grad, *ctx.saved_tensors, *ctx.options, needs))
        grad_x, of_bias = (next(found) if need else None for need in needs)
        return grad_x, *(None,) * 5, of_bias, *(None,) * 5

    forward.register_autograd(gradients, setup_context=_setup)


_define("packed_linear", ())
_define("packed_experts", (torch.Tag.cudagraph_unsafe,))


@torch.library.custom_op("hf_mxfp4::rotated_input", mutates_args=())
def _rotated_input(x: torch.Tensor, size: int, scheme: str, dtype: torch.dtype, backend: str) -> torch.Tensor:
    """``Q(x)`` of the input rotated in blocks of ``size``, in ``dtype``, straight through; ``scheme`` is ``""`` where
    it is not quantized."""
    inputs = read_scheme(scheme) if scheme else None
    return nearest_input(x.detach(), dtype, inputs, backend, Rotation(size)).contiguous()


@torch.library.custom_op("hf_mxfp4::rotated_input_backward", mutates_args=())
def _rotated_input_backward(grad: torch.Tensor, size: int, dtype: torch.dtype) -> torch.Tensor:
    return unrotated_gradient(grad, Rotation(size)).to(dtype).contiguous()


@_rotated_input.register_fake
def _(x, size, scheme, dtype, backend):
    return torch.empty(x.shape, dtype=dtype, device=x.device)


@_rotated_input_backward.register_fake
def _(grad, size, dtype):
    return torch.empty(grad.shape, dtype=dtype, device=grad.device)


def _rotated_setup(ctx, inputs, output):
    ctx.size, ctx.dtype = inputs[1], inputs[0].dtype


def _rotated_gradient(ctx, grad):
    return _rotated_input_backward(grad, ctx.size, ctx.dtype), *(None,) * 4


_rotated_input.register_autograd(_rotated_gradient, setup_context=_rotated_setup)
