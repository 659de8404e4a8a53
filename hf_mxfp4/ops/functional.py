# SPDX-License-Identifier: Apache-2.0
"""The functions on tensors that users call: those of [`hf_mxfp4.numerics`], on the fastest backend for the tensor."""

from typing import Any

import torch

from .. import numerics
from ..numerics import PARTS, MXFP4Tensor, QuantScheme, apply_scheme, part_sizes
from ..numerics.quantize import check_input
from . import quantization


def fake_quantize(
    x: torch.Tensor,
    *,
    axis: int = -1,
    seed: int | None = None,
    backend: str = "auto",
    **options: Any,
) -> torch.Tensor:
    """[`hf_mxfp4.numerics.fake_quantize`], the same bits, on the backend named: ``"eager"``, ``"cpu"`` (fused C++),
    ``"triton"``, or ``"auto"`` for the fastest that covers what is asked. ``options`` are the fields of a
    [`QuantScheme`](hf_mxfp4.numerics.QuantScheme).

    Raises as that function does; also `ValueError` when the backend named cannot do it.
    """
    scheme = QuantScheme(**options)
    axis = check_input(x, axis, scheme.block_rows)
    rows = x.movedim(axis, -1)
    if not torch.compiler.is_compiling():
        values = quantization.fake_quantize(rows, scheme, backend, seed=seed)
    elif scheme.rounding == "nearest" and quantization.needs_operator(rows):
        values = torch.ops.hf_mxfp4.fake_quantize(rows.detach(), str(scheme), backend)
    else:
        values = apply_scheme(rows, scheme, seed=seed)
    return values.movedim(-1, axis)


def quantize(
    x: torch.Tensor,
    *,
    axis: int = -1,
    seed: int | None = None,
    backend: str = "auto",
    **options: Any,
) -> MXFP4Tensor:
    """[`hf_mxfp4.numerics.quantize`], the same bits. Arguments and errors as in [`fake_quantize`]. The tensor's
    `dequantize` takes the fastest backend."""
    scheme = QuantScheme(**options)
    axis = check_input(x, axis, scheme.block_rows)
    if not torch.compiler.is_compiling():
        return quantization.quantize(x, scheme, backend, axis=axis, seed=seed)
    if scheme.rounding != "nearest" or not quantization.needs_operator(x):
        return numerics.quantize(x, **options, axis=axis, seed=seed)
    parts = torch.ops.hf_mxfp4.quantize(x.detach().movedim(axis, -1), str(scheme), backend)
    fields = {}
    for name, part, size in zip(PARTS, parts, part_sizes(scheme, 1), strict=True):
        fields[name] = None if size is None else part
    return quantization.FusedTensor(**fields, length=x.shape[axis], axis=axis, scheme=scheme, dtype=x.dtype)
