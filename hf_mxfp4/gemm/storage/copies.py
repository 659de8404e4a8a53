# SPDX-License-Identifier: Apache-2.0
"""Packed copies of trainable weights, made once within a context that keeps them, and operands made from those."""

from collections.abc import Mapping
from dataclasses import replace

import torch

from ...backends import select as backends
from ...numerics import MXFP4Tensor, QuantScheme
from ..counts import count_weight
from ..spec import GemmSpec
from ..state import GemmState
from ..weight_cache import step_form_in_force
from .packed_weight import PACKED_FIELDS, packed_tensor, quantize_weight


def rows_first(weight: torch.Tensor, state: GemmState) -> torch.Tensor:
    """A master weight as ``[N, K]`` or ``[E, N, K]``, the same memory."""
    return weight.transpose(1, 2) if state.spec.transposed else weight


def packed_copy(weight: torch.Tensor, state: GemmState) -> MXFP4Tensor:
    """Codes and scales of a master weight, those of experts ``[E, N, ...]``, kept as [`WeightCache`] says. Of a scheme
    that can be packed."""
    scheme, backend = state.spec.scheme.fprop.right, state.spec.backend

    def compute() -> MXFP4Tensor:
        count_weight(weight)
        rows = rows_first(weight.detach(), state)
        whole = rows.dim() == 2 or quantized_at_once(scheme, rows, backend)
        parts = (quantize_weight if whole else _quantize_each)(rows, scheme, backend)
        return packed_tensor(parts, rows.shape[-1], scheme, weight.dtype)

    return state.cache.get(weight, torch.uint8, compute)


def codes_of_operand(weight: torch.Tensor, dtype: torch.dtype, state: GemmState) -> MXFP4Tensor | None:
    """The packed copy that an operand in ``dtype`` is made from: one that is kept already, or that a [`StepWeights`]
    in force shall keep; `None` where the operand is quantized by itself."""
    if not state.spec.packs_weight:
        return None
    packed = state.cache.find(weight, torch.uint8)
    return packed_copy(weight, state) if packed is None and step_keeps_codes(weight, dtype, state.spec) else packed


def step_keeps_codes(weight: torch.Tensor, dtype: torch.dtype, spec: GemmSpec) -> bool:
    """Whether a [`StepWeights`] in force keeps codes of a weight, and not its operand in ``dtype``: as asked, or where
    kernels of a GPU read them back."""
    form = step_form_in_force()
    if form in (None, "dense") or not spec.packs_weight or not weight.is_leaf:
        return False
    return form == "packed" or weight.device.type != "cpu" and reads_codes(weight, dtype, spec)


def reads_codes(x: torch.Tensor, dtype: torch.dtype, spec: GemmSpec) -> bool:
    """Whether products with tensors like ``x`` in ``dtype`` are computed on packed weights of this scheme. Raises
    `ValueError` when the backend named cannot do it."""
    return computes_on_codes(torch.empty(0, dtype=dtype, device=x.device), spec.scheme.fprop.right, spec.backend)


def computes_on_codes(x: torch.Tensor, scheme: QuantScheme, backend: str = "auto") -> bool:
    """Whether [`hf_mxfp4.gemm.packed_product`] computes with tensors like ``x`` on a weight's codes, given that they
    are not too many rows. Raises `ValueError` when the backend named cannot do it."""
    name = backends.choose_backend(x, backends.as_read(scheme), backend)
    return name == "cpu" or name == "triton" and (backend != "auto" or backends.works("decode", x.device))


def values_of(packed: MXFP4Tensor, dtype: torch.dtype, backend: str) -> torch.Tensor:
    """The operand ``[N, K]`` or ``[E, N, K]`` in ``dtype`` that a packed copy stands for, to the bit."""
    # By way of the master's dtype, in which an operand is quantized: of float32 that is rounding once.
    made = dtype if packed.dtype == torch.float32 else packed.dtype
    if packed.codes.dim() == 2:
        return backends.dequantize(packed, made, backend).to(dtype)
    out = packed.codes.new_empty(*packed.codes.shape[:2], packed.length, dtype=dtype)
    if backends.choose_backend(out.new_empty(0), backends.as_read(packed.scheme), backend, packed.length) == "triton":
        return backends.dequantize(replace(packed, axis=2), made, backend).to(dtype)
    for expert, values in enumerate(out):  # the eager functions take several times the memory of what they make
        values.copy_(backends.dequantize(of_expert(packed, expert), made, backend))
    return out


def of_expert(packed: MXFP4Tensor, expert: int) -> MXFP4Tensor:
    """The weight ``[N, K]`` of one expert, the same memory."""
    found = {field: getattr(packed, field) for field in PACKED_FIELDS.values()}
    return replace(packed, **{field: None if part is None else part[expert] for field, part in found.items()})


def quantized_at_once(scheme: QuantScheme, weight: torch.Tensor, backend: str) -> bool:
    """Whether the weights ``[E, N, K]`` of all experts are quantized in one launch: where rows are independent, each
    expert has no random numbers of its own, and no eager function, which takes several times its input, does it."""
    by_row = scheme.block_rows == 1 and scheme.rounding == "nearest"
    return by_row and backends.choose_backend(weight, scheme, backend) != "eager"


def _quantize_each(rows: torch.Tensor, scheme: QuantScheme, backend: str) -> Mapping[str, torch.Tensor]:
    """[`quantize_weight`] of ``[E, N, K]``, one expert at a time."""
    packed: dict[str, torch.Tensor] = {}
    for expert, own in enumerate(rows):
        for name, part in quantize_weight(own, scheme, backend).items():
            if expert == 0:
                packed[name] = part.new_empty(len(rows), *part.shape)
            packed[name][expert] = part
    return packed
