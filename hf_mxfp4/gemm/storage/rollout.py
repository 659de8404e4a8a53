# SPDX-License-Identifier: Apache-2.0
"""Products without gradients with a packed copy of a trainable weight, as rollouts can keep it."""

from functools import partial

import torch

from ...backends.cpu import packed_product as on_cpu
from ..groups import Groups
from ..linear import as_dtype, autocast_dtype
from ..operands import input_operand
from ..plan import InputPlan
from ..spec import GemmSpec, PackedSpec
from ..state import GemmState
from ..weight_cache import copies_are_shared, form_in_force
from .copies import packed_copy, reads_codes, values_of
from .packed import packed_groups, packed_product
from .packed_plan import product_on_codes
from .packed_weight import PACKED_FIELDS


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
    return "packed" if reads_codes(x, autocast_dtype(x) or x.dtype, spec) else "dense"


def rollout_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    state: GemmState,
    groups: Groups | None = None,
) -> torch.Tensor | None:
    """``Q(x) Q(W)^T + b`` in ``dtype`` with the packed copy of the weight, or with those of the experts whose rows
    ``groups`` are; `None` where no context keeps one."""
    form = form_in_force()
    if form in (None, "dense") or rollout_form(x.new_empty(0, dtype=dtype), state.spec, form) != "packed":
        return None
    operand = input_operand(x, dtype, state, groups)
    if groups is not None:
        packed, backend = packed_copy(weight, state), state.spec.backend
        return packed_groups(operand, packed, as_dtype(bias, dtype), groups, backend)
    return _with_copy(operand, weight, bias, dtype, state, form)


def planned_rollout(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, state: GemmState, plan: InputPlan
) -> torch.Tensor | None:
    """[`rollout_linear`] by the plan of the layer; compiled code may take the copy from then on."""
    form = form_in_force()
    if form is None or form == "dense":
        return None
    packs = plan.packs.get(form)
    if packs is None:
        packs = rollout_form(x.new_empty(0, dtype=plan.dtype), state.spec, form) == "packed"
        plan.packs[form] = packs
        if packs:
            plan.on_codes = product_on_codes(x, packed_copy(weight, state), plan.dtype, state.spec.backend)
    if not packs:
        return None
    operand = plan.operand(x, state)
    if plan.on_codes is None:
        product = _with_copy(operand, weight, bias, plan.dtype, state, form)
    else:
        product = on_cpu.product(operand, packed_copy(weight, state), as_dtype(bias, plan.dtype), None, plan.on_codes)
    share_copy(weight, state)
    return product


def _with_copy(
    operand: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    state: GemmState,
    form: str,
) -> torch.Tensor:
    packed, backend = packed_copy(weight, state), state.spec.backend
    values = partial(values_of, packed, dtype, backend)
    if form == "auto" and operand.shape[:-1].numel() <= _ROWS_WORTH_A_COPY:
        values = partial(state.values.get, weight, dtype, values)
    return packed_product(operand, packed, as_dtype(bias, dtype), values, backend)


def share_copy(weight: torch.Tensor, state: GemmState) -> None:
    """Let compiled code take the packed copy as an input, where the context in force allows it and the product depends
    on nothing else that changes."""
    # Of a prompt, which runs in eager mode before compiled code takes single tokens.
    if state.cache.shared is not None or not copies_are_shared():
        return
    if not state.spec.draws_forward:
        packed = packed_copy(weight, state)
        state.cache.share(tuple(getattr(packed, field) for field in PACKED_FIELDS.values()))


def shared_spec(spec: GemmSpec, in_features: int) -> PackedSpec:
    """Return the spec of the product with a copy that is shared."""
    fprop = spec.scheme.fprop
    return PackedSpec(fprop.right, fprop.left if spec.quantizes_input else None, in_features, spec.backend)
