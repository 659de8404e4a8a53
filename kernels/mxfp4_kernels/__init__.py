# SPDX-License-Identifier: Apache-2.0
"""Triton kernels for MXFP4. Needs torch and triton only, and imports neither before a function is called.

[`fake_quantize`] gives the MXFP4 values of a tensor; [`supports`] says beforehand whether it covers a dtype and scheme.
"""

from __future__ import annotations

import math
import typing


if typing.TYPE_CHECKING:
    import torch


__all__ = ["fake_quantize", "supports"]

_DTYPES = ("torch.float32", "torch.bfloat16", "torch.float16")
_SCALE_RULES = ("rceil", "floor", "even")
_MACRO_BLOCKS = (32, 64, 128, 256)


def fake_quantize(
    x: torch.Tensor,
    *,
    scale_rule: str = "rceil",
    macro_block: int | None = None,
    macro_search: str = "static",
    outlier_fallback: float | None = None,
) -> torch.Tensor:
    """The MXFP4 values of ``x``: blocks of 32 along the last axis, rounded to nearest. No gradient flows.

    Reads ``x`` once and writes the result once. Bit for bit the eager definition of the ``hf_mxfp4`` package; an axis
    that is not a multiple of 32 behaves as if padded with zeros, a block holding NaN or infinity becomes NaN, and a
    finite input never becomes infinite.

    Args:
        x: float32, bfloat16 or float16 tensor ``[..., K]`` on a GPU, with at least one axis. A matrix may have any row
            stride; layouts without unit stride along the last axis are copied first.
        scale_rule: ``"rceil"``, ``"floor"`` or ``"even"``.
        macro_block: 32, 64, 128 or 256 elements per macro block, or `None` for no macro-block scaling.
        macro_search: ``"static"``; without macro blocks it has no effect.
        outlier_fallback: weight in (0, 1] of the quantized residual, or `None` for one pass only.

    Returns:
        Contiguous tensor of the shape and dtype of ``x``.

    Raises:
        TypeError: ``x`` is not a tensor, or has another dtype.
        ValueError: [`supports`] gives a reason against these options, ``x`` has no axis or is not on a GPU.
    """
    import torch

    if not isinstance(x, torch.Tensor):
        raise TypeError(f"fake_quantize needs a tensor, got {type(x).__name__}")
    if (reason := _unsupported_dtype(x.dtype)) is not None:
        raise TypeError(reason)
    if (reason := _unsupported_scheme(scale_rule, macro_block, macro_search, outlier_fallback)) is not None:
        raise ValueError(reason)
    if x.dim() == 0:
        raise ValueError("fake_quantize needs at least one axis, got a scalar tensor")

    from . import _launch

    return _launch.fake_quantize(x, scale_rule, macro_block, outlier_fallback)


def supports(
    x_dtype: torch.dtype,
    *,
    scale_rule: str,
    macro_block: int | str | None,
    macro_search: str,
    outlier_fallback: float | None,
    rounding: str = "nearest",
) -> str | None:
    """`None` when [`fake_quantize`] covers these options bit for bit, else the reason why not, in words."""
    if rounding != "nearest":
        return f"rounding={rounding!r} is not covered by the Triton kernel; it rounds to nearest only"
    return _unsupported_dtype(x_dtype) or _unsupported_scheme(scale_rule, macro_block, macro_search, outlier_fallback)


def _unsupported_dtype(dtype: torch.dtype) -> str | None:
    if str(dtype) in _DTYPES:
        return None
    return f"{dtype} is not covered by the Triton kernel; it takes {', '.join(_DTYPES)}"


def _unsupported_scheme(
    scale_rule: object, macro_block: object, macro_search: object, outlier_fallback: object
) -> str | None:
    if scale_rule == "mse":
        return "scale_rule='mse' is not covered by the Triton kernel, which tries no candidates"
    if scale_rule not in _SCALE_RULES:
        return f"scale_rule={scale_rule!r} is not covered by the Triton kernel; it knows {', '.join(_SCALE_RULES)}"
    if isinstance(macro_block, bool) or macro_block not in (None, *_MACRO_BLOCKS):
        return (
            f"macro_block={macro_block!r} is not covered by the Triton kernel; it takes None or one of "
            f"{', '.join(map(str, _MACRO_BLOCKS))}"
        )
    if macro_search not in ("static", "dynamic"):
        return f"macro_search={macro_search!r} is not covered by the Triton kernel; it knows static"
    if macro_search == "dynamic" and macro_block is not None:
        return "macro_search='dynamic' is not covered by the Triton kernel, which tries no candidates"
    if outlier_fallback is None:
        return None
    is_number = isinstance(outlier_fallback, (int, float)) and not isinstance(outlier_fallback, bool)
    if not is_number or not math.isfinite(outlier_fallback) or not 0 < outlier_fallback <= 1:
        return f"outlier_fallback={outlier_fallback!r} must be None or a number in (0, 1]"
    return None
