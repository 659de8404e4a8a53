# SPDX-License-Identifier: Apache-2.0
"""FP8 with a power of two per row: elements and scales, or values. The kernels are in `e4m3/fp8_kernel.py`."""

from __future__ import annotations

import torch
import triton

from ..common.arguments import FoldedPointers, SchemeConstants
from ..common.checks import check_input, check_output
from ..common.plan import INTERPRETED, PLAIN, Scheme, as_stored, bits, check_device, launch, scheme_constants
from .fold import Folded, _launch_rows, has_fp8, matrix_of, outputs, rows_plan, unit_columns
from .fp8_kernel import column_maxima_kernel, columns_kernel, fake_columns_kernel, fake_rows_kernel, values_kernel


#: Rows of a step of [`column_maxima_kernel`], and the most parts of columns.
_STEP = 32
_MOST_PARTS = 16
#: Rows and columns of a program of [`values_kernel`].
VALUES_TILE = 4, 512
#: Contracting a multiply and an add would change bits; see `common/blocks.py`.
_OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}


def quantize_e4m3(x: torch.Tensor, *, axis: int = 1) -> Folded:
    """``x`` rounded to E4M3 with one power-of-two scale per row (column for ``axis=0``): the bits of
    ``hf_mxfp4.numerics.quantize_e4m3``, its scale as float32, NaN for a row that holds NaN or infinity.

    Arguments and errors as in [`mxfp4_kernels.fold_e4m3`].
    """
    scheme = Scheme()
    matrix = matrix_of("quantize_e4m3", x, axis, scheme)
    check_device(x)
    n_rows, length = matrix.shape
    out, scale = outputs(n_rows, length, "row", x.device)
    if not matrix.numel():
        scale.fill_(2.0**-126)
        return Folded(out, scale, None, length)
    constants = scheme_constants(x.dtype, scheme, native=has_fp8(x.device))
    if _lies_in_columns(matrix):
        _launch_columns(matrix.t(), out, scale, constants)
    else:
        _launch_rows(matrix, out, scale, None, PLAIN, constants, fp8=True)
    return Folded(out, scale, None, length)


def quantize_e4m3_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The elements ``[..., K]`` and scale bytes (uint8 ``[..., 1]``) of ``hf_mxfp4.numerics.quantize_e4m3``: what
    [`quantize_e4m3`] has, without padding and of any shape, to be kept. [`dequantize_e4m3`] reads them.

    Args:
        x: float32, bfloat16 or float16 tensor ``[..., K]`` on a GPU.

    Raises:
        TypeError: not a tensor, or another dtype.
        ValueError: a scalar, or not on a GPU.
    """
    check_input("quantize_e4m3_rows", x, 1)
    check_device(x)
    elements = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    if not x.numel():
        return elements, torch.zeros(*x.shape[:-1], 1, dtype=torch.uint8, device=x.device)
    byte = torch.empty(*x.shape[:-1], 1, dtype=torch.uint8, device=x.device)
    constants = scheme_constants(x.dtype, Scheme(), native=has_fp8(x.device))
    matrix = _rows_of(x.detach())
    _launch_rows(matrix, elements.view(matrix.shape), byte.view(-1, 1), None, PLAIN, constants, fp8=True)
    return elements, byte


def dequantize_e4m3(elements: torch.Tensor, byte: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The values ``[..., K]`` of what [`quantize_e4m3_rows`] gives, in float32, bfloat16 or float16: the bits of
    ``hf_mxfp4.numerics.dequantize_e4m3``.

    Raises:
        TypeError: another dtype, or other tensors.
        ValueError: shapes that do not fit together, or tensors that are not on a GPU.
    """
    check_output(dtype)
    if elements.dtype != torch.float8_e4m3fn or byte.dtype != torch.uint8:
        raise TypeError(f"elements must be float8_e4m3fn and scales uint8, got {elements.dtype} and {byte.dtype}")
    if elements.dim() == 0 or byte.shape != (*elements.shape[:-1], 1):
        raise ValueError(f"elements {list(elements.shape)} need a scale byte each row, got {list(byte.shape)}")
    check_device(elements)
    out = torch.empty(elements.shape, dtype=dtype, device=elements.device)
    if out.numel():
        n_cols = elements.shape[-1]
        n_rows, col_tiles = out.numel() // n_cols, triton.cdiv(n_cols, VALUES_TILE[1])
        parts = elements.contiguous().view(torch.uint8), byte.contiguous(), as_stored(out)
        grid = (triton.cdiv(n_rows, VALUES_TILE[0]) * col_tiles,)
        options = {**_OPTIONS, "SCHEME": scheme_constants(dtype, Scheme())}
        launch(values_kernel, grid, out.device, *parts, n_rows, n_cols, col_tiles, *VALUES_TILE, **options)
    return out


def _rows_of(x: torch.Tensor) -> torch.Tensor:
    """``x`` as a matrix whose rows are contiguous."""
    return unit_columns(x.reshape(-1, x.shape[-1]))


def fake_quantize_e4m3(x: torch.Tensor) -> torch.Tensor:
    """The values of [`quantize_e4m3`] along the last axis, in the dtype and shape of ``x``: the bits of
    ``hf_mxfp4.numerics.fake_quantize_e4m3``. A transposed matrix gives one.

    Args:
        x: float32, bfloat16 or float16 tensor ``[..., K]`` on a GPU.

    Raises:
        TypeError: not a tensor, or another dtype.
        ValueError: a scalar, or not on a GPU.
    """
    check_input("fake_quantize_e4m3", x, 1)
    check_device(x)
    x = x.detach()
    columns = x.dim() == 2 and _lies_in_columns(x)
    if columns:
        out = torch.empty(x.shape[1], x.shape[0], dtype=x.dtype, device=x.device)
    else:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        constants = scheme_constants(x.dtype, Scheme())
        if columns:
            _launch_fake_columns(x.t(), out, constants)
        else:
            _launch_fake_rows(x, out, constants)
    return out.t() if columns else out


def _lies_in_columns(matrix: torch.Tensor) -> bool:
    """Whether neighbours in memory are neighbours in a column."""
    return matrix.shape[1] > 1 and matrix.stride(1) != 1 and matrix.stride(0) == 1


def _launch_fake_rows(x: torch.Tensor, out: torch.Tensor, constants: SchemeConstants) -> None:
    matrix = _rows_of(x)
    n_rows, n_cols = matrix.shape
    tile, options = rows_plan(n_rows, n_cols, True, False)
    steps = triton.cdiv(n_cols, tile["COLS"]) if INTERPRETED else 0
    grid = (triton.cdiv(n_rows, tile["ROWS"]),)
    arguments = (bits(matrix), as_stored(out), n_rows, n_cols, matrix.stride(0))
    options = {**tile, "STEPS": steps, "SCHEME": constants, **options, "enable_fp_fusion": False}
    launch(fake_rows_kernel, grid, x.device, *arguments, **options)


def _column_maxima(matrix: torch.Tensor, constants: SchemeConstants) -> tuple[torch.Tensor, int]:
    """The bits of the largest magnitudes of parts of columns, ``[parts, n_cols]``, and a power of two that is no less
    than the number of parts."""
    n_rows, n_cols = matrix.shape
    steps = max(16, triton.cdiv(n_rows, _STEP * _MOST_PARTS))
    parts = triton.cdiv(n_rows, _STEP * steps)
    maxima = torch.empty(parts, n_cols, dtype=torch.int32, device=matrix.device)
    arguments = (bits(matrix), maxima, n_rows, n_cols, matrix.stride(0), steps)
    of_interpreter = {"STEPS": steps if INTERPRETED else 0, "SCHEME": constants}
    grid = (triton.cdiv(n_cols, 128), parts)
    launch(column_maxima_kernel, grid, matrix.device, *arguments, **of_interpreter, **_OPTIONS)
    return maxima, triton.next_power_of_2(parts)


def _launch_fake_columns(matrix: torch.Tensor, out: torch.Tensor, constants: SchemeConstants) -> None:
    maxima, most = _column_maxima(matrix, constants)
    n_rows, n_cols = matrix.shape
    col_tiles = triton.cdiv(n_cols, 128)
    numbers = (n_rows, n_cols, matrix.stride(0), maxima.shape[0], col_tiles)
    grid = (triton.cdiv(n_rows, 64) * col_tiles,)
    arguments = (bits(matrix), maxima, as_stored(out), *numbers, most, constants)
    launch(fake_columns_kernel, grid, matrix.device, *arguments, **_OPTIONS)


def _launch_columns(matrix: torch.Tensor, out: torch.Tensor, scale: torch.Tensor, constants: SchemeConstants) -> None:
    maxima, most = _column_maxima(matrix, constants)
    n_rows, n_cols = matrix.shape
    col_tiles = triton.cdiv(n_cols, 64)
    numbers = (n_rows, n_cols, out.shape[1], matrix.stride(0), maxima.shape[0], col_tiles)
    grid = (out.shape[1] // 128 * col_tiles,)
    pointers = FoldedPointers(out.view(torch.uint8), scale)
    arguments = (bits(matrix), maxima, pointers, *numbers, most, constants)
    launch(columns_kernel, grid, matrix.device, *arguments, **_OPTIONS)
