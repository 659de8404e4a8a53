# SPDX-License-Identifier: Apache-2.0
"""Calls of the Triton kernels (`mxfp4_kernels`, imported when first used) on torch tensors."""

import os
from typing import Any

import torch

from ..numerics import MXFP4Tensor, QuantScheme


def obstacle(device_type: str, dtype: torch.dtype, scheme: QuantScheme) -> str | None:
    """Why the kernels cannot quantize tensors of this device and dtype under this scheme, or read what it makes of
    them; `None` when they can. On the CPU they run in Triton's interpreter, under TRITON_INTERPRET=1, and slowly."""
    if device_type not in ("cuda", "xpu") and not (device_type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"):
        return f"the tensor is on {device_type}"
    if scheme.fallback_rate is not None:
        return "selective outlier fallback (fallback_rate) has no Triton kernel"
    try:
        import triton  # noqa: F401

        import mxfp4_kernels
    except ImportError as error:
        return f"Triton is not installed ({error})"
    return mxfp4_kernels.supports(dtype, rounding=scheme.rounding, **_options(scheme))


def fake_quantize(x: torch.Tensor, scheme: QuantScheme) -> torch.Tensor:
    """[`hf_mxfp4.numerics.apply_scheme`] along the last axis of a tensor that [`obstacle`] does not refuse."""
    import mxfp4_kernels

    return mxfp4_kernels.fake_quantize(x, **_options(scheme))


def quantize(x: torch.Tensor, scheme: QuantScheme, axis: int) -> MXFP4Tensor:
    """[`hf_mxfp4.numerics.quantize`] of a tensor that [`obstacle`] does not refuse; ``axis`` is not negative."""
    import mxfp4_kernels

    packed = mxfp4_kernels.quantize(x.movedim(axis, -1), **_options(scheme))
    return MXFP4Tensor(*packed, length=x.shape[axis], axis=axis, scheme=scheme, dtype=x.dtype)


def dequantize(tensor: MXFP4Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[`MXFP4Tensor.dequantize`] of what [`obstacle`] does not refuse."""
    import mxfp4_kernels

    out = mxfp4_kernels.dequantize(
        tensor.codes,
        tensor.scale,
        length=tensor.length,
        macro=tensor.macro,
        residual_codes=tensor.residual_codes,
        residual_scale=tensor.residual_scale,
        dtype=dtype,
        **_stored(tensor.scheme),
    )
    return out.movedim(-1, tensor.axis)


def _options(scheme: QuantScheme) -> dict[str, Any]:
    return {"scale_rule": scheme.scale_rule.value, "block_rows": scheme.block_rows, **_stored(scheme)}


def _stored(scheme: QuantScheme) -> dict[str, Any]:
    """What dequantization needs to know."""
    return {
        "macro_block": scheme.macro_block,
        "macro_search": scheme.macro_search,
        "outlier_fallback": scheme.outlier_fallback,
    }
