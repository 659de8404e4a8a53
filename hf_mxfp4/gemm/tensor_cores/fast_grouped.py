# SPDX-License-Identifier: Apache-2.0
"""The three products of all experts on the FP8 kernels: operands folded in one launch each, and multiplied in one.

Stacks of weights are folded as matrices, whichever axis lies contiguous in memory: the rows of all experts below each
other, each expert's padded to whole groups, so that no group belongs to two.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ...numerics import FP8, REUSE
from ..counts import count_weight
from ..groups import Groups, PaddedRows
from ..operands import rows_first
from ..state import GemmState
from .fast import Operand, both_directions, quantized, quantized_across, scheme_options
from .select import inexact_counter


#: Elements that share a scale.
_GROUP = 128
_BLOCK = 32


def forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    groups: Groups,
    state: GemmState,
    left: Any = None,
) -> torch.Tensor:
    """``Q(x) Q(W_e)^T + b_e`` for the rows of each expert, ``[S, N]``. No count of rows is read back.

    Args:
        weight: the master weights ``[E, N, K]``, or ``[E, K, N]`` if the layer's are transposed.
        left: the operand that has been made of ``x``, if it has.
    """
    left = quantized("fp8", x, "fprop", "x", state) if left is None else left
    right = state.folded.get(weight, weight.dtype, lambda: _fold_weight(rows_first(weight.detach(), state), state))
    return multiply_rows(left, right, groups.offsets(x.device), dtype, bias)


def gradients(
    grad: torch.Tensor,
    weight: torch.Tensor,
    saved: Callable[[], torch.Tensor],
    groups: Groups,
    state: GemmState,
    dgrad: str,
    wgrad: str,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """``dx [S, K]`` and ``dW``, laid out as ``weight``, `None` for one whose kernel is ``"dense"``.

    Args:
        grad: the output gradient ``[S, N]``.
        weight: the master weights as they are now; see [`forward`].
        saved: gives what was saved of the input, ``[S, K]``.
        dgrad, wgrad: the kernels of both.
    """
    offsets = groups.offsets(grad.device)
    by_row, by_column, rows, tokens = _grad_operands(grad, dgrad, wgrad, groups, state)
    grad_x = grad_weight = None
    if by_row is not None:
        right = _fold_across(rows_first(weight.detach(), state), state)
        grad_x = multiply_rows(by_row, right, offsets, grad.dtype, rows=rows)
    if by_column is not None:
        right = _input_along_tokens(saved(), groups, tokens, state)
        left, right = (right, by_column) if state.spec.transposed else (by_column, right)
        grad_weight = multiply_tokens(left, right, tokens.offsets, weight.dtype)
    return grad_x, grad_weight


class _Tokens(NamedTuple):
    """The tokens of operands of Wgrad.

    Attributes:
        offsets: where those of each expert end, with the padding.
        rows: what pads rows to them, where it is at hand.
    """

    offsets: torch.Tensor
    rows: PaddedRows | None = None


def _grad_operands(
    grad: torch.Tensor, dgrad: str, wgrad: str, groups: Groups, state: GemmState
) -> tuple[Any, Any, torch.Tensor | None, _Tokens | None]:
    """The output gradient along N and along the tokens, `None` where that product is dense; where the rows are in the
    first, `None` where they are as they were; and the tokens of the second."""
    import mxfp4_kernels

    left, right = state.spec.scheme.dgrad.left, state.spec.scheme.wgrad.left
    if wgrad == "fp8" and right is FP8:
        with_rows = dgrad == "fp8" and left is FP8
        offsets = groups.offsets(grad.device)
        by_row, by_column, ends = mxfp4_kernels.grouped_quantize_e4m3(grad, offsets, rows=with_rows)
        if dgrad == "fp8" and not with_rows:
            by_row = quantized("fp8", grad, "dgrad", "grad", state)
        return by_row, by_column, None, _Tokens(ends)
    if wgrad != "fp8":
        return quantized("fp8", grad, "dgrad", "grad", state) if dgrad == "fp8" else None, None, None, None
    padded = PaddedRows(groups, _GROUP, grad.device)
    tokens = _Tokens(padded.offsets, padded)
    if dgrad == "fp8" and left == right and left.block_rows == 1:
        options = {**both_directions(grad, state), **scheme_options(left, tiles=False)}
        counter = inexact_counter(grad.device)
        both = mxfp4_kernels.fold_e4m3_both(padded.pad(grad), counter=counter, **options)
        return *both, padded.places, tokens
    by_row = quantized("fp8", grad, "dgrad", "grad", state) if dgrad == "fp8" else None
    return by_row, quantized_across("fp8", padded.pad(grad), "wgrad", "grad", state), None, tokens


def _fold_weight(stack: torch.Tensor, state: GemmState) -> Operand:
    """Weights ``[E, N, K]`` along K: elements ``[E, N, K']``, K' a multiple of 128, and their scales."""
    n_experts, n_rows, _ = stack.shape
    count_weight(stack)
    if stack.is_contiguous():
        matrix = _pad_rows(stack, state.spec.scheme.fprop.right.block_rows)
        return _apart(quantized("fp8", matrix, "fprop", "weight", state), n_experts, n_rows)
    matrix = _pad_rows(stack.mT.contiguous(), _GROUP)
    return _side_by_side(quantized("fp8", matrix, "fprop", "weight", state, axis=0), n_experts)


def _fold_across(stack: torch.Tensor, state: GemmState) -> Operand:
    """Weights ``[E, N, K]`` along N, for Dgrad: elements ``[E, K, N']`` and their scales."""
    n_experts, _, n_columns = stack.shape
    count_weight(stack, "dgrad")
    if stack.is_contiguous():
        return _side_by_side(quantized_across("fp8", _pad_rows(stack, _GROUP), "dgrad", "weight", state), n_experts)
    matrix = _pad_rows(stack.mT.contiguous(), _BLOCK)
    return _apart(quantized_across("fp8", matrix.t(), "dgrad", "weight", state), n_experts, n_columns)


def _input_along_tokens(rows: torch.Tensor, groups: Groups, tokens: _Tokens, state: GemmState) -> Any:
    """The input ``[S, K]`` in Wgrad, along its rows and padded: ``[K, padded S]``."""
    import mxfp4_kernels

    scheme = state.spec.scheme
    if scheme.wgrad.right is REUSE:
        precision, offsets = scheme.fprop.left, groups.offsets(rows.device)
        counter = inexact_counter(rows.device)
        return mxfp4_kernels.grouped_fold_e4m3(rows, offsets, scale_rule=precision.scale_rule.value, counter=counter)
    padded = tokens.rows or PaddedRows(groups, _GROUP, rows.device)
    return quantized_across("fp8", padded.pad(rows), "wgrad", "x", state)


def multiply_rows(
    left: Any,
    right: Operand,
    offsets: torch.Tensor,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """Each expert's rows of a folded matrix times its weight."""
    import mxfp4_kernels

    parts = left.elements, left.scale, right.elements, right.scale
    return mxfp4_kernels.grouped_matmul_e4m3(*parts, offsets, bias, rows=rows, out_dtype=dtype)


def multiply_tokens(left: Any, right: Any, offsets: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``[E, N, K]``, the sums over each expert's tokens of matrices folded along these."""
    import mxfp4_kernels

    parts = left.elements, left.scale, right.elements, right.scale
    return mxfp4_kernels.grouped_wgrad_e4m3(*parts, offsets, out_dtype=dtype)


def _pad_rows(stack: torch.Tensor, unit: int) -> torch.Tensor:
    """``[E, A, B]`` as a matrix ``[E * A', B]``, each expert's rows padded with zeros to a multiple of ``unit``."""
    missing = -stack.shape[1] % unit
    return (F.pad(stack, (0, 0, 0, missing)) if missing else stack).flatten(0, 1)


def _apart(folded: Any, n_experts: int, n_rows: int) -> Operand:
    """Of experts below each other: ``[E * A', B]`` as ``[E, A, B]``."""
    return Operand(*(part.unflatten(0, (n_experts, -1))[:, :n_rows] for part in (folded.elements, folded.scale)))


def _side_by_side(folded: Any, n_experts: int) -> Operand:
    """Of experts side by side: ``[B, E * A']`` as ``[E, B, A']``."""
    parts = (part.unflatten(1, (n_experts, -1)) for part in (folded.elements, folded.scale))
    return Operand(*(part.transpose(0, 1) for part in parts))
