# SPDX-License-Identifier: Apache-2.0
"""The functions on tensors that users call: those of [`hf_mxfp4.numerics`], on the fastest backend for the tensor."""

import torch

from .. import numerics
from ..numerics import MXFP4Tensor, QuantScheme, ScaleRule
from ..numerics.quantize import check_input
from ..numerics.rng import noise_source
from . import cpu
from . import select as backends
from . import triton as triton_kernels


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
    seed: int | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """[`hf_mxfp4.numerics.fake_quantize`], the same bits, on the backend named: ``"eager"``, ``"cpu"`` (fused C++),
    ``"triton"``, or ``"auto"`` for the fastest that covers what is asked.

    Raises as that function does; also `ValueError` when the backend named cannot do it.
    """
    scheme = QuantScheme(scale_rule, macro_block, macro_search, outlier_fallback, rounding, block_rows, fallback_rate)
    axis = check_input(x, axis, block_rows)
    if generator is None:
        return backends.fake_quantize(x.movedim(axis, -1), scheme, backend, seed=seed).movedim(-1, axis)
    _only_eager(backend)
    return numerics.apply_scheme(
        x,
        scheme,
        axis=axis,
        generator=generator,
        seed=seed,
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
    seed: int | None = None,
    backend: str = "auto",
) -> MXFP4Tensor:
    """[`hf_mxfp4.numerics.quantize`], the same bits, on the backend named: ``"eager"``, ``"cpu"`` (fused C++),
    ``"triton"``, or ``"auto"`` for the fastest that covers what is asked. The tensor's `dequantize` takes the fastest.

    Raises as that function does; also `ValueError` when the backend named cannot do it.
    """
    scheme = QuantScheme(scale_rule, macro_block, macro_search, outlier_fallback, rounding, block_rows, fallback_rate)
    axis = check_input(x, axis, block_rows)
    if generator is None:
        noise_source(scheme.rounding, None, seed)
        if backends.needs_operator(x) and scheme.rounding == "nearest":
            return _compiled_quantize(x, scheme, axis, backend)
        name = backends.choose_backend(x, scheme, backend, seed)
        if name == "cpu":
            return _FusedTensor(**vars(cpu.quantize(x, scheme, axis)))
        if name == "triton":
            return _FusedTensor(**vars(triton_kernels.quantize(x, scheme, axis, seed)))
    else:
        _only_eager(backend)
    tensor = numerics.quantize(
        x,
        **vars(scheme),
        axis=axis,
        generator=generator,
        seed=seed,
    )
    return _FusedTensor(**vars(tensor))


def _compiled_quantize(x: torch.Tensor, scheme: QuantScheme, axis: int, backend: str) -> "_FusedTensor":
    parts = torch.ops.hf_mxfp4.quantize(x.detach().movedim(axis, -1), str(scheme), backend)
    has = True, True, scheme.macro_block is not None, *[scheme.outlier_fallback is not None] * 2
    parts = [part if there else None for part, there in zip(parts, has, strict=True)]
    return _FusedTensor(*parts, length=x.shape[axis], axis=axis, scheme=scheme, dtype=x.dtype)


class _FusedTensor(MXFP4Tensor):
    """[`MXFP4Tensor`] that dequantizes on the fused backend where there is one."""

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        return backends.dequantize(self, dtype or self.dtype)


def _only_eager(backend: str) -> None:
    if backend not in ("auto", "eager"):
        raise ValueError(f"backend={backend!r} takes no generator; use backend='auto'")
