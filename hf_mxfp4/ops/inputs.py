# SPDX-License-Identifier: Apache-2.0
"""The input of a layer: quantized for the forward product, and saved for the gradient of the weight.

Rows are tokens, in any number and order, so the inputs of grouped experts are treated in the same way.
"""

import torch

from ..numerics import FP8, FULL, MXFP8, MXFP4Tensor, QuantScheme
from . import quantization
from .fp4 import MXFP8Rows
from .fp8 import FP8Operand, to_fp8
from .groups import Groups
from .operands import operand_seed, quantize_operand, rotate_operand
from .rng import LayerRng
from .spec import GemmSpec
from .state import GemmState


SavedTensors = tuple[torch.Tensor, ...]


class Input:
    """``Q(x)`` of one forward pass, quantized once, in the form that a product asks for.

    Where random numbers are drawn, the rows of each expert have their own.

    Args:
        x: ``[..., K]``.
        dtype: of the product.
        state: of the layer.
        groups: the rows of each expert, `None` for one weight.
        is_saved: whether the backward pass needs it; see [`saved`].
    """

    def __init__(
        self, x: torch.Tensor, dtype: torch.dtype, state: GemmState, groups: Groups | None, is_saved: bool = False
    ):
        self.x = x
        self.dtype = dtype
        self.state = state
        self.groups = groups
        self._spec = state.spec
        self._elements: MXFP8Rows | None = None
        self._codes: MXFP4Tensor | None = None
        self._values: torch.Tensor | None = None
        self._twice: FP8Operand | None = None
        self.is_saved = is_saved
        # What is saved as elements is made once, and the values are read from them.
        self._makes_elements = is_saved and state.spec.saves_fp8
        self._makes_columns = is_saved and saves_columns(state.spec, groups is not None)

    def values(self) -> torch.Tensor:
        """Return ``Q(x)`` in `dtype`, of the rotated and padded input where the forward product rotates."""
        if self._values is not None:
            return self._values
        if self._codes is not None:
            values = quantization.dequantize(self._codes, self._codes.dtype, self._spec.backend).to(self.dtype)
        elif self._makes_columns:
            values = self._rows_and_columns().values(self.dtype, self._spec.backend)
        elif self._elements is not None or self._makes_elements:
            values = values_of_elements(self.elements(), self._spec, self.dtype)
        elif self.groups is None or not self._spec.draws_forward:
            values = self._quantize(self.x, self.state.rng)
        else:
            values = torch.cat([self._quantize(rows, rng) for rows, rng in self._rows_and_rngs()])
        self._values = values
        return values

    def fp8(self) -> FP8Operand:
        """Return ``Q(x)`` as E4M3 elements and scales of rows."""
        if self._makes_columns:
            return self._rows_and_columns()
        if self._spec.input_scheme is FP8:
            return FP8Operand.of_bytes(*self.elements())
        return to_fp8(self.values())

    def packed(self) -> MXFP4Tensor | MXFP8Rows:
        """Return ``Q(x)`` of one weight as codes, or in MXFP8 as elements and scale bytes."""
        scheme = self._spec.input_scheme
        if not isinstance(scheme, QuantScheme):
            return self.elements()
        if self._codes is None:
            rng = self.state.rng
            rows = rotate_operand(self.x.detach(), self._spec.scheme.fprop.rotation, "fprop", rng, self._spec.backend)
            seed = operand_seed(scheme, "fprop", "x", rng)
            self._codes = quantization.quantize(rows, scheme, self._spec.backend, seed=seed)
        return self._codes

    def elements(self) -> MXFP8Rows:
        """Return E4M3 elements ``[..., K]`` and the scale bytes of rows (FP8), or of their blocks (MXFP8)."""
        if self._elements is None:
            parts = [self._to_elements(rows, rng) for rows, rng in self._rows_and_rngs()]
            self._elements = parts[0] if len(parts) == 1 else _joined(parts)
        return self._elements

    def saved(self) -> SavedTensors:
        """Return the tensors that [`restored`] reads: the input itself where Wgrad quantizes it in its own way, E4M3
        elements and scale bytes where they hold ``Q(x)``, otherwise its values. Where Wgrad multiplies the elements,
        they are transposed, ``[K, M]``, with scales of tokens in float32, ``[M, 1]``."""
        if self._makes_columns:
            operand = self._rows_and_columns()
            return operand.columns, operand.scale.view(-1, 1)
        if self._spec.saves_fp8:
            return self.elements()
        if self._spec.saves_raw_input:
            return (self.x,)
        return (self.values(),)

    def _rows_and_columns(self) -> FP8Operand:
        """Return ``Q(x)`` as E4M3 elements ``[..., K]`` that are at hand transposed too, ``[K, M]``."""
        if self._twice is None:
            rows = self.x.detach().reshape(-1, self.x.shape[-1])
            elements, columns, scale = quantization.quantize_e4m3_twice(rows, self._spec.backend)
            self._twice = FP8Operand(elements.view(self.x.shape), scale.view(*self.x.shape[:-1], 1), columns)
        return self._twice

    def _quantize(self, rows: torch.Tensor, rng: LayerRng | None) -> torch.Tensor:
        fprop = self._spec.scheme.fprop
        backend = self._spec.backend
        options = {"rotation": fprop.rotation, "dtype": self.dtype}
        return quantize_operand(rows, fprop.left, "fprop", "x", rng, backend, **options)

    def _to_elements(self, rows: torch.Tensor, rng: LayerRng | None) -> MXFP8Rows:
        rows = rotate_operand(rows.detach(), self._spec.scheme.fprop.rotation, "fprop", rng, self._spec.backend)
        if self._spec.input_scheme is MXFP8:
            return quantization.quantize_mxfp8(rows, self._spec.backend)
        return quantization.quantize_e4m3(rows, self._spec.backend)

    def _rows_and_rngs(self) -> list[tuple[torch.Tensor, LayerRng | None]]:
        """Rows that are quantized together, with their random numbers: those of one expert where any are drawn."""
        if self.groups is None or not self._spec.draws_forward:
            return [(self.x, self.state.rng)]
        parts = [(self.x[rows], self.state.rng_of(expert)) for expert, rows in self.groups]
        return parts or [(self.x, self.state.rng)]


def _joined(parts: list[MXFP8Rows]) -> MXFP8Rows:
    elements, scales = zip(*parts, strict=True)
    joined = torch.cat([part.view(torch.uint8) for part in elements])
    return joined.view(torch.float8_e4m3fn), torch.cat(scales)


def saves_columns(spec: GemmSpec, is_grouped: bool) -> bool:
    """Whether an input is saved as transposed E4M3 elements: of one weight, where Wgrad multiplies these elements."""
    return spec.folds_scales and not is_grouped


def restored(
    saved: SavedTensors, spec: GemmSpec, dtype: torch.dtype, is_grouped: bool = False
) -> torch.Tensor | FP8Operand:
    """Return what [`Input.saved`] gave as ``[M, K]``: E4M3 elements with the scales of tokens where Wgrad multiplies
    them, otherwise values, of elements in ``dtype``; of a rotated operand padded."""
    if saves_columns(spec, is_grouped):
        return FP8Operand.of_columns(*saved)
    rows = tuple(tensor.reshape(-1, tensor.shape[-1]) for tensor in saved)
    if spec.folds_scales:
        return FP8Operand.of_bytes(*rows)
    return values_of_elements(rows, spec, dtype) if spec.saves_fp8 else rows[0]


def values_of_elements(elements: MXFP8Rows, spec: GemmSpec, dtype: torch.dtype) -> torch.Tensor:
    """Return the values in ``dtype`` of what [`Input.elements`] gives."""
    if spec.input_scheme is MXFP8:
        return quantization.dequantize_mxfp8(*elements, dtype, spec.backend)
    return quantization.dequantize_e4m3(*elements, dtype, spec.backend)


def what_is_saved(spec: GemmSpec, x_dtype: torch.dtype, dtype: torch.dtype, is_grouped: bool = False) -> str:
    """Return what compiled code saves of an input, for a product in ``dtype``: ``"fp8"`` or ``"mxfp8"`` elements,
    ``"columns"``, which are transposed ones, ``"values"``, or ``"x"``, the input itself; see
    [`hf_mxfp4.ops.operators`]."""
    if saves_columns(spec, is_grouped):
        return "columns"
    if spec.saves_fp8:
        return spec.input_scheme.value
    is_used_as_it_is = spec.scheme.fprop.left is FULL and spec.rotation_size == 1 and x_dtype == dtype
    return "x" if spec.saves_raw_input or is_used_as_it_is else "values"
