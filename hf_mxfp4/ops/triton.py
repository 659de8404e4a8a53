# SPDX-License-Identifier: Apache-2.0
"""Calls of the Triton kernels of [`mxfp4_kernels`] on torch tensors."""

import functools
import os
from collections.abc import Sequence
from typing import Any

import torch

import mxfp4_kernels

from ..numerics import PARTS, MXFP4Tensor, QuantScheme


#: More rows than this (of each expert, in the mean) are multiplied with a dequantized copy: two bytes more are then
#: written and read for each weight, once, where every tile of rows decodes the weight again.
MOST_DECODED_ROWS = 256
MOST_DECODED_ROWS_OF_EXPERTS = 128


def unsupported_reason(device_type: str, dtype: torch.dtype, scheme: QuantScheme) -> str | None:
    """Return why the kernels cannot quantize tensors of this device and dtype under this scheme, or read what they make
    of them; `None` when they can. On the CPU they run in Triton's interpreter, under TRITON_INTERPRET=1, and slowly."""
    if device_type not in ("cuda", "xpu") and not (device_type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"):
        return f"the tensor is on {device_type}"
    try:
        mxfp4_kernels.Scheme  # noqa: B018
    except ImportError as error:
        return f"Triton is not installed ({error})"
    return mxfp4_kernels.unsupported_dtype(dtype) or mxfp4_kernels.unsupported_scheme(*_fields(scheme))


def fake_quantize(
    x: torch.Tensor,
    scheme: QuantScheme,
    seed: int | None = None,
    rotation: int | None = None,
    signs: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """[`hf_mxfp4.ops.quantization.fake_quantize`] of a tensor that the kernels support."""
    computed = x.dtype if rotation is None else torch.float32
    dtype = dtype or computed
    written = written_dtype(scheme, dtype) if computed == torch.float32 else computed
    if written != dtype:
        out = None
    side = _side(scheme, seed, rotation, signs)
    return mxfp4_kernels.fake_quantize(x, _scheme(scheme), side, written, out=out).to(dtype)


def written_dtype(scheme: QuantScheme, dtype: torch.dtype) -> torch.dtype:
    """Return what a kernel must write so that casting it to ``dtype`` is casting float32 values: kernels saturate,
    casts do not, and only values without a residual are within bfloat16 always."""
    return torch.bfloat16 if dtype == torch.bfloat16 and scheme.outlier_fallback is None else torch.float32


def fake_quantize_rows_and_columns(
    x: torch.Tensor,
    schemes: Sequence[QuantScheme],
    seeds: Sequence[int | None],
    rotations: Sequence[int | None],
    signs: Sequence[torch.Tensor | None],
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Values of ``x [M, K]`` and of its transpose from one read, as ``dtype``; schemes differ in their rounding."""
    sides = [_side(*side) for side in zip(schemes, seeds, rotations, signs, strict=True)]
    written = written_dtype(schemes[0], dtype) if any(rotations) else x.dtype
    rows, columns = mxfp4_kernels.fake_quantize_rows_and_columns(
        x, _scheme(schemes[0]), sides[0], sides[1], dtype=written
    )
    return rows.to(dtype), columns.to(dtype)


def quantize(
    x: torch.Tensor, scheme: QuantScheme, axis: int, seed: int | None = None, out: MXFP4Tensor | None = None
) -> MXFP4Tensor:
    """[`hf_mxfp4.numerics.quantize`] of a tensor that the kernels support, written to the tensors of ``out``, an
    earlier result for a tensor of this shape; ``axis`` is not negative."""
    rows = x.movedim(axis, -1)
    side = _side(scheme, seed)
    if out is not None:
        mxfp4_kernels.quantize(rows, _scheme(scheme), side, out=_packed(out))
        return out
    packed = mxfp4_kernels.quantize(rows, _scheme(scheme), side)
    parts = dict(zip(PARTS, packed, strict=True))
    return MXFP4Tensor(**parts, length=x.shape[axis], axis=axis, scheme=scheme, dtype=x.dtype)


def dequantize(tensor: MXFP4Tensor, dtype: torch.dtype, out: torch.Tensor | None = None) -> torch.Tensor:
    """[`MXFP4Tensor.dequantize`] of what [`unsupported_reason`] does not refuse, written to ``out`` if that is an
    earlier result for a tensor with blocks along its last axis."""
    is_last = tensor.axis == tensor.codes.dim() - 1
    values = mxfp4_kernels.dequantize(
        _packed(tensor), tensor.length, _scheme(tensor.scheme), dtype, out=out if is_last else None
    )
    return values if is_last else values.movedim(-1, tensor.axis)


def quantize_e4m3(x: torch.Tensor, scale_dtype: torch.dtype = torch.uint8) -> tuple[torch.Tensor, torch.Tensor]:
    """[`hf_mxfp4.ops.quantize_e4m3`] of a tensor that the kernels support."""
    return mxfp4_kernels.to_fp8(x, scale_dtype)


def quantize_e4m3_twice(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[`hf_mxfp4.ops.quantization.quantize_e4m3_twice`] of a matrix that the kernels support."""
    return mxfp4_kernels.to_fp8_rows_and_columns(x, nan_rows=True)


def transpose_e4m3(elements: torch.Tensor) -> torch.Tensor:
    """[`hf_mxfp4.ops.quantization.transpose_e4m3`] of contiguous elements."""
    return mxfp4_kernels.transpose_fp8(elements)


def dequantize_e4m3(elements: torch.Tensor, byte: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[`hf_mxfp4.numerics.dequantize_e4m3`] in a dtype that the kernels support."""
    return mxfp4_kernels.from_fp8(elements, byte, dtype)


def to_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[`hf_mxfp4.ops.to_fp8`] of a tensor that the kernels support: elements, scales of rows, and the number of
    elements that were rounded, a scalar on the device."""
    inexact = torch.zeros((), dtype=torch.int32, device=x.device)
    return *mxfp4_kernels.to_fp8(x, inexact=inexact), inexact


def weight_to_fp8(
    values: torch.Tensor,
    whole: bool,
    with_columns: bool,
    rounded: torch.Tensor,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Elements of weights ``[..., N, K]``, those of their transposes or `None`, and scales ``[..., N, 1]``, of rows or
    of ``whole`` matrices. Adds to the number of ``rounded`` elements; elements are written to both tensors of ``out``.
    """
    top = torch.linalg.vector_norm(values, torch.inf, dim=(-2, -1), dtype=torch.float32) if whole else None
    if not with_columns:
        elements, scale = mxfp4_kernels.to_fp8(values, inexact=rounded, top=top)
        return elements, None, scale
    outputs = None
    if out is not None:
        outputs = (*out, values.new_empty(*values.shape[:-1], 1, dtype=torch.float32))
    return mxfp4_kernels.to_fp8_rows_and_columns(values, inexact=rounded, top=top, out=outputs)


def gradient_to_fp8(
    grad: torch.Tensor, token_scales: torch.Tensor, weight_scales: torch.Tensor | None, n_columns: int
) -> Any:
    """See [`hf_mxfp4.ops.fp8.gradient_operands`]."""
    return mxfp4_kernels.gradient_to_fp8(grad, token_scales, weight_scales, n_columns=n_columns)


def nvfp4_scales(byte: torch.Tensor, macro: torch.Tensor | None, by_rows: bool) -> tuple[torch.Tensor, ...]:
    """Return what [`hf_mxfp4.ops.to_fp4`] makes of scale bytes and block mantissas for NVFP4 products."""
    return mxfp4_kernels.nvfp4_scales(byte, macro, by_rows)


@functools.lru_cache(maxsize=4096)
def unsupported_product(rows: int, length: int, dtype: torch.dtype, n_experts: int | None = None) -> str | None:
    """Return why [`linear`] does not multiply so many rows, of all experts or of one weight, with the codes of weights
    ``[..., N, length]``; `None` when it does."""
    most = MOST_DECODED_ROWS if n_experts is None else MOST_DECODED_ROWS_OF_EXPERTS * max(1, min(rows, n_experts))
    if rows > most:
        return f"{rows} rows: decoding the weight once costs less than once for every tile of rows"
    return mxfp4_kernels.unsupported_weight(dtype, length)


def linear(
    x: torch.Tensor, weight: MXFP4Tensor, bias: torch.Tensor | None, offsets: torch.Tensor | None = None
) -> torch.Tensor:
    """``x Q(W)^T + b`` on the codes of a weight ``[N, K]``, or with ``offsets`` (where the rows of each expert end,
    int32) of weights ``[E, N, K]``, that [`unsupported_product`] does not refuse."""
    return mxfp4_kernels.linear_w4a16(x, _packed(weight), weight.length, _scheme(weight.scheme), bias, offsets)


def packed_product(n: int, k: int, scheme: QuantScheme, device: torch.device, n_experts: int | None = None) -> Any:
    """Return what multiplies few rows with the codes of weights ``[N, K]`` or ``[E, N, K]`` on a device."""
    return mxfp4_kernels.PackedProduct(n, k, _scheme(scheme), device, n_experts)


def _fields(scheme: QuantScheme) -> tuple:
    """Return the fields of the kernels' scheme."""
    return scheme.scale_rule.value, scheme.macro_block, scheme.macro_search, scheme.outlier_fallback, scheme.block_rows


@functools.lru_cache(maxsize=64)
def _scheme(scheme: QuantScheme) -> Any:
    scale_rule, macro_block, search, *rest = _fields(scheme)
    return mxfp4_kernels.Scheme(scale_rule, macro_block, search if macro_block else "static", *rest)


def _side(scheme: QuantScheme, seed: int | None, rotation: int | None = None, signs: torch.Tensor | None = None) -> Any:
    return mxfp4_kernels.Side(None if scheme.rounding == "nearest" else seed, rotation, signs)


def _packed(tensor: MXFP4Tensor) -> Any:
    return mxfp4_kernels.Packed(*tensor.parts)
