# SPDX-License-Identifier: Apache-2.0
"""Products with packed weights as `torch.library` operators: what compiled code calls in the place of eager functions.

A graph holds the input, the codes of the weight and the bias, as one of a plain linear layer does. When the operator
runs, it finds the layer by its codes, and calls the plan that eager code calls, with the tensors that the layer has
then. So layers of equal shapes share a graph, and nothing that is compiled is stale.

The operator of experts is tagged `cudagraph_unsafe`: where no kernel takes the operands of all experts, the host reads
where their rows end.
"""

import weakref
from typing import Any, Protocol

import torch

from .autograd import autocast_dtype
from .groups import Groups, sum_rows
from .operators import groups_of
from .packed import PackedState, packed_forward, packed_grad_x
from .packed_weight import PackedWeight


class PackedOwner(Protocol):
    """A layer with packed weights, or what stands for one."""

    def packed_product(self, codes: torch.Tensor) -> tuple[PackedState, PackedWeight] | None:
        """Return the state and the tensors of the product whose weight has these codes; `None` if it is not here."""


_owners: "weakref.WeakSet[Any]" = weakref.WeakSet()
#: By the address of codes, the owner that had them when it was last looked for.
_found: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()


def register_owner(owner: PackedOwner) -> None:
    """Let compiled code find a layer, for as long as that lives."""
    _owners.add(owner)


def is_same_memory(codes: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors are the codes of one weight."""
    return codes.data_ptr() == other.data_ptr() and codes.shape == other.shape


def is_compiled(codes: torch.Tensor) -> bool:
    """Return whether compiled code has multiplied with these codes."""
    return codes.data_ptr() in _found


def find_product(codes: torch.Tensor) -> tuple[PackedState, PackedWeight]:
    """Return the state and the tensors of the product whose weight has these codes.

    Raises `RuntimeError` when no layer has them.
    """
    address = codes.data_ptr()
    owner = _found.get(address)
    product = None if owner is None else owner.packed_product(codes)
    if product is not None:
        return product
    for owner in list(_owners):
        product = owner.packed_product(codes)
        if product is not None:
            _found[address] = owner
            return product
    raise RuntimeError("no layer has the packed weight of this compiled code; keep its model, or compile again")


def _joined_product(codes: torch.Tensor, rows: int) -> Any:
    """Return the product of so many rows that begins with these codes, those of a product that was found.

    Raises `RuntimeError` when the layer is in no such product.
    """
    joined = _found[codes.data_ptr()].joined
    if joined is None or joined.total != rows:
        raise RuntimeError("the layers of a joined product of this compiled code have changed; compile again")
    return joined.product


def compiled_packed_linear(
    x: torch.Tensor, codes: torch.Tensor, bias: torch.Tensor | None, joined_rows: int | None = None
) -> torch.Tensor:
    """Return [`hf_mxfp4.ops.packed_linear`] of the layer with these codes where Dynamo traces; with ``joined_rows``,
    that of the so many rows of the joined product that begins with this layer."""
    return torch.ops.hf_mxfp4.packed_linear(x, codes, bias, None, autocast_dtype(x) or x.dtype, joined_rows)


def compiled_packed_experts(
    x: torch.Tensor, codes: torch.Tensor, bias: torch.Tensor | None, groups: Groups
) -> torch.Tensor:
    """[`compiled_packed_linear`] of all experts of a projection."""
    ends = groups.offsets(x.device)
    return torch.ops.hf_mxfp4.packed_experts(x, codes, bias, ends, autocast_dtype(x) or x.dtype)


# ---- the operators --------------------------------------------------------------------------------------------------


def _forward(
    x: torch.Tensor,
    codes: torch.Tensor,
    bias: torch.Tensor | None,
    ends: torch.Tensor | None,
    dtype: torch.dtype,
    joined_rows: int | None = None,
) -> torch.Tensor:
    state, packed = find_product(codes)
    if joined_rows is not None:
        return _joined_product(codes, joined_rows).multiply_now(x, dtype)
    return packed_forward(x, packed, bias, state, groups_of(ends, x.shape[0]), dtype).contiguous()


def _forward_shape(x, codes, bias, ends, dtype, joined_rows=None):
    if -(-x.shape[-1] // 2) != codes.shape[-1]:
        raise ValueError(f"input {tuple(x.shape)} does not fit codes {tuple(codes.shape)}, two in a byte")
    if bias is not None and bias.dtype != x.dtype and dtype == x.dtype:
        raise TypeError(f"input is {x.dtype} but the bias is {bias.dtype}; convert one, or run under torch.autocast")
    return x.new_empty(*x.shape[:-1], joined_rows or codes.shape[-2], dtype=dtype)


def _backward(
    grad: torch.Tensor,
    codes: torch.Tensor,
    ends: torch.Tensor | None,
    in_features: int,
    dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
    needs: list[bool],
) -> list[torch.Tensor]:
    """Return the gradients of ``x`` and the bias, of those that are needed."""
    state, packed = find_product(codes)
    groups = groups_of(ends, grad.shape[0])
    gradients = []
    if needs[0]:
        gradients.append(packed_grad_x(grad, packed, in_features, state.spec, groups).to(dtype).contiguous())
    if needs[1]:
        gradients.append(sum_rows(grad.reshape(-1, grad.shape[-1]), groups).to(bias_dtype))
    return gradients


def _backward_shapes(grad, codes, ends, in_features, dtype, bias_dtype, needs):
    x = grad.new_empty(*grad.shape[:-1], in_features, dtype=dtype)
    bias = grad.new_empty(*codes.shape[:-2], grad.shape[-1], dtype=bias_dtype or grad.dtype)
    return [like for like, need in zip((x, bias), needs, strict=True) if need]


def _setup_context(ctx, inputs, output):
    x, codes, bias, ends, *_ = inputs  # joined products have no gradients
    ctx.save_for_backward(codes, ends)
    ctx.options = x.shape[-1], x.dtype, None if bias is None else bias.dtype


_FORWARD = "(Tensor x, Tensor codes, Tensor? bias, Tensor? ends, ScalarType dtype, int? joined_rows=None) -> Tensor"
_BACKWARD = (
    "(Tensor grad, Tensor codes, Tensor? ends, SymInt in_features, ScalarType dtype, ScalarType? bias_dtype, "
    "bool[] needs) -> Tensor[]"
)


def _define(name: str, tags: tuple[torch.Tag, ...]) -> None:
    """Define the operators ``name`` and ``<name>_backward``."""
    backward_name = f"{name}_backward"
    torch.library.define(name, _FORWARD, tags=tags)
    torch.library.define(backward_name, _BACKWARD, tags=tags)
    # Not `custom_op`, whose Python layers take twice as long as the rest of the call.
    torch.library.impl(name, "CompositeExplicitAutograd", _forward)
    torch.library.impl(backward_name, "CompositeExplicitAutograd", _backward)
    torch.library.register_fake(name, _forward_shape)
    torch.library.register_fake(backward_name, _backward_shapes)
    backward = getattr(torch.ops.hf_mxfp4, backward_name.partition("::")[2])

    def gradients(ctx, grad):
        codes, ends = ctx.saved_tensors
        needs = [ctx.needs_input_grad[0], ctx.needs_input_grad[2]]
        needed = iter(backward(grad, codes, ends, *ctx.options, needs))
        grad_x = next(needed) if needs[0] else None
        grad_bias = next(needed) if needs[1] else None
        return grad_x, None, grad_bias, None, None, None

    torch.library.register_autograd(name, gradients, setup_context=_setup_context)


_define("hf_mxfp4::packed_linear", ())
_define("hf_mxfp4::packed_experts", (torch.Tag.cudagraph_unsafe,))
