# SPDX-License-Identifier: Apache-2.0
"""Products without gradients with a packed copy of a trainable weight, as rollouts can keep it."""

from functools import partial

import torch

from ...backends import select as backends
from ...numerics import MXFP4Tensor
from ..linear import autocast_dtype
from ..operands import input_operand
from ..spec import GemmSpec, PackedSpec
from ..state import GemmState
from ..weight_cache import copies_are_shared, form_in_force
from .packed import computes_on_codes, packed_product
from .packed_weight import PACKED_FIELDS, packed_tensor, quantize_weight


#: Up to this many rows dequantization is a notable part of a product, and a copy of the weight worth its memory.
_ROWS_WORTH_A_COPY = 4096


def rollout_form(x: torch.Tensor, spec: GemmSpec, asked: str | None) -> str:
    """Say in which form a [`cached_weights`] context keeps the weight for products without gradients with tensors like
    ``x``: ``"packed"`` or ``"dense"``.

    Args:
        asked: one of `WEIGHT_FORMS`; `None` outside of such a context, where weights are dense.

    Schemes whose weights cannot be packed (rotated, stochastic, in full precision) stay dense whatever is asked.
    """
    if asked in (None, "dense") or not spec.packs_weight:
        return "dense"
    if asked == "packed":
        return "packed"
    operand = x.new_empty(0, dtype=autocast_dtype(x) or x.dtype)
    return "packed" if computes_on_codes(operand, spec.scheme.fprop.right, spec.backend) else "dense"


def rollout_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype, state: GemmState
) -> torch.Tensor | None:
    """``Q(x) Q(W)^T + b`` in ``dtype`` with the packed copy of the weight; `None` where no context keeps one."""
    form = form_in_force()
    if form in (None, "dense") or rollout_form(x.new_empty(0, dtype=dtype), state.spec, form) != "packed":
        return None
    packed, backend = _packed_copy(weight, state), state.spec.backend
    bias = None if bias is None else bias.to(dtype)
    values = partial(backends.dequantize, packed, dtype, backend)
    if form == "auto" and x.shape[:-1].numel() <= _ROWS_WORTH_A_COPY:
        values = partial(state.values.get, weight, dtype, values)
    return packed_product(input_operand(x, dtype, state), packed, bias, values, backend)


def share_copy(weight: torch.Tensor, state: GemmState) -> None:
    """Let compiled code take the packed copy as an input, where the context in force allows it and the product depends
    on nothing else that changes."""
    # Of a prompt, which runs in eager mode before compiled code takes single tokens.
    if state.cache.shared is not None or not copies_are_shared():
        return
    if state.threshold is None and not state.spec.draws_forward:
        packed = _packed_copy(weight, state)
        state.cache.share(tuple(getattr(packed, field) for field in PACKED_FIELDS.values()))


def shared_spec(spec: GemmSpec, in_features: int) -> PackedSpec:
    """Return the spec of the product with a copy that is shared."""
    fprop = spec.scheme.fprop
    return PackedSpec(fprop.right, fprop.left if spec.quantizes_input else None, in_features, spec.backend)


def _packed_copy(weight: torch.Tensor, state: GemmState) -> MXFP4Tensor:
    scheme, backend = state.spec.scheme.fprop.right, state.spec.backend

    def compute() -> MXFP4Tensor:
        return packed_tensor(quantize_weight(weight, scheme, backend), weight.shape[-1], scheme, weight.dtype)

    return state.cache.get(weight, torch.uint8, compute)
