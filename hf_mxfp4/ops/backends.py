# SPDX-License-Identifier: Apache-2.0
"""Which backend quantizes a tensor: the eager reference, or the Triton kernels on a GPU."""

import functools

import torch

from ..numerics import QuantScheme, apply_scheme


def fake_quantize(x: torch.Tensor, scheme: QuantScheme, backend: str = "auto") -> torch.Tensor:
    """[`hf_mxfp4.numerics.fake_quantize`] along the last axis, on the backend named or, for ``"auto"``, the fastest
    that covers the scheme. All backends give the same bits.

    Raises `ValueError` when the backend named cannot do it.
    """
    name, reason = backend_for(x.device.type, x.dtype, scheme, backend)
    if name == "eager":
        return apply_scheme(x, scheme)
    if reason:
        raise ValueError(f"backend='triton' cannot quantize here: {reason}; use backend='auto'")
    import mxfp4_kernels

    return mxfp4_kernels.fake_quantize(
        x,
        scale_rule=scheme.scale_rule.value,
        macro_block=scheme.macro_block,
        macro_search=scheme.macro_search,
        outlier_fallback=scheme.outlier_fallback,
    )


@functools.lru_cache(maxsize=256)
def backend_for(device_type: str, dtype: torch.dtype, scheme: QuantScheme, backend: str) -> tuple[str, str | None]:
    """The backend chosen for a tensor, and why the Triton kernels are not usable (`None` when they are)."""
    if backend == "eager":
        return "eager", "eager was asked for"
    reason = _triton_obstacle(device_type, dtype, scheme)
    if backend == "triton":
        return "triton", reason
    return ("eager" if reason else "triton"), reason


def _triton_obstacle(device_type: str, dtype: torch.dtype, scheme: QuantScheme) -> str | None:
    if device_type not in ("cuda", "xpu"):
        return f"the tensor is on {device_type}"
    try:
        import triton  # noqa: F401

        import mxfp4_kernels
    except ImportError as error:
        return f"Triton is not installed ({error})"
    return mxfp4_kernels.supports(
        dtype,
        scale_rule=scheme.scale_rule.value,
        macro_block=scheme.macro_block,
        macro_search=scheme.macro_search,
        outlier_fallback=scheme.outlier_fallback,
        rounding=scheme.rounding,
    )
