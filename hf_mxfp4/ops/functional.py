# SPDX-License-Identifier: Apache-2.0
"""The functions on tensors that users call: those of [`hf_mxfp4.numerics`], on the fastest backend for the tensor."""

import torch

from .. import numerics
from ..numerics import MXFP4Tensor, QuantScheme, ScaleRule
from ..numerics.quantize import check_input
from . import backends, cpu, triton_kernels


def fake_quantize(
    x: torch.Tensor,
    *,
    scale_rule: ScaleRule | str = ScaleRule.RCEIL,
    macro_block: int | str | None = None,
    macro_search: str = "static",
    outlier_fallback: float | None = None,
    rounding: str = "nearest",
    block_rows: int = 1,
    fallback_rate: float | None = None,
    axis: int = -1,
    generator: torch.Generator | None = None,
    fallback_threshold: float | None = None,
    importance: torch.Tensor | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """[`hf_mxfp4.numerics.fake_quantize`], the same bits, on the backend named: ``"eager"``, ``"cpu"`` (fused C++),
    ``"triton"``, or ``"auto"`` for the fastest that covers what is asked.

    Raises as that function does; also `ValueError` when the backend named cannot do it.
    """
    scheme = QuantScheme(scale_rule, macro_block, macro_search, outlier_fallback, rounding, block_rows, fallback_rate)
    axis = check_input(x, axis, block_rows)
    if generator is fallback_threshold is importance is None:
        return backends.fake_quantize(x.movedim(axis, -1), scheme, backend).movedim(-1, axis)
    _only_eager(backend)
    return numerics.apply_scheme(
        x, scheme, axis=axis, generator=generator, fallback_threshold=fallback_threshold, importance=importance
    )


def quantize(
    x: torch.Tensor,
    *,
    scale_rule: ScaleRule | str = ScaleRule.RCEIL,
    macro_block: int | str | None = None,
    macro_search: str = "static",
    outlier_fallback: float | None = None,
    rounding: str = "nearest",
    block_rows: int = 1,
    fallback_rate: float | None = None,
    axis: int = -1,
    generator: torch.Generator | None = None,
    fallback_threshold: float | None = None,
    importance: torch.Tensor | None = None,
    backend: str = "auto",
) -> MXFP4Tensor:
    """[`hf_mxfp4.numerics.quantize`], the same bits, on the backend named: ``"eager"``, ``"cpu"`` (fused C++),
    ``"triton"``, or ``"auto"`` for the fastest that covers what is asked. The tensor's `dequantize` takes the fastest.

    Raises as that function does; also `ValueError` when the backend named cannot do it.
    """
    scheme = QuantScheme(scale_rule, macro_block, macro_search, outlier_fallback, rounding, block_rows, fallback_rate)
    axis = check_input(x, axis, block_rows)
    if generator is fallback_threshold is importance is None:
        name = backends.choose_backend(x, scheme, backend)
        if name == "cpu":
            return _FusedTensor(**vars(cpu.quantize(x, scheme, axis)))
        if name == "triton":
            return _FusedTensor(**vars(triton_kernels.quantize(x, scheme, axis)))
    else:
        _only_eager(backend)
    tensor = numerics.quantize(
        x,
        **vars(scheme),
        axis=axis,
        generator=generator,
        fallback_threshold=fallback_threshold,
        importance=importance,
    )
    return _FusedTensor(**vars(tensor))


class _FusedTensor(MXFP4Tensor):
    """[`MXFP4Tensor`] that dequantizes on the fused backend where there is one."""

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        return backends.dequantize(self, dtype or self.dtype)


def _only_eager(backend: str) -> None:
    if backend not in ("auto", "eager"):
        raise ValueError(
            f"backend={backend!r} takes no generator, fallback_threshold or importance; use backend='auto'"
        )
