# SPDX-License-Identifier: Apache-2.0
"""The three products of a linear layer on the fast kernels: operands straight from these into tensor cores."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from ...backends import scaled_mm, self_check
from ...backends.triton import converts_codes
from ...numerics import FP8, FULL, GEMM_OPERANDS, REUSE, GemmScheme, LinearScheme, OperandScheme, QuantScheme
from ..counts import count_weight
from ..operands import operand_seed, rotation_signs
from ..saved import SavedInput, SavedRecord, SavedTensors
from ..state import GemmState
from .select import inexact_counter


#: Elements that share a scale.
_GROUP = 128


class Operand(NamedTuple):
    """``elements [..., C]`` in E4M3 and their float32 ``scale``, ``[..., 1]`` or ``[..., C/128]``."""

    elements: torch.Tensor
    scale: torch.Tensor


def forward(
    kernel: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    state: GemmState,
    left: Any = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``Q(x) Q(W)^T + b``, ``[..., N]``, of ``x [..., K]`` and the master weight ``[N, K]``, and the weight's macro
    bytes where a dynamic search found some; ``left`` is the operand that has been made of ``x``, if it has."""
    whole = whole_rows(state.spec.scheme, bias is not None)
    if left is None:
        left = quantized(kernel, x.reshape(-1, x.shape[-1]), "fprop", "x", state, whole)

    def fold() -> Any:
        count_weight(weight)
        return quantized(kernel, weight.detach(), "fprop", "weight", state, whole)

    right = state.folded.get(weight, weight.dtype, fold)
    out = multiply(kernel, left, right, dtype, bias).view(*x.shape[:-1], weight.shape[0])
    return out, right.macro if state.spec.scheme.fprop.right.macro_search == "dynamic" else None


def fold_input(kernel: str, x: torch.Tensor, dtype: torch.dtype, state: GemmState) -> tuple[Any, SavedInput]:
    """The operands of an input ``[..., K]`` in the forward product, of this kernel, and in Wgrad, an FP8 product that
    takes the same values along the tokens, from one read of it: the first, and the second as it is saved until then."""
    rows, columns = _reused(x.reshape(-1, x.shape[-1]), "x", state, "codes" if kernel == "mxfp4" else True)
    record = SavedRecord("folded", dtype, rows=columns.length)
    return rows, SavedInput(None, (columns.elements, columns.scale), record)


def input_with_values(kernel: str, x: torch.Tensor, whole: bool, state: GemmState) -> tuple[Any, torch.Tensor]:
    """The operand of an input ``[..., K]`` in a forward product of this kernel, by whole rows or not, and its quantized
    values, from one read of it."""
    import mxfp4_kernels

    precision = state.spec.scheme.fprop.left
    if kernel == "mxfp4":
        matrix = x.reshape(-1, x.shape[-1])
        packed, values = mxfp4_kernels.quantize_with_values(matrix, **scheme_options(precision, tiles=False))
        return packed, values.view(x.shape)
    folded = mxfp4_kernels.fold_e4m3(
        x,
        group="row" if whole else _GROUP,
        counter=inexact_counter(x.device),
        values=True,
        **scheme_options(precision),
    )
    return folded, folded.values


def gradients(
    grad: torch.Tensor,
    weight: torch.Tensor,
    saved: Callable[[], torch.Tensor],
    state: GemmState,
    dgrad: str,
    wgrad: str,
    folded: SavedTensors | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """``dx [M, K]`` and ``dW [N, K]``, `None` for one whose kernel is ``"dense"``.

    Args:
        grad: the output gradient ``[M, N]``.
        weight: the master weight ``[N, K]`` as it is now.
        saved: gives what was saved of the input, ``[M, K]``.
        dgrad, wgrad: the kernels of both.
        folded: what [`fold_input`] saved, if it has.
    """
    by_row, by_column = _grad_operands(grad, dgrad, wgrad, state)
    grad_x = grad_weight = None
    if by_row is not None:
        count_weight(weight, "dgrad")
        right = quantized_across(dgrad, weight.detach(), "dgrad", "weight", state)
        grad_x = multiply(dgrad, by_row, right, grad.dtype)
    if by_column is not None:
        right = Operand(*folded) if folded else quantized_across(wgrad, saved(), "wgrad", "x", state)
        grad_weight = multiply(wgrad, by_column, right, grad.dtype)
    return grad_x, grad_weight


def _grad_operands(grad: torch.Tensor, dgrad: str, wgrad: str, state: GemmState) -> tuple[Any, Any]:
    """The output gradient along N and along M, `None` where that product is dense."""
    import mxfp4_kernels

    left, right = state.spec.scheme.dgrad.left, state.spec.scheme.wgrad.left
    if dgrad == wgrad == "fp8" and left is right is FP8:
        return mxfp4_kernels.quantize_e4m3_both(grad)
    if dgrad == wgrad != "dense" and FP8 not in (left, right):
        if replace(left, rounding="nearest") == replace(right, rounding="nearest"):
            pairs = both_directions(grad, state)
            if dgrad == "mxfp4":
                return mxfp4_kernels.quantize_both(grad, **pairs, **scheme_options(left))
            counter = inexact_counter(grad.device)
            return mxfp4_kernels.fold_e4m3_both(grad, counter=counter, **pairs, **scheme_options(left, tiles=False))
    by_row = None if dgrad == "dense" else quantized(dgrad, grad, "dgrad", "grad", state)
    return by_row, None if wgrad == "dense" else quantized(wgrad, grad, "wgrad", "grad", state, axis=0)


def quantized(
    kernel: str, matrix: torch.Tensor, gemm: str, name: str, state: GemmState, whole: bool = False, axis: int = 1
) -> Any:
    """[`operand`] as the scheme has it under this name, rotated and rounded by the layer's random numbers."""
    precision = _precision(getattr(state.spec.scheme, gemm), gemm, name)
    direction = {} if precision is FP8 else _direction(gemm, name, matrix, state, axis)
    return operand(kernel, matrix, precision, whole, axis, direction)


def quantized_across(kernel: str, matrix: torch.Tensor, gemm: str, name: str, state: GemmState) -> Any:
    """The second operand of a gradient: ``matrix`` along its columns, quantized there or, of an operand that is reused,
    along the rows as in the forward product. (Quantizing its values again changes none.)"""
    if _precision(getattr(state.spec.scheme, gemm), gemm, name) is not REUSE:
        return quantized(kernel, matrix, gemm, name, state, axis=0)
    return _reused(matrix, name, state, rows=False)[1]


def _reused(matrix: torch.Tensor, name: str, state: GemmState, rows: bool | str = True) -> tuple[Any, Any]:
    """``matrix`` quantized as in the forward product, folded along its rows (if they, or their ``"codes"``, are wanted)
    and along its columns."""
    import mxfp4_kernels

    precision = _precision(state.spec.scheme.fprop, "fprop", name)
    seed = operand_seed(precision, "fprop", name, state.rngs[0])
    return mxfp4_kernels.fold_e4m3_both(
        matrix,
        columns="reused",
        rows=rows,
        rounding=(precision.rounding, "nearest"),
        seed=(seed, None),
        counter=inexact_counter(matrix.device),
        **scheme_options(precision, tiles=False),
    )


def both_directions(grad: torch.Tensor, state: GemmState) -> dict[str, tuple[Any, Any]]:
    """Rounding and rotation of an output gradient along its rows for Dgrad and along its columns for Wgrad."""
    by_row, by_column = _direction("dgrad", "grad", grad, state), _direction("wgrad", "grad", grad, state, axis=0)
    return {name: (by_row[name], by_column[name]) for name in by_row}


def _direction(gemm: str, name: str, matrix: torch.Tensor, state: GemmState, axis: int = 1) -> dict[str, Any]:
    """Rounding and rotation of an operand along ``axis``, as arguments of the kernels."""
    product: GemmScheme = getattr(state.spec.scheme, gemm)
    precision, rotation, rng = _precision(product, gemm, name), product.rotation, state.rngs[0]
    signs = None
    if rotation is not None:
        signs = rotation_signs(rotation, gemm, matrix.shape[axis], rng, matrix.device)
    return {
        "rounding": precision.rounding,
        "seed": operand_seed(precision, gemm, name, rng),
        "rotation": None if rotation is None else rotation.size,
        "signs": signs,
    }


def whole_rows(scheme: LinearScheme, has_bias: bool = False) -> bool:
    """Whether a scale per row will do in the forward product, so that sums of whole rows need no scale but one at their
    end. Not where an input is folded along the tokens at the same time, in tiles; see [`folds_input`]."""
    sides = scheme.fprop.left, scheme.fprop.right
    plain = all(isinstance(side, QuantScheme) and side.macro_block is None for side in sides)
    return plain and not folds_input(scheme, has_bias)


def folds_input(scheme: LinearScheme, has_bias: bool, kernel: str = "fp8") -> bool:
    """Whether an input is folded for Wgrad as the operand of the forward product, of this kernel, is made
    ([`fold_input`]) where the former is an FP8 product. Not with a bias where both are, which PyTorch's product adds to
    sums of whole rows alone."""
    return scheme.wgrad.right is REUSE and scheme.wgrad.left is not FULL and not (has_bias and kernel == "fp8")


def _precision(product: GemmScheme, gemm: str, name: str) -> OperandScheme:
    return product.left if name == GEMM_OPERANDS[gemm][0] else product.right


def operand(
    kernel: str,
    matrix: torch.Tensor,
    precision: OperandScheme,
    whole: bool = False,
    axis: int = 1,
    direction: Mapping[str, Any] = MappingProxyType({}),
) -> Any:
    """A matrix quantized along ``axis``, which comes last, for a kernel; with a scale per row where ``whole``.
    ``direction`` holds arguments of the kernels for rounding and rotation; by default, to nearest and none."""
    import mxfp4_kernels

    if precision is FP8:
        return mxfp4_kernels.quantize_e4m3(matrix, axis=axis)
    if kernel == "mxfp4":
        rows = matrix if axis == 1 else matrix.t()
        converts = converts_codes(rows.device)
        return mxfp4_kernels.quantize(rows, converts=converts, **direction, **scheme_options(precision))
    counter = inexact_counter(matrix.device)
    group = "row" if whole else _GROUP
    return mxfp4_kernels.fold_e4m3(
        matrix, group=group, axis=axis, counter=counter, **direction, **scheme_options(precision)
    )


def multiply(kernel: str, left: Any, right: Any, dtype: torch.dtype, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``left right^T + bias`` of what [`operand`] made.

    Of FP8 with a scale for every 128 elements the product is PyTorch's where that has one which works on this device
    and nothing is added; the Triton kernel is bound by its sums there.
    """
    import mxfp4_kernels

    if kernel == "mxfp4":
        macros = {"a_macro": left.macro, "b_macro": right.macro}
        parts = (left.codes, left.scale, right.codes, right.scale)
        return mxfp4_kernels.matmul_mxf4(*parts, **macros, out_dtype=dtype, bias=bias)
    parts = (left.elements, left.scale, right.elements, right.scale)
    if bias is None and scaled_mm.takes(*parts, dtype):
        if self_check.problem(left.elements.device, "fp8 products of torch") is None:
            found = scaled_mm.try_multiply(*parts, dtype)
            if found is not None:
                return found
    return mxfp4_kernels.matmul_e4m3(*parts, out_dtype=dtype, bias=bias)


def scheme_options(scheme: QuantScheme, tiles: bool = True) -> dict[str, Any]:
    """A scheme as arguments of the folding kernels; those for two directions know no ``tiles``."""
    options = {
        "scale_rule": scheme.scale_rule.value,
        "macro_block": scheme.macro_block,
        "macro_search": scheme.macro_search,
    }
    return options | {"block_rows": scheme.block_rows} if tiles else options
