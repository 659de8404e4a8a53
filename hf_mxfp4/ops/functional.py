# SPDX-License-Identifier: Apache-2.0
"""The functions on tensors that users call: those of [`hf_mxfp4.numerics`], on the fastest backend for the tensor."""

from typing import Any

import torch

from ..numerics import MXFP4Tensor, QuantScheme
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
    return quantization.fake_quantize(x.movedim(axis, -1), scheme, backend, seed=seed).movedim(-1, axis)


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
    return quantization.quantize(x, scheme, backend, axis=check_input(x, axis, scheme.block_rows), seed=seed)
