# SPDX-License-Identifier: Apache-2.0
"""What is saved of a layer's input for the gradient of its weight, and how that comes back in the backward pass.

Rows are tokens, in any number and order, so the inputs of grouped experts are saved in the same way.
"""

from dataclasses import dataclass, replace

import torch

from ..backends.select import dequantize, dequantize_e4m3, quantize_e4m3
from ..numerics import MXFP4Tensor
from .groups import Groups
from .operands import input_operand, packed_input
from .packed_weight import PACKED_FIELDS, rows_per_portion
from .state import GemmState


PARTS = tuple(PACKED_FIELDS.values())

SavedTensors = tuple[torch.Tensor | None, ...]


@dataclass(frozen=True)
class SavedRecord:
    """What the saved tensors are.

    Attributes:
        form: one of [`hf_mxfp4.numerics.SAVED_FORMS`].
        dtype: that the values come back in.
        layout: of codes, the [`MXFP4Tensor`] without its tensors.
    """

    form: str
    dtype: torch.dtype
    layout: MXFP4Tensor | None = None


def save_input(
    x: torch.Tensor, dtype: torch.dtype, state: GemmState, groups: Groups | None
) -> tuple[torch.Tensor, SavedTensors, SavedRecord]:
    """The operand of the forward product, the tensors to save for Wgrad, and the record that [`restore_input`] reads
    them by.

    Raises `ValueError` for an input saved in MXFP4 while Wgrad takes another one than the forward product.
    """
    spec = state.spec
    if spec.saved == "mxfp4":
        if spec.saves_raw_input:
            raise ValueError("saved in MXFP4 is what the forward product takes, and Wgrad takes the input itself")
        packed = packed_input(x, state, groups)
        tensors = tuple(getattr(packed, part) for part in PARTS)
        record = SavedRecord("mxfp4", dtype, replace(packed, **dict.fromkeys(PARTS)))
        return restore_input(tensors, record), tensors, record
    operand = input_operand(x, dtype, state, groups)
    saved = x if spec.saves_raw_input else operand
    tensors = quantize_e4m3(saved, spec.backend) if spec.saved == "fp8" else (saved,)
    return operand, tensors, SavedRecord(spec.saved, saved.dtype)


def restore_input(tensors: SavedTensors, record: SavedRecord) -> torch.Tensor:
    """The values ``[..., K]`` that [`save_input`] saved; of a rotated operand with the columns of its padding."""
    if record.form == "mxfp4":
        return _unpack(tensors, record)
    return dequantize_e4m3(*tensors, record.dtype) if record.form == "fp8" else tensors[0]


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
