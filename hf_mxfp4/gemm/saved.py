# SPDX-License-Identifier: Apache-2.0
"""The input of a layer, saved for the gradient of its weight. Rows are tokens, in any number and order, so the inputs
of grouped experts are saved in the same way."""

from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ..backends import dispatch
from ..numerics import FP8, PARTS, MXFP4Tensor
from .fp8 import FP8Operand
from .groups import Groups
from .operands import fp8_input, input_operand, packed_input
from .state import GemmSpec, GemmState


SavedTensors = tuple[torch.Tensor | None, ...]


class SavedRecord(NamedTuple):
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
    x: torch.Tensor,
    dtype: torch.dtype,
    state: GemmState,
    groups: Groups | None,
    packed: MXFP4Tensor | None = None,
    fp8: bool = False,
) -> tuple[torch.Tensor | FP8Operand | None, SavedTensors, SavedRecord]:
    """Return the operand of the forward product, the tensors to save for Wgrad, and the record that [`restore_input`]
    reads them by. ``packed``: [`packed_input`] where it was multiplied already, and the operand is returned as `None`
    unless it is saved. With ``fp8`` the operand of an E4M3 input is the very tensors that are saved.

    Raises `ValueError` for an input saved in MXFP4 while Wgrad takes another one than the forward product.
    """
    spec = state.spec
    if spec.saved == "mxfp4":
        if spec.saves_raw_input:
            raise ValueError("saved in MXFP4 is what the forward product takes, and Wgrad takes the input itself")
        made = packed_input(x, state, groups) if packed is None else packed
        record = SavedRecord("mxfp4", dtype, replace(made, **dict.fromkeys(PARTS)))
        return restore_input(made.parts, record) if packed is None else None, made.parts, record
    if spec.input_scheme is FP8 and not spec.saves_raw_input:
        tensors, record = fp8_input(x, state, groups), SavedRecord("fp8", dtype)
        operand = FP8Operand.of_bytes(*tensors) if fp8 else restore_input(tensors, record, spec.backend)
        return operand, tensors, record
    if packed is None:
        operand = input_operand(x, dtype, state, groups, fp8)
    else:
        operand = None if spec.saves_raw_input else dispatch.dequantize(packed, packed.dtype, spec.backend).to(dtype)
    saved: Any = x if spec.saves_raw_input else operand
    kept = dispatch.quantize_e4m3(saved, spec.backend) if spec.saved == "fp8" else (saved,)
    return operand, kept, SavedRecord(spec.saved, saved.dtype)


def restore_input(tensors: SavedTensors, record: SavedRecord, backend: str = "auto") -> torch.Tensor:
    """Return the values ``[..., K]`` that [`save_input`] saved; of a rotated operand padded."""
    if record.form == "mxfp4":
        packed = replace(record.layout, **dict(zip(PARTS, tensors, strict=True)), axis=tensors[0].dim() - 1)
        # By way of the input's dtype, as the operand is made everywhere: that of autocast may saturate elsewhere.
        return dispatch.dequantize(packed, packed.dtype).to(record.dtype)
    if record.form == "fp8":
        return dispatch.dequantize_e4m3(tensors[0], tensors[1], record.dtype, backend)
    return tensors[0]


def what_is_saved(spec: GemmSpec, x_dtype: torch.dtype, dtype: torch.dtype) -> str:
    """Return what compiled code saves of an input, for a product in ``dtype``: see [`hf_mxfp4.gemm.compile`]."""
    if spec.saved == "mxfp4":
        return "mxfp4"
    if spec.saved == "fp8":
        return "x_fp8" if spec.saves_raw_input else "values_fp8"
    keeps_input = spec.input_scheme is None and spec.rotation_size == 1
    return "x" if spec.saves_raw_input or keeps_input and x_dtype == dtype else "values"
