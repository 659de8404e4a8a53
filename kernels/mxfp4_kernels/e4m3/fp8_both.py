# SPDX-License-Identifier: Apache-2.0
"""FP8 with a power of two for each row and with one for each column, of one matrix in two launches. The kernels are in
`e4m3/fp8_both_kernel.py`."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from ..common.arguments import FoldedPointers
from ..common.checks import check_input
from ..common.plan import INTERPRETED, Scheme, as_stored, bits, check_device, launch, scheme_constants
from .fold import GROUP, Folded, has_fp8, matrix_of, outputs, unit_columns
from .fp8_both_kernel import STEP, WIDTH, elements_both_kernel, scale_bytes_kernel, values_both_kernel


#: Most parts of columns, and steps of a part where there are few.
_MOST_PARTS = 64
_STEPS = 16
#: Contracting a multiply and an add would change bits; see `common/blocks.py`.
MAXIMA_OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
OPTIONS = {"num_warps": 8, "enable_fp_fusion": False}


class _Bytes(NamedTuple):
    """Scale bytes of parts of rows, ``[parts, n_rows]``, and of columns, ``[parts, n_cols]``."""

    rows: torch.Tensor
    columns: torch.Tensor

    @property
    def counts(self) -> tuple[int, int]:
        return self.rows.shape[0], self.columns.shape[0]

    @property
    def powers(self) -> tuple[int, int]:
        """Powers of two that are no less than the counts."""
        return tuple(triton.next_power_of_2(count) for count in self.counts)


def quantize_e4m3_both(x: torch.Tensor) -> tuple[Folded, Folded]:
    """[`mxfp4_kernels.quantize_e4m3`] of ``x [M, K]`` along rows and along columns, each with its scale repeated for
    every 128 elements, as products take it beside operands of [`mxfp4_kernels.fold_e4m3`]: ``[M, K/128]`` and
    ``[K, M/128]``.

    Arguments and errors as in [`mxfp4_kernels.fold_e4m3`].
    """
    matrix = unit_columns(matrix_of("quantize_e4m3_both", x, 1, Scheme()))
    check_device(x)
    n_rows, n_cols = matrix.shape
    out, scale = outputs(n_rows, n_cols, GROUP, x.device)
    out_t, scale_t = outputs(n_cols, n_rows, GROUP, x.device)
    if matrix.numel():
        constants = scheme_constants(x.dtype, Scheme(), native=has_fp8(x.device))
        found = _scale_bytes(matrix, constants)
        col_tiles = triton.cdiv(out.shape[1], 64)
        to = [FoldedPointers(to.view(torch.uint8), of.t()) for to, of in ((out, scale), (out_t, scale_t))]
        numbers = (n_rows, n_cols, out_t.shape[1], out.shape[1], matrix.stride(0), *found.counts, col_tiles)
        grid = (out_t.shape[1] // GROUP * col_tiles,)
        launch(
            elements_both_kernel,
            grid,
            x.device,
            bits(matrix),
            *found,
            *to,
            *numbers,
            *found.powers,
            constants,
            **OPTIONS,
        )
    else:
        scale.fill_(2.0**-126)
        scale_t.fill_(2.0**-126)
    return Folded(out, scale, None, n_cols), Folded(out_t, scale_t, None, n_rows)


def fake_quantize_e4m3_both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``fake_quantize_e4m3(x)`` and ``fake_quantize_e4m3(x.mT)`` for a matrix ``x [M, K]``, the second as the transpose
    of a contiguous matrix. Arguments and errors as in [`mxfp4_kernels.fake_quantize_e4m3`]; `ValueError` for no matrix.
    """
    check_input("fake_quantize_e4m3_both", x, 1)
    matrix = unit_columns(matrix_of("fake_quantize_e4m3_both", x, 1, Scheme()))
    check_device(x)
    out, out_t = torch.empty_like(matrix), torch.empty_like(matrix)
    if matrix.numel():
        n_rows, n_cols = matrix.shape
        constants = scheme_constants(x.dtype, Scheme())
        found = _scale_bytes(matrix, constants)
        col_tiles = triton.cdiv(n_cols, 128)
        numbers = (n_rows, n_cols, matrix.stride(0), *found.counts, col_tiles)
        grid = (triton.cdiv(n_rows, 64) * col_tiles,)
        arguments = (bits(matrix), *found, as_stored(out), as_stored(out_t), *numbers, *found.powers, constants)
        launch(values_both_kernel, grid, x.device, *arguments, **OPTIONS)
    return out, out_t.t()


def _scale_bytes(matrix: torch.Tensor, constants: NamedTuple) -> _Bytes:
    n_rows, n_cols = matrix.shape
    steps = max(_STEPS, triton.cdiv(n_rows, STEP.value * _MOST_PARTS))
    parts = triton.cdiv(n_cols, WIDTH.value), triton.cdiv(n_rows, STEP.value * steps)
    shapes = zip(parts, matrix.shape, strict=True)
    found = _Bytes(*(torch.empty(*shape, dtype=torch.uint8, device=matrix.device) for shape in shapes))
    of_interpreter = {"STEPS": steps if INTERPRETED else 0, "SCHEME": constants}
    arguments = (bits(matrix), *found, n_rows, n_cols, matrix.stride(0), steps)
    launch(scale_bytes_kernel, parts, matrix.device, *arguments, **of_interpreter, **MAXIMA_OPTIONS)
    return found
