# SPDX-License-Identifier: Apache-2.0
"""What is saved of a layer's input for the gradient of its weight, and how that comes back in the backward pass.

[`save_input`] gives the tensors for `save_for_backward` and a record, by which [`restore_input`] reads them. Rows are
tokens, in any number and order, so the inputs of grouped experts are saved in the same way.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from ..backends.select import dequantize, dequantize_e4m3, quantize_e4m3
from ..numerics import MXFP4Tensor
from ..numerics.fold import FoldedOperand
from .groups import Groups
from .operands import input_operand, packed_input
from .state import GemmState
from .storage.packed_weight import PACKED_FIELDS, rows_per_portion


PARTS = tuple(PACKED_FIELDS.values())

SavedTensors = tuple[torch.Tensor | None, ...]


@dataclass(frozen=True)
class SavedRecord:
    """What the saved tensors are.

    Attributes:
        form: one of [`hf_mxfp4.numerics.SAVED_FORMS`]; ``"folded"`` along the tokens, as an FP8 product takes it; or
            ``"input"``, the input itself, of which Wgrad takes what the forward product does.
        dtype: that the values come back in.
        layout: of codes, the [`MXFP4Tensor`] without its tensors.
        rows: of a folded input, without padding.
    """

    form: str
    dtype: torch.dtype
    layout: MXFP4Tensor | None = None
    rows: int = 0


class SavedInput(NamedTuple):
    """An input that was made ready for the products of a layer.

    Attributes:
        operand: of the forward product; `None` to restore it from what is saved.
        tensors: to save for Wgrad.
        record: that [`restore_input`] reads them by.
    """

    operand: torch.Tensor | None
    tensors: SavedTensors
    record: SavedRecord


def save_input(
    x: torch.Tensor,
    dtype: torch.dtype,
    state: GemmState,
    groups: Groups | None,
    *,
    weight_needs_grad: bool,
    multiplies: bool,
    given: torch.Tensor | SavedInput | None = None,
) -> SavedInput:
    """The operand of the forward product, and what is saved for Wgrad.

    Args:
        x: ``[..., K]``.
        dtype: of the product.
        state, groups: of the layer, and its rows.
        weight_needs_grad: whether anything is saved; not so for a frozen weight, as under LoRA, or without gradients.
        multiplies: whether the operand is asked for; otherwise it is only made to be saved, and ``x`` is given back
            in its place.
        given: an operand that was made already, or all that this returns.

    Raises `ValueError` for an input saved in MXFP4 while Wgrad takes another one than the forward product.
    """
    spec = state.spec
    if isinstance(given, SavedInput):
        return given if given.operand is not None else given._replace(operand=restore_input(*given[1:]))
    if weight_needs_grad and spec.saved == "mxfp4":
        if spec.saves_raw_input:
            raise ValueError("saved in MXFP4 is what the forward product takes, and Wgrad takes the input itself")
        packed = packed_input(x, state, groups)
        tensors = tuple(getattr(packed, part) for part in PARTS)
        record = SavedRecord("mxfp4", dtype, replace(packed, **dict.fromkeys(PARTS)))
        return SavedInput(restore_input(tensors, record), tensors, record)
    operand = given
    if operand is None:
        made = multiplies or weight_needs_grad and not spec.saves_raw_input
        operand = input_operand(x, dtype, state, groups) if made else x
    if not weight_needs_grad:
        return SavedInput(operand, (), SavedRecord("full", dtype))
    saved = x if spec.saves_raw_input else operand
    if spec.saved == "fp8":
        return SavedInput(operand, quantize_e4m3(saved, spec.backend), SavedRecord("fp8", saved.dtype))
    return SavedInput(operand, (saved,), SavedRecord("full", saved.dtype))


def restore_input(tensors: SavedTensors, record: SavedRecord) -> torch.Tensor:
    """The values ``[..., K]`` that [`save_input`] saved; of a rotated operand with the columns of its padding. Of a
    folded input ``[M, K]``, but for blocks that were rounded; of one saved as it was, that."""
    if record.form == "folded":
        elements, scale = tensors
        folded = FoldedOperand(elements, scale, scale.new_zeros((), dtype=torch.int32), record.rows, 128)
        return folded.dequantize(record.dtype).t()
    if record.form == "mxfp4":
        return _unpack(tensors, record)
    if record.form == "fp8":
        return dequantize_e4m3(*tensors, record.dtype)
    return tensors[0]


def _unpack(tensors: SavedTensors, record: SavedRecord) -> torch.Tensor:
    leading = tensors[0].shape[:-1]
    rows = [None if tensor is None else tensor.view(-1, tensor.shape[-1]) for tensor in tensors]
    step = rows_per_portion(record.layout.length)
    layout, values = replace(record.layout, axis=1), []
    for start in range(0, max(1, rows[0].shape[0]), step):
        some = [None if tensor is None else tensor[start : start + step] for tensor in rows]
        portion = replace(layout, **dict(zip(PARTS, some, strict=True)))
        # By way of the input's dtype, as the operand is made everywhere: that of autocast may saturate elsewhere.
        values.append(dequantize(portion, portion.dtype).to(record.dtype))
    return (torch.cat(values) if len(values) > 1 else values[0]).view(*leading, record.layout.length)
