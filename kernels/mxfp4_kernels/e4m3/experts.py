# SPDX-License-Identifier: Apache-2.0
"""Operands of the gradients of experts' weights, along the tokens of each. The kernels are in
`e4m3/experts_kernel.py`."""

from __future__ import annotations

import torch
import triton

from ..common.arguments import ExpertsShape, FoldedPointers, ProductTile, SchemeConstants
from ..common.plan import INTERPRETED, PLAIN, Scheme, as_stored, bits, check_device, launch, scheme_constants
from ..gemm.grouped.matmul import check_offsets
from .experts_kernel import expert_bytes_kernel, expert_elements_kernel, expert_values_kernel, fold_experts_kernel
from .fold import GROUP, Folded, counter_of, has_fp8, in_pairs, matrix_of, outputs, unit_columns
from .fp8_both import MAXIMA_OPTIONS, OPTIONS, WIDTH


_TILE = ProductTile(BM=GROUP)


def slots_of(n_rows: int, n_experts: int) -> int:
    """Slots of 128 tokens that are enough for so many rows, whatever the counts."""
    return triton.cdiv(n_rows + min(n_rows, n_experts) * (GROUP - 1), GROUP)


def grouped_quantize_e4m3(
    x: torch.Tensor, offsets: torch.Tensor, *, rows: bool = True
) -> tuple[Folded | None, Folded, torch.Tensor]:
    """[`mxfp4_kernels.quantize_e4m3`] of ``x [S, D]`` along its rows, if ``rows`` are wanted, and along the tokens of
    each expert, with a power of two for each column of an expert, from two reads of it. Nothing waits for the GPU.

    Args:
        x: float32, bfloat16 or float16 matrix on a GPU, rows sorted by expert.
        offsets: int32 ``[E]``, where the rows of each expert end.
        rows: whether what is along the rows is wanted; otherwise the first result is `None`.

    Returns:
        Elements along the rows, and ``[D, T]`` along the tokens: those of an expert begin and end at multiples of 128,
        with zeros after its last one; beyond the last expert nothing is written. Its scales are ``[D, T/128]``. And
        int32 ``[E]``, where the tokens of each expert end there: what [`mxfp4_kernels.grouped_wgrad_e4m3`] takes.

    Raises:
        TypeError: not a tensor, or another dtype.
        ValueError: no matrix, not on a GPU, or offsets of another shape or device.
    """
    matrix = _checked("grouped_quantize_e4m3", x, offsets)
    n_rows, n_cols = matrix.shape
    slots = slots_of(n_rows, offsets.shape[0])
    by_row = outputs(n_rows, n_cols, "row", x.device) if rows else None
    out_t, scale_t = outputs(n_cols, slots * GROUP, GROUP, x.device)
    if not matrix.numel():
        if by_row is not None:
            by_row[1].fill_(2.0**-126)
        columns = Folded(out_t, scale_t, None, slots * GROUP)
        return by_row and Folded(*by_row, None, n_cols), columns, torch.zeros_like(offsets)
    constants = scheme_constants(x.dtype, Scheme(), native=has_fp8(x.device))
    parts = triton.cdiv(n_cols, WIDTH.value)
    of_rows = torch.empty(parts, n_rows, dtype=torch.uint8, device=x.device) if rows else None
    ends = torch.empty_like(offsets)
    of_slots = _slot_bytes(matrix, offsets, slots, constants, of_rows, ends)
    padded_cols = by_row[0].shape[1] if rows else n_cols
    col_tiles = triton.cdiv(padded_cols, 64)
    pointers = (
        FoldedPointers(by_row[0].view(torch.uint8), by_row[1]) if rows else None,
        FoldedPointers(out_t.view(torch.uint8), scale_t.t()),
    )
    numbers = (n_rows, n_cols, slots * GROUP, padded_cols, matrix.stride(0), parts, offsets.shape[0], col_tiles)
    arguments = (bits(matrix), of_rows, of_slots, offsets, *pointers, *numbers, triton.next_power_of_2(parts))
    last = (_shape(offsets), _TILE, constants)
    launch(expert_elements_kernel, (slots * col_tiles,), x.device, *arguments, *last, **OPTIONS)
    return by_row and Folded(*by_row, None, n_cols), Folded(out_t, scale_t, None, slots * GROUP), ends


def grouped_fake_quantize_e4m3(x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """The values of what [`grouped_quantize_e4m3`] gives along the tokens, as ``x [S, D]`` and contiguous: the bits of
    ``hf_mxfp4.numerics.fake_quantize_e4m3`` of the columns of each expert. Arguments and errors as there."""
    matrix = _checked("grouped_fake_quantize_e4m3", x, offsets)
    out = torch.empty(matrix.shape, dtype=x.dtype, device=x.device)
    if matrix.numel():
        n_cols, slots = matrix.shape[1], slots_of(matrix.shape[0], offsets.shape[0])
        constants = scheme_constants(x.dtype, Scheme())
        found = _slot_bytes(matrix, offsets, slots, constants)
        col_tiles = triton.cdiv(n_cols, 64)
        arguments = (
            bits(matrix),
            found,
            offsets,
            as_stored(out),
            n_cols,
            matrix.stride(0),
            offsets.shape[0],
            col_tiles,
        )
        last = (_shape(offsets), _TILE, constants)
        launch(expert_values_kernel, (slots * col_tiles,), x.device, *arguments, *last, **OPTIONS)
    return out


def grouped_fold_e4m3(
    x: torch.Tensor, offsets: torch.Tensor, *, scale_rule: str = "rceil", counter: torch.Tensor | None = None
) -> Folded:
    """The MXFP4 values that blocks along the rows of ``x [S, D]`` have, folded into E4M3 along the tokens of each
    expert: [`mxfp4_kernels.fold_e4m3_both`] with ``columns="reused"``, of rows that are padded with zeros for each.

    Arguments, the layout of the result and errors as in [`grouped_quantize_e4m3`], ``scale_rule`` and ``counter`` as in
    [`mxfp4_kernels.fold_e4m3`].
    """
    scheme = Scheme(scale_rule)
    matrix = _checked("grouped_fold_e4m3", x, offsets, scheme)
    n_cols, slots = matrix.shape[1], slots_of(matrix.shape[0], offsets.shape[0])
    out, scale = outputs(n_cols, slots * GROUP, GROUP, x.device)
    counter = counter_of(counter, x.device)
    if matrix.numel():
        pairs = in_pairs(matrix, scheme, slots * GROUP)
        constants = scheme_constants(x.dtype, scheme, native=has_fp8(x.device))
        col_tiles = triton.cdiv(n_cols, GROUP)
        pointers = FoldedPointers(out.view(torch.uint8), scale.t())
        numbers = (n_cols, slots * GROUP, matrix.stride(0), offsets.shape[0], col_tiles)
        options = {
            # Interpreted, fewer operations on more numbers.
            "STRIP": GROUP if pairs and INTERPRETED else 32,
            "PAIRS": pairs,
            "SHAPE": _shape(offsets),
            "TILE": _TILE,
            "SCHEME": constants,
            "SIDE": PLAIN.constants,
        }
        grid = (slots * col_tiles,)
        arguments = (bits(matrix), pointers, counter, offsets, *numbers)
        launch(fold_experts_kernel, grid, x.device, *arguments, **options, **MAXIMA_OPTIONS)
    return Folded(out, scale, counter, slots * GROUP)


def _checked(name: str, x: torch.Tensor, offsets: torch.Tensor, scheme: Scheme | None = None) -> torch.Tensor:
    """``x`` as a matrix with neighbours of a row adjacent in memory."""
    matrix = matrix_of(name, x, 1, scheme or Scheme())
    check_offsets(offsets, x)
    check_device(x)
    return unit_columns(matrix)


def _shape(offsets: torch.Tensor) -> ExpertsShape:
    return ExpertsShape(0, 0, triton.next_power_of_2(offsets.shape[0]))


def _slot_bytes(
    matrix: torch.Tensor,
    offsets: torch.Tensor,
    slots: int,
    constants: SchemeConstants,
    of_rows: torch.Tensor | None = None,
    ends: torch.Tensor | None = None,
) -> torch.Tensor:
    """Scale bytes of columns in each slot; those of parts of rows, and where slots end, go to the tensors given."""
    n_rows, n_cols = matrix.shape
    found = torch.empty(slots, n_cols, dtype=torch.uint8, device=matrix.device)
    arguments = (bits(matrix), of_rows, found, offsets, ends, n_rows, n_cols, matrix.stride(0), offsets.shape[0])
    last = (_shape(offsets), _TILE, constants)
    grid = (triton.cdiv(n_cols, WIDTH.value), slots)
    launch(expert_bytes_kernel, grid, matrix.device, *arguments, *last, **MAXIMA_OPTIONS)
    return found
