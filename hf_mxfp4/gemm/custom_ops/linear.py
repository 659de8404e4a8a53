# SPDX-License-Identifier: Apache-2.0
"""The trainable linear layer as an operator: the very passes of [`hf_mxfp4.gemm.linear`], opaque to compiled code.

Arguments hold the tensors and what shapes depend on; random numbers, thresholds and the cached weight are found through
the layer's handle when the operator runs. It is tagged as unsafe in CUDA graphs, which would replay one step's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...numerics import LinearScheme, MXFP4Tensor, QuantScheme
from ..linear import LinearRecord, autocast_dtype, backward_linear, forward_linear
from ..operands import BackwardProducts
from ..saved import SavedRecord
from .packed import linear_on
from .registry import owner_of
from .tensors import PARTS, parse, part_sizes


#: What an operator returns of its input for the backward pass. The others
#: are ``x``, which is at hand, ``nothing``, and ``rollout``: nothing, and no gradient either.
_KEPT = ("values", "values_fp8", "x_fp8", "mxfp4")


@dataclass(frozen=True)
class LinearForm:
    """What the shapes of a layer's operator depend on, equal for layers that share a graph.

    Attributes:
        columns: of the operand of the forward product.
        scheme: of activations, ``""`` where they are not quantized.
        rotated: whether the operand is.
        saved: one of [`hf_mxfp4.numerics.SAVED_FORMS`].
        itself: whether the gradient of the weight takes the input itself.
        draws: whether the layer's backward products know a quantization step.
    """

    columns: int
    scheme: str
    rotated: bool
    saved: str
    itself: bool
    draws: bool

    @classmethod
    def of(cls, gemms: LinearScheme, products: BackwardProducts | None, saved: str, in_features: int) -> "LinearForm":
        rotation, left = gemms.fprop.rotation, gemms.fprop.left
        columns = in_features + (-in_features % rotation.size if rotation is not None else 0)
        scheme = str(left) if isinstance(left, QuantScheme) else ""
        itself = products is not None and products.keeps_input
        return cls(columns, scheme, rotation is not None, saved, itself, products is not None)

    def kept(self, x_dtype: torch.dtype, dtype: torch.dtype) -> str:
        """What is kept of an input, for a product in ``dtype``."""
        if self.saved == "mxfp4":
            return "mxfp4"
        if self.saved == "fp8":
            return "x_fp8" if self.itself else "values_fp8"
        unchanged = not self.scheme and not self.rotated and x_dtype == dtype
        return "x" if self.itself or unchanged else "values"

    def record(self, kept: str, x_dtype: torch.dtype, dtype: torch.dtype) -> SavedRecord:
        """How [`hf_mxfp4.gemm.restore_input`] reads what was kept."""
        if kept == "mxfp4":
            made_of = torch.float32 if self.rotated and x_dtype != torch.float64 else x_dtype
            options = {"length": self.columns, "axis": 1, "scheme": parse(self.scheme), "dtype": made_of}
            return SavedRecord("mxfp4", dtype, MXFP4Tensor(**dict.fromkeys(PARTS), **options))
        return SavedRecord("fp8" if kept.endswith("fp8") else "full", x_dtype if kept.startswith("x") else dtype)


def trainable_linear(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """[`hf_mxfp4.gemm.quantized_linear`] of a layer, where Dynamo traces.

    Args:
        layer: has ``weight``, ``bias``, ``form`` ([`LinearForm`]), ``handle`` ([`new_handle`]), ``parts()``, the other
            arguments of [`hf_mxfp4.gemm.quantized_linear`] by name, ``rollout_product(x, dtype)``, another product
            where no gradient is computed, or `None`, and ``shared_weight``, the packed weight ``packed_form`` where
            that product is a function of it and ``x`` alone, or `None`: then CUDA graphs can hold it.
        x: ``[..., K]``.
    """
    if not torch.is_grad_enabled() and layer.shared_weight is not None:
        return linear_on(layer.shared_weight, x, layer.bias, layer.packed_form, layer.packed_form.inputs)
    dtype = autocast_dtype(x) or x.dtype
    form: LinearForm = layer.form
    kept = "nothing" if torch.is_grad_enabled() else "rollout"
    if kept == "nothing" and layer.weight.requires_grad:
        kept = form.kept(x.dtype, dtype)
    arguments = x, layer.weight, layer.bias, layer.handle, dtype, kept, form.columns, form.scheme, form.draws
    return torch.ops.hf_mxfp4.trainable_linear(*arguments)[0]


@torch.library.custom_op("hf_mxfp4::trainable_linear", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    layer: torch.Tensor,
    dtype: torch.dtype,
    kept: str,
    columns: int,
    scheme: str,
    draws: bool,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    owner, needed = owner_of(layer), kept not in ("nothing", "rollout")
    product = owner.rollout_product(x, dtype) if kept == "rollout" else None
    if product is not None:
        return product.contiguous(), [torch.tensor(-1, device="cpu")] if draws else []
    weight = own_tensor(owner.weight, weight)
    out, tensors, record = forward_linear(x, weight, bias, dtype=dtype, needed=needed, **owner.parts())
    found = outputs(kept, tensors)
    if draws:
        found.append(torch.tensor(record.step, device="cpu"))
    return out.contiguous(), found


@_forward.register_fake
def _(x, weight, bias, layer, dtype, kept, columns, scheme, draws):
    found = kept_shapes(x, dtype, kept, columns, scheme)
    if draws:
        found.append(torch.empty((), dtype=torch.int64, device="cpu"))
    return x.new_empty(*x.shape[:-1], weight.shape[0], dtype=dtype), found


def outputs(kept: str, tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    """Kept tensors as an operator returns them; E4M3 elements as bytes, which more of PyTorch can handle."""
    if kept not in _KEPT:
        return []
    found = (tensor.contiguous() for tensor in tensors if tensor is not None)
    return [tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor for tensor in found]


def kept_shapes(x: torch.Tensor, dtype: torch.dtype, kept: str, columns: int, scheme: str) -> list[torch.Tensor]:
    """Empty tensors like those that an operator keeps of its input ``x``."""
    length = x.shape[-1] if kept.startswith("x") else columns
    rows = x.shape[:-1]
    if kept == "values":
        return [x.new_empty(*rows, columns, dtype=dtype)]
    if kept.endswith("fp8"):
        return [x.new_empty(*rows, size, dtype=torch.uint8) for size in (length, 1)]
    sizes = part_sizes(parse(scheme), columns) if kept == "mxfp4" else ()
    return [x.new_empty(*rows, size, dtype=torch.uint8) for size in sizes if size is not None]


def kept_tensors(kept: str, scheme: str, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
    """The tensors that an operator kept, where [`hf_mxfp4.gemm.restore_input`] expects them."""
    if kept.endswith("fp8"):
        return tensors[0].view(torch.float8_e4m3fn), tensors[1]
    if kept != "mxfp4":
        return tuple(tensors)
    remaining = iter(tensors)
    return tuple(None if size is None else next(remaining) for size in part_sizes(parse(scheme), 1))


@torch.library.custom_op("hf_mxfp4::trainable_linear_backward", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _backward(
    grad: torch.Tensor,
    weight: torch.Tensor,
    tensors: list[torch.Tensor],
    layer: torch.Tensor,
    dtype: torch.dtype,
    kept: str,
    x_dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
    needs: list[bool],
) -> list[torch.Tensor]:
    owner = owner_of(layer)
    weight, parts, form, step = own_tensor(owner.weight, weight), owner.parts(), owner.form, None
    if form.draws:
        *tensors, step = tensors
        step = int(step)
    record = LinearRecord(form.record(kept, x_dtype, dtype), step, x_dtype, bias_dtype)
    values = kept_tensors(kept, form.scheme, tensors)
    gradients = backward_linear(
        grad, weight, values, record, parts["quantize_weight"], parts["products"], parts["fast"], needs
    )
    return [gradient.contiguous() for gradient in gradients if gradient is not None]


@_backward.register_fake
def _(grad, weight, tensors, layer, dtype, kept, x_dtype, bias_dtype, needs):
    x = grad.new_empty(*grad.shape[:-1], weight.shape[1], dtype=x_dtype)
    bias = grad.new_empty(grad.shape[-1], dtype=bias_dtype or grad.dtype)
    return [like for like, need in zip((x, torch.empty_like(weight), bias), needs, strict=True) if need]


def _setup(ctx, inputs, output):
    x, weight, bias, layer, dtype, kept, *_ = inputs
    ctx.mark_non_differentiable(*output[1])
    tensors = [x, *output[1]] if kept == "x" else output[1]
    ctx.save_for_backward(weight, layer, *tensors)
    ctx.options = dtype, kept, x.dtype, None if bias is None else bias.dtype


def _gradients(ctx, grad, _):
    weight, layer, *tensors = ctx.saved_tensors
    needs = list(ctx.needs_input_grad[:3])
    found = iter(torch.ops.hf_mxfp4.trainable_linear_backward(grad, weight, tensors, layer, *ctx.options, needs))
    return *(next(found) if need else None for need in needs), *(None,) * 6


_forward.register_autograd(_gradients, setup_context=_setup)


def own_tensor(own: torch.Tensor | None, given: torch.Tensor) -> torch.Tensor:
    """A layer's tensor where what an operator was given is the same memory: compiled code passes on other objects, but
    a cache knows a weight by identity."""
    same = type(own) in (torch.Tensor, torch.nn.Parameter) and own.dtype == given.dtype
    same = same and own.data_ptr() == given.data_ptr() and own.shape == given.shape and own.stride() == given.stride()
    return own if same else given
