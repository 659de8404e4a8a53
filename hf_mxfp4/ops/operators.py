# SPDX-License-Identifier: Apache-2.0
"""The linear layers as `torch.library` operators: what compiled code calls in the place of the eager functions.

Where Dynamo traces, a layer calls the operator of its whole product, and the operator, when it runs, calls the eager
function: the same code, backends and kernels, hence the same bits. Operators are functions of tensors and of what
shapes depend on (dtypes, schemes as text, what is kept of an input); they keep nothing for their backward pass, an
operator of its own, but their outputs. Random numbers and open caches are found through the layer's number when an
operator runs ([`hf_mxfp4.ops.state`]); such operators are tagged `cudagraph_unsafe`, so that a CUDA graph never
replays the numbers of one step. Those of packed weights have no state, but experts' are tagged as well: where no kernel
takes the operands of experts, the host reads where their rows end."""

import functools
import math
from collections.abc import Sequence
from typing import cast

import torch

from ..numerics import (
    BLOCK_SIZE,
    FP8,
    MXFP8,
    PARTS,
    MXFP4Tensor,
    OperandScheme,
    QuantScheme,
    parse_scheme,
    part_sizes,
)
from . import quantization
from .autograd import autocast_dtype, check_step, plan_of
from .groups import Groups
from .inputs import what_is_saved
from .state import PLAIN_STATE, GemmState, state_of


_UNSAFE = (torch.Tag.cudagraph_unsafe,)
#: What an operator returns of its input for the backward pass. The others are ``x``, which is at hand, and ``nothing``.
_RETURNED = ("values", "fp8", "mxfp8", "columns")


def groups_of(ends: torch.Tensor | None, n_rows: int) -> Groups | None:
    """Return the groups whose rows end there. Raises `ValueError` for unknown experts; a GPU finds these and stops."""
    if ends is None:
        return None
    if ends.device.type != "cpu":
        torch._assert_async(ends[-1] == n_rows, "a token was sent to an expert that does not exist")
    elif [0, *(places := ends.tolist())] != sorted([0, *places]) or places[-1] != n_rows:
        raise ValueError(
            f"a token was sent to an expert beyond the {len(ends)}, or to a negative one; MXFP4 experts know no expert "
            "parallelism"
        )
    return Groups.of_ends(ends, n_rows)


# ---- functions of tensors -------------------------------------------------------------------------------------------


parse = functools.lru_cache(maxsize=256)(parse_scheme)


def read_scheme(text: str) -> QuantScheme:
    """Return the scheme of an operator's argument. Raises `ValueError` for one that draws random numbers: an operator
    must be a function of its arguments."""
    scheme = parse(text)
    if scheme.rounding != "nearest":
        raise ValueError(f"scheme {text!r} draws random numbers; the operators round to nearest")
    return cast(QuantScheme, scheme)


def read_input_scheme(text: str) -> OperandScheme | None:
    """Read how an input is treated, as an operator's argument: a scheme, ``"fp8"``, ``"mxfp8"``, or ``""`` for full
    precision."""
    if not text:
        return None
    return {FP8.value: FP8, MXFP8.value: MXFP8}.get(text) or read_scheme(text)


@torch.library.custom_op("hf_mxfp4::fake_quantize", mutates_args=())
def _fake_quantize(x: torch.Tensor, scheme: str, backend: str) -> torch.Tensor:
    return quantization.fake_quantize(x.detach(), read_scheme(scheme), backend).contiguous()


@_fake_quantize.register_fake
def _(x, scheme, backend):
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


_fake_quantize.register_autograd(lambda ctx, grad: (grad, None, None))


@torch.library.custom_op("hf_mxfp4::quantize", mutates_args=())
def _quantize(
    x: torch.Tensor, scheme: str, backend: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    packed = quantization.quantize(x.detach(), read_scheme(scheme), backend)
    parts = (getattr(packed, part) for part in PARTS)
    return tuple(x.new_empty(0, dtype=torch.uint8) if part is None else part.contiguous() for part in parts)


@_quantize.register_fake
def _(x, scheme, backend):
    sizes = part_sizes(read_scheme(scheme), x.shape[-1])
    shapes = ((0,) if size is None else (*x.shape[:-1], size) for size in sizes)
    return tuple(torch.empty(shape, dtype=torch.uint8, device=x.device) for shape in shapes)


@torch.library.custom_op("hf_mxfp4::dequantize", mutates_args=())
def _dequantize(
    codes: torch.Tensor,
    scale: torch.Tensor,
    macro: torch.Tensor | None,
    residual_codes: torch.Tensor | None,
    residual_scale: torch.Tensor | None,
    length: int,
    scheme: str,
    dtype: torch.dtype,
    backend: str,
) -> torch.Tensor:
    parts = codes, scale, macro, residual_codes, residual_scale
    packed = MXFP4Tensor(*parts, length=length, axis=codes.dim() - 1, scheme=read_scheme(scheme), dtype=dtype)
    return quantization.dequantize(packed, dtype, backend).contiguous()


@_dequantize.register_fake
def _(codes, scale, macro, residual_codes, residual_scale, length, scheme, dtype, backend):
    return torch.empty(*codes.shape[:-1], length, dtype=dtype, device=codes.device)


# ---- trainable weights ----------------------------------------------------------------------------------------------


def compiled_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: GemmState = PLAIN_STATE,
    groups: Groups | None = None,
) -> torch.Tensor:
    """[`hf_mxfp4.ops.quantized_linear`] where Dynamo traces."""
    spec = state.spec
    dtype = autocast_dtype(x) or x.dtype
    has_gradient = torch.is_grad_enabled()
    saved = "nothing"
    if weight.requires_grad and has_gradient:
        saved = what_is_saved(spec, x.dtype, dtype, groups is not None)
    ends = None if groups is None else groups.offsets(x.device)
    out, _ = torch.ops.hf_mxfp4.quantized_linear(
        x,
        weight,
        bias,
        ends,
        state.layer_id,
        dtype=dtype,
        saved=saved,
        columns=spec.padded_length(x.shape[-1]),
        has_step=has_gradient and not spec.is_plain,
        transposed=spec.transposed,
        has_gradient=has_gradient,
    )
    return out


@torch.library.custom_op("hf_mxfp4::quantized_linear", mutates_args=(), tags=_UNSAFE)
def _forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    ends: torch.Tensor | None,
    layer_id: torch.Tensor,
    dtype: torch.dtype,
    saved: str,
    columns: int,
    has_step: bool,
    transposed: bool,
    has_gradient: bool,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    state = state_of(layer_id)
    groups = groups_of(ends, x.shape[0])
    plan = plan_of(state, x, weight, dtype)
    out, tensors, _ = plan.forward(x, weight, bias, state, groups, has_gradient, saved != "nothing")
    returned = _returned(saved, tensors)
    if has_step:
        returned.append(torch.tensor(state.step, device="cpu"))
    return out.contiguous(), returned


@_forward.register_fake
def _(x, weight, bias, ends, layer_id, dtype, saved, columns, has_step, transposed, has_gradient):
    returned = _returned_shapes(x, dtype, saved, columns)
    if has_step:
        returned.append(torch.empty((), dtype=torch.int64, device="cpu"))
    return x.new_empty(*x.shape[:-1], weight.shape[-1 if transposed else -2], dtype=dtype), returned


def _returned(saved: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return saved tensors as an operator returns them; E4M3 elements as bytes, which more of PyTorch can handle."""
    if saved not in _RETURNED:
        return []
    returned = []
    for tensor in tensors:
        is_e4m3 = tensor.dtype == torch.float8_e4m3fn
        returned.append(tensor.contiguous().view(torch.uint8) if is_e4m3 else tensor.contiguous())
    return returned


def _returned_shapes(x: torch.Tensor, dtype: torch.dtype, saved: str, columns: int) -> list[torch.Tensor]:
    """Return empty tensors like those that an operator returns of its input ``x``."""
    rows = x.shape[:-1]
    if saved == "values":
        return [x.new_empty(*rows, columns, dtype=dtype)]
    if saved in ("fp8", "mxfp8"):
        scales = 1 if saved == "fp8" else -(-columns // BLOCK_SIZE)
        return [x.new_empty(*rows, size, dtype=torch.uint8) for size in (columns, scales)]
    if saved == "columns":
        n_rows = math.prod(rows)
        return [x.new_empty(columns, n_rows, dtype=torch.uint8), x.new_empty(n_rows, 1, dtype=torch.float32)]
    return []


@torch.library.custom_op("hf_mxfp4::quantized_linear_backward", mutates_args=(), tags=_UNSAFE)
def _backward(
    grad: torch.Tensor,
    weight: torch.Tensor,
    ends: torch.Tensor | None,
    tensors: list[torch.Tensor],
    layer_id: torch.Tensor,
    saved: str,
    has_step: bool,
    transposed: bool,
    needs: list[bool],
) -> list[torch.Tensor]:
    state = state_of(layer_id)
    groups = groups_of(ends, grad.shape[0])
    if has_step:
        *tensors, step = tensors
        check_step(state, int(step))
    if saved in ("fp8", "mxfp8", "columns"):
        tensors = [tensors[0].view(torch.float8_e4m3fn), tensors[1]]
    plan = plan_of(state, grad, weight, grad.dtype)
    gradients = plan.backward(grad, weight, tuple(tensors), None, state, groups, needs)
    return [gradient.contiguous() for gradient in gradients if gradient is not None]


@_backward.register_fake
def _(grad, weight, ends, tensors, layer_id, saved, has_step, transposed, needs):
    x = grad.new_empty(*grad.shape[:-1], weight.shape[-2 if transposed else -1])
    bias = grad.new_empty(*weight.shape[:-2], grad.shape[-1])
    masters = grad.new_empty(weight.shape)
    return [like for like, need in zip((x, masters, bias), needs, strict=True) if need]


def _setup(ctx, inputs, output):
    x, weight, bias, ends, layer_id, dtype, saved, _, has_step, transposed, _ = inputs
    ctx.mark_non_differentiable(*output[1])
    tensors = [x, *output[1]] if saved == "x" else output[1]
    ctx.save_for_backward(weight, ends, layer_id, *tensors)
    ctx.options = saved, has_step, transposed


#: Inputs of the operator behind the first three, which alone have gradients.
_WITHOUT_GRADIENT = 8


def _gradients(ctx, grad, _):
    weight, ends, layer_id, *tensors = ctx.saved_tensors
    needs = list(ctx.needs_input_grad[:3])
    arguments = grad, weight, ends, tensors, layer_id, *ctx.options, needs
    gradients = iter(torch.ops.hf_mxfp4.quantized_linear_backward(*arguments))
    of_tensors = [next(gradients) if need else None for need in needs]
    return *of_tensors, *[None] * _WITHOUT_GRADIENT


_forward.register_autograd(_gradients, setup_context=_setup)
