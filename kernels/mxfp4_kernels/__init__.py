# SPDX-License-Identifier: Apache-2.0
"""Triton kernels for MXFP4. Needs torch and triton only, and imports neither before a function is called.

[`fake_quantize`] gives the MXFP4 values of a tensor, [`quantize`] their codes and scale bytes, [`dequantize`] the
values of those; [`supports`] says beforehand whether a dtype and scheme are covered.
"""

from __future__ import annotations

import math
import typing


if typing.TYPE_CHECKING:
    import torch

    from ._launch import Packed


__all__ = ["dequantize", "fake_quantize", "quantize", "supports"]

_DTYPES = ("torch.float32", "torch.bfloat16", "torch.float16")
_SCALE_RULES = ("rceil", "floor", "even", "mse")
_MACRO_BLOCKS = (32, 64, 128, 256)
_MACRO_SEARCHES = ("static", "dynamic", "blockwise")
_BLOCK_ROWS = (1, 32)


def fake_quantize(
    x: torch.Tensor,
    *,
    scale_rule: str = "rceil",
    macro_block: int | None = None,
    macro_search: str = "static",
    outlier_fallback: float | None = None,
    block_rows: int = 1,
) -> torch.Tensor:
    """The MXFP4 values of ``x``: blocks of 32 along the last axis, rounded to nearest. No gradient flows.

    Reads ``x`` once and writes the result once. Bit for bit the eager definition of the ``hf_mxfp4`` package; an axis
    that is not a multiple of 32 behaves as if padded with zeros, a block holding NaN or infinity becomes NaN, and a
    finite input never becomes infinite.

    Args:
        x: float32, bfloat16 or float16 tensor ``[..., K]`` on a GPU, with at least one axis. A matrix may have any row
            stride; layouts without unit stride along the last axis are copied first.
        scale_rule: ``"rceil"``, ``"floor"``, ``"even"``, or ``"mse"`` (the best of three scales by squared error).
        macro_block: 32, 64, 128 or 256 elements per macro block, or `None` for no macro-block scaling.
        macro_search: ``"static"``, ``"dynamic"`` (the best of 16 factors by squared error) or ``"blockwise"`` (two
            mantissa bits for each block's scale; ``macro_block`` 128); without macro blocks it has no effect.
        outlier_fallback: weight in (0, 1] of the quantized residual, or `None` for one pass only.
        block_rows: rows that share blocks: 1, or 32 for tiles of 32 x 32 over the last two axes.

    Returns:
        Contiguous tensor of the shape and dtype of ``x``.

    Raises:
        TypeError: ``x`` is not a tensor, or has another dtype.
        ValueError: [`supports`] gives a reason against these options, ``x`` has too few axes or is not on a GPU.
    """
    _check("fake_quantize", x, scale_rule, macro_block, macro_search, outlier_fallback, block_rows)
    from . import _launch

    scheme = _launch.Scheme(scale_rule, macro_block, macro_search, outlier_fallback, block_rows)
    return _launch.fake_quantize(x, scheme)


def quantize(
    x: torch.Tensor,
    *,
    scale_rule: str = "rceil",
    macro_block: int | None = None,
    macro_search: str = "static",
    outlier_fallback: float | None = None,
    block_rows: int = 1,
) -> Packed:
    """Codes and scales of ``x``, of which [`dequantize`] makes the bits of [`fake_quantize`]. Reads ``x`` once.

    Arguments and errors as in [`fake_quantize`].

    Returns:
        Named tuple of contiguous uint8 tensors: ``codes`` ``[..., ceil(K/2)]``, two E2M1 codes per byte, even index in
        the low nibble; ``scale`` ``[..., ceil(K/32)]``, E8M0; ``macro`` ``[..., ceil(K/macro_block)]`` or `None`;
        ``residual_codes`` and ``residual_scale``, as the first two, or `None`. Where rows share blocks, bytes are there
        for each row.
    """
    _check("quantize", x, scale_rule, macro_block, macro_search, outlier_fallback, block_rows)
    from . import _launch

    return _launch.quantize(x, _launch.Scheme(scale_rule, macro_block, macro_search, outlier_fallback, block_rows))


def dequantize(
    codes: torch.Tensor,
    scale: torch.Tensor,
    *,
    length: int,
    macro: torch.Tensor | None = None,
    macro_block: int | None = None,
    macro_search: str = "static",
    residual_codes: torch.Tensor | None = None,
    residual_scale: torch.Tensor | None = None,
    outlier_fallback: float | None = None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Values ``[..., length]`` of codes and scale bytes, laid out as [`quantize`] returns them, in float32, bfloat16 or
    float16. Finite ones that the dtype does not hold become its largest; NaN stays NaN.

    Raises:
        TypeError: another dtype, or tensors that are not uint8.
        ValueError: shapes that do not fit together, options without their tensors or the reverse, or tensors that are
            not on a GPU.
    """
    if (reason := _unsupported_dtype(dtype)) is not None:
        raise TypeError(reason)
    if (reason := _unsupported_scheme("rceil", macro_block, macro_search, outlier_fallback, 1)) is not None:
        raise ValueError(reason)
    expected = {
        "codes": (codes, 2),
        "scale": (scale, 32),
        "macro": (macro, macro_block),
        "residual_codes": (residual_codes, None if outlier_fallback is None else 2),
        "residual_scale": (residual_scale, None if outlier_fallback is None else 32),
    }
    for name, (tensor, elements) in expected.items():
        if (tensor is None) != (elements is None):
            found = "missing" if tensor is None else "given"
            raise ValueError(f"{name} is {found} for {macro_block=}, {outlier_fallback=}")
        if tensor is None:
            continue
        if str(tensor.dtype) != "torch.uint8":
            raise TypeError(f"{name} must be uint8, got {tensor.dtype}")
        shape = (*codes.shape[:-1], -(-length // elements))
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} has the shape {list(tensor.shape)}; {length} elements need {list(shape)}")
    from . import _launch

    packed = _launch.Packed(codes, scale, macro, residual_codes, residual_scale)
    scheme = _launch.Scheme("rceil", macro_block, macro_search, outlier_fallback)
    return _launch.dequantize(packed, length, scheme, dtype)


def supports(
    dtype: torch.dtype,
    *,
    scale_rule: str,
    macro_block: int | str | None,
    macro_search: str,
    outlier_fallback: float | None,
    rounding: str = "nearest",
    block_rows: int = 1,
) -> str | None:
    """`None` when the functions of this package cover these options bit for bit, else the reason why not, in words."""
    if rounding != "nearest":
        return f"rounding={rounding!r} is not covered by the Triton kernels; they round to nearest only"
    return _unsupported_dtype(dtype) or _unsupported_scheme(
        scale_rule, macro_block, macro_search, outlier_fallback, block_rows
    )


def _check(name: str, x: object, *scheme: object) -> None:
    """Raise as [`fake_quantize`] says."""
    import torch

    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} needs a tensor, got {type(x).__name__}")
    if (reason := _unsupported_dtype(x.dtype)) is not None:
        raise TypeError(reason)
    if (reason := _unsupported_scheme(*scheme)) is not None:
        raise ValueError(reason)
    if x.dim() == 0:
        raise ValueError(f"{name} needs at least one axis, got a scalar tensor")
    *_, block_rows = scheme
    if block_rows != 1 and x.dim() < 2:
        raise ValueError(f"blocks of {block_rows} rows need a tensor with at least two axes, got {x.dim()}")


def _unsupported_dtype(dtype: torch.dtype) -> str | None:
    if str(dtype) in _DTYPES:
        return None
    return f"{dtype} is not covered by the Triton kernels; they take {', '.join(_DTYPES)}"


def _unsupported_scheme(
    scale_rule: object, macro_block: object, macro_search: object, outlier_fallback: object, block_rows: object
) -> str | None:
    for name, value, known in (
        ("scale_rule", scale_rule, _SCALE_RULES),
        ("macro_block", macro_block, (None, *_MACRO_BLOCKS)),
        ("macro_search", macro_search, _MACRO_SEARCHES),
        ("block_rows", block_rows, _BLOCK_ROWS),
    ):
        if isinstance(value, bool) or value not in known:
            return f"{name}={value!r} is not covered by the Triton kernels; they know {', '.join(map(str, known))}"
    if macro_search == "blockwise" and macro_block not in (None, 128):
        return f"macro_search='blockwise' needs macro_block=128, got macro_block={macro_block!r}"
    if outlier_fallback is None:
        return None
    is_number = isinstance(outlier_fallback, (int, float)) and not isinstance(outlier_fallback, bool)
    if not is_number or not math.isfinite(outlier_fallback) or not 0 < outlier_fallback <= 1:
        return f"outlier_fallback={outlier_fallback!r} must be None or a number in (0, 1]"
    return None
