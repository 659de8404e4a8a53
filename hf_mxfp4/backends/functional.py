# SPDX-License-Identifier: Apache-2.0
"""The functions on tensors that users call: those of [`hf_mxfp4.numerics`], on the fastest backend for the tensor."""

from typing import Any

import torch

from .. import numerics
from ..numerics import MXFP4Tensor, QuantScheme
from ..numerics.quantize import check_input
from ..numerics.rng import noise_source
from . import dispatch


def fake_quantize(
    x: torch.Tensor,
    *,
    axis: int = -1,
    generator: torch.Generator | None = None,
    seed: int | None = None,
    backend: str = "auto",
    **options: Any,
) -> torch.Tensor:
    """[`hf_mxfp4.numerics.fake_quantize`], the same bits, on the backend named: ``"eager"``, ``"cpu"`` (fused C++),
    ``"triton"``, or ``"auto"`` for the fastest that covers what is asked. ``options`` are the fields of a
    [`QuantScheme`](hf_mxfp4.numerics.QuantScheme).

    Raises as that function does; also `ValueError` when the backend named cannot do it.
    """
    scheme, axis = _checked(x, axis, generator, seed, backend, options)
    if generator is None:
        return dispatch.fake_quantize(x.movedim(axis, -1), scheme, backend, seed=seed).movedim(-1, axis)
    return numerics.apply_scheme(x, scheme, axis=axis, generator=generator)


def quantize(
    x: torch.Tensor,
    *,
    axis: int = -1,
    generator: torch.Generator | None = None,
    seed: int | None = None,
    backend: str = "auto",
    **options: Any,
) -> MXFP4Tensor:
    """[`hf_mxfp4.numerics.quantize`], the same bits. Arguments and errors as in [`fake_quantize`]. The tensor's
    `dequantize` takes the fastest backend."""
    scheme, axis = _checked(x, axis, generator, seed, backend, options)
    if generator is None:
        return dispatch.quantize(x, scheme, backend, axis=axis, seed=seed)
    return dispatch.FusedTensor(**vars(numerics.quantize(x, **options, axis=axis, generator=generator)))


def _checked(
    x: torch.Tensor, axis: int, generator: torch.Generator | None, seed: int | None, backend: str, options: Any
) -> tuple[QuantScheme, int]:
    """Return the scheme, and the axis as a non-negative number."""
    scheme = QuantScheme(**options)
    axis = check_input(x, axis, scheme.block_rows)
    noise_source(scheme.rounding, generator, seed)
    if generator is not None and backend not in ("auto", "eager"):
        raise ValueError(f"backend={backend!r} takes no generator; use backend='auto'")
    return scheme, axis
