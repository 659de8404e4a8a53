# SPDX-License-Identifier: Apache-2.0
"""Quantized values as FP8 tensor cores take them: E4M3 elements and one float32 scale per row.

Every E2M1 value times ``2**s`` with s in -8..6 is an E4M3 value (OCP 8-bit floating point: three mantissa bits, normal
from 2**-6 to 448, steps of 2**-9 below). With a power of two per row that takes the row's largest value to 256..448,
the conversion is exact for blocks within 2**-14 of the largest one; smaller values are rounded, and counted.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from ..backends import select as backends
from ..backends import triton as triton_kernels
from .dispatch import count_inexact


_LARGEST = 448.0


class FP8Operand(NamedTuple):
    """``elements [R, C]``, float8_e4m3fn, times ``scale [R, 1]``, float32 powers of two."""

    elements: torch.Tensor
    scale: torch.Tensor


def to_fp8(values: torch.Tensor) -> FP8Operand:
    """A matrix of quantized values as elements and scales of its rows. NaN and infinite values become NaN."""
    if backends.supports_e4m3(values):
        elements, scale, inexact = triton_kernels.to_fp8(values)
        count_inexact(inexact)
        return FP8Operand(elements, scale)
    wide = values.float()
    finite = wide.isfinite()
    top = torch.where(finite, wide.abs(), 0).amax(dim=1, keepdim=True)
    _, exponent = torch.frexp(top)
    scale = torch.ldexp(torch.ones_like(top), (exponent - 9).clamp(-126, 126))
    scale = torch.where(top > scale * _LARGEST, scale * 2, scale)
    elements = torch.where(finite, wide / scale, torch.nan).to(torch.float8_e4m3fn)
    count_inexact((elements.float() * scale != wide).logical_and(finite).sum())
    return FP8Operand(elements.contiguous(), scale)


def multiplies(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether FP8 tensor cores multiply operands of these shapes, ``a [..., C] b[D, C]^T``: C and D multiples of 16."""
    if 0 in (*a.shape, *b.shape):
        return False
    return a.is_cpu or b.shape[1] % 16 == 0 and b.shape[0] % 16 == 0


def scaled_product(a: FP8Operand, b: FP8Operand, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """``a [M, C] b[D, C]^T + bias`` in ``dtype``, sums in float32."""
    per_row = F.ScalingType.RowWise
    out = F.scaled_mm(
        a.elements,
        b.elements.t(),
        a.scale,
        per_row,
        b.scale.t(),
        per_row,
        output_dtype=dtype,
        use_fast_accum=False,  # which would keep 14 bits of the sums
    )
    return out if bias is None else out + bias
