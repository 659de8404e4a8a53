# SPDX-License-Identifier: Apache-2.0
"""The input of a layer, saved for the gradient of its weight. Rows are tokens, in any number and order, so the inputs
of grouped experts are saved in the same way."""

from typing import Any, NamedTuple

import torch

from . import quantization
from .fp8 import FP8Operand
from .groups import Groups
from .operands import fp8_input, input_operand
from .spec import GemmSpec
from .state import GemmState


SavedTensors = tuple[torch.Tensor, ...]


class SavedRecord(NamedTuple):
    """What the saved tensors are.

    Attributes:
        form: ``"values"``, or ``"fp8"`` or ``"mxfp8"`` for E4M3 elements and the scale bytes of rows or of blocks.
        dtype: that the values come back in.
    """

    form: str
    dtype: torch.dtype


def save_input(
    x: torch.Tensor,
    dtype: torch.dtype,
    state: GemmState,
    groups: Groups | None,
    packed: Any = None,
    fp8: bool = False,
) -> tuple[torch.Tensor | FP8Operand | None, SavedTensors, SavedRecord]:
    """Return the operand of the forward product, the tensors to save for Wgrad, and the record that [`restore_input`]
    reads them by. ``packed``: [`packed_input`] where it was multiplied already, and the operand is returned as `None`
    unless it is saved. With ``fp8`` the operand of an E4M3 input is the very tensors that are saved."""
    spec = state.spec
    if spec.saves_fp8:
        record = SavedRecord(spec.input_scheme.value, dtype)
        if packed is not None:
            return None, packed, record
        tensors = fp8_input(x, state, groups)
        operand = FP8Operand.of_bytes(*tensors) if fp8 else restore_input(tensors, record, spec.backend)
        return operand, tensors, record
    if packed is None:
        operand = input_operand(x, dtype, state, groups, fp8)
    else:
        operand = (
            None if spec.saves_raw_input else quantization.dequantize(packed, packed.dtype, spec.backend).to(dtype)
        )
    saved: Any = x if spec.saves_raw_input else operand
    return operand, (saved,), SavedRecord("values", saved.dtype)


def restore_input(tensors: SavedTensors, record: SavedRecord, backend: str = "auto") -> torch.Tensor:
    """Return the values ``[..., K]`` that [`save_input`] saved; of a rotated operand padded."""
    if record.form == "values":
        return tensors[0]
    dequantize = quantization.dequantize_e4m3 if record.form == "fp8" else quantization.dequantize_mxfp8
    return dequantize(tensors[0], tensors[1], record.dtype, backend)


def what_is_saved(spec: GemmSpec, x_dtype: torch.dtype, dtype: torch.dtype) -> str:
    """Return what compiled code saves of an input, for a product in ``dtype``: see [`hf_mxfp4.ops.operators`]."""
    if spec.saves_fp8:
        return spec.input_scheme.value
    keeps_input = spec.input_scheme is None and spec.rotation_size == 1
    return "x" if spec.saves_raw_input or keeps_input and x_dtype == dtype else "values"
