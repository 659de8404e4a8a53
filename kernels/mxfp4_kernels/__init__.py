# SPDX-License-Identifier: Apache-2.0
"""Triton kernels for MXFP4. Needs torch and triton only, and imports neither before a function is called.

[`fake_quantize`] gives the MXFP4 values of a tensor, [`quantize`] their codes and scale bytes, each with a ``_both``
for a matrix and its transpose from one read, [`quantize_with_values`] both of these; [`dequantize`] gives the values of
codes; [`supports`] says beforehand whether a dtype and scheme are covered. [`fold_e4m3`] and [`fold_e4m3_both`] give
the operands of FP8 products, [`quantize_e4m3`] those of output gradients, [`fake_quantize_e4m3`] their values, both
with a ``_both`` too; [`quantize_e4m3_rows`] and [`dequantize_e4m3`] are for rows that are kept in FP8; [`matmul_e4m3`]
and [`matmul_mxf4`] give the products. For the experts of a mixture, [`grouped_matmul`], [`grouped_matmul_packed`],
[`grouped_matmul_e4m3`], [`grouped_wgrad`], [`grouped_wgrad_e4m3`] and [`grouped_sum`] compute those of all experts in
one launch. [`linear_w4a16`] multiplies with a packed weight, and [`plan_linear_w4a16`] says how.
"""

from __future__ import annotations

import typing

from .common.checks import (
    check_input,
    check_output,
    check_packed,
    check_scheme,
    unsupported_dtype,
    unsupported_row,
    unsupported_scheme,
)


if typing.TYPE_CHECKING:
    import torch

    from .quantization.launch import Packed, Scheme, Side


#: Functions of other modules -> the modules, which import torch and Triton.
_LAZY = {
    "autotune": "common.autotune",
    "dequantize_e4m3": "e4m3.fp8",
    "fake_quantize_e4m3": "e4m3.fp8",
    "fake_quantize_e4m3_both": "e4m3.fp8_both",
    "fold_e4m3": "e4m3.fold",
    "fold_e4m3_both": "e4m3.fold",
    "grouped_fake_quantize_e4m3": "e4m3.experts",
    "grouped_fold_e4m3": "e4m3.experts",
    "grouped_matmul": "gemm.grouped.matmul",
    "grouped_matmul_e4m3": "gemm.grouped.e4m3",
    "grouped_matmul_packed": "gemm.grouped.packed",
    "grouped_quantize_e4m3": "e4m3.experts",
    "grouped_sum": "gemm.grouped.matmul",
    "grouped_wgrad": "gemm.grouped.matmul",
    "grouped_wgrad_e4m3": "gemm.grouped.e4m3",
    "has_e2m1": "common.plan",
    "has_fp8": "e4m3.fold",
    "has_mxfp4": "gemm.matmul",
    "linear_w4a16": "gemm.decode",
    "matmul_e4m3": "gemm.matmul",
    "matmul_mxf4": "gemm.matmul",
    "plan_linear_w4a16": "gemm.decode_plan",
    "quantize_e4m3": "e4m3.fp8",
    "quantize_e4m3_both": "e4m3.fp8_both",
    "quantize_e4m3_rows": "e4m3.fp8",
}

__all__ = [
    "dequantize",
    "fake_quantize",
    "fake_quantize_both",
    "fake_quantize_by_macro",
    "fake_quantize_with_macro",
    "quantize",
    "quantize_both",
    "quantize_with_values",
    "supports",
    *_LAZY,
]


def __getattr__(name: str) -> typing.Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    # Found without this function from now on.
    return globals().setdefault(name, getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name))


def fake_quantize(
    x: torch.Tensor,
    *,
    scale_rule: str = "rceil",
    macro_block: int | str | None = None,
    macro_search: str = "static",
    outlier_fallback: float | None = None,
    block_rows: int = 1,
    rounding: str = "nearest",
    seed: int | None = None,
    rotation: int | None = None,
    signs: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    limit: torch.dtype | None = None,
) -> torch.Tensor:
    """The MXFP4 values of ``x``: blocks of 32 along the last axis. No gradient flows.

    Reads ``x`` once and writes the result once. Bit for bit the eager definition of the ``hf_mxfp4`` package; an axis
    that is not a multiple of 32 behaves as if padded with zeros, a block holding NaN or infinity becomes NaN, and a
    finite input never becomes infinite.

    Args:
        x: float32, bfloat16 or float16 tensor ``[..., K]`` on a GPU, with at least one axis. A matrix may have any row
            stride, and a matrix or stack of them may be a transpose (``x.mT``); layouts without unit stride along one
            of these axes are copied first.
        scale_rule: ``"rceil"``, ``"floor"``, ``"even"``, or ``"mse"`` (the best of three scales by squared error).
        macro_block: 32, 64, 128 or 256 elements per macro block, ``"row"`` for all of the axis (held in registers: up
            to 32768 elements, or 16384 with a search for factors or scales; not with ``block_rows=32``), or `None` for
            no macro-block scaling.
        macro_search: ``"static"``, ``"dynamic"`` (the best of 16 factors by squared error) or ``"blockwise"`` (two
            mantissa bits for each block's scale; ``macro_block`` 128); without macro blocks it has no effect.
        outlier_fallback: weight in (0, 1] of the quantized residual, or `None` for one pass only.
        block_rows: rows that share blocks: 1, or 32 for tiles of 32 x 32 over the last two axes.
        rounding: ``"nearest"`` (ties to even), or ``"stochastic"`` for both passes.
        seed: of stochastic rounding, an integer in 0..2**64 - 1. The numbers are counted (``hf_mxfp4.numerics.rng``):
            they depend on it and an element's place alone. A captured CUDA graph repeats those of its seed.
        rotation: 16, 32, 64 or 128 to multiply that many neighbours each by Sylvester's matrix over its root before
            (``hf_mxfp4.numerics.rotate``); the axis is then padded with zeros to a multiple, or `None`.
        signs: ``[K']`` of 1 and -1 (K' is the padded length) to multiply the columns by before the rotation, or `None`.
        dtype: of the result, float32, bfloat16 or float16; by default that of ``x``.
        limit: the dtype whose largest number values saturate at; by default that of the result. With that of ``x`` a
            narrower result has the bits of one in the dtype of ``x`` that is converted after.

    Returns:
        Contiguous tensor of the shape of ``x``, with K' columns under a rotation.

    Raises:
        TypeError: ``x`` is not a tensor, or has another dtype; no integer as the seed of stochastic rounding.
        ValueError: [`supports`] gives a reason against these options, ``x`` has too few axes or is not on a GPU, a seed
            or signs that have no effect, or signs of another length or device.
    """
    scheme = _scheme(scale_rule, macro_block, macro_search, outlier_fallback, block_rows, rounding)
    check_input("fake_quantize", x, block_rows, dtype=dtype)
    from .common.plan import checked_side
    from .quantization import launch

    side = checked_side(x, x.shape[-1], rounding, seed, rotation, signs)
    return launch.fake_quantize(x, scheme, side, dtype, limit)


def fake_quantize_with_macro(
    x: torch.Tensor,
    *,
    scale_rule: str = "rceil",
    macro_block: int = 128,
    macro_search: str = "dynamic",
    outlier_fallback: float | None = None,
    dtype: torch.dtype | None = None,
    limit: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """[`fake_quantize`], and the macro bytes that it found: uint8 ``[..., ceil(K/macro_block)]``, contiguous, those of
    [`quantize`]. [`fake_quantize_by_macro`] takes them in the place of another search.

    Arguments and errors as there; ``macro_block`` is a number, and the search not ``"blockwise"``.
    """
    scheme = _scheme(scale_rule, macro_block, macro_search, outlier_fallback, 1, "nearest")
    _check_factors(macro_block, macro_search)
    check_input("fake_quantize_with_macro", x, 1, dtype=dtype)
    from .quantization import launch

    return launch.fake_quantize_with_macro(x, scheme, dtype, limit)


def fake_quantize_by_macro(
    x: torch.Tensor,
    macro: torch.Tensor,
    *,
    scale_rule: str = "rceil",
    macro_block: int = 128,
    outlier_fallback: float | None = None,
    dtype: torch.dtype | None = None,
    limit: torch.dtype | None = None,
) -> torch.Tensor:
    """[`fake_quantize`] with macro factors that were found before: of the same ``x`` the same bits, without a search.

    Arguments and errors as there.

    Args:
        macro: bytes of [`fake_quantize_with_macro`], or of [`quantize`] of these rows.

    Raises `ValueError` for bytes of another shape or layout, too.
    """
    scheme = _scheme(scale_rule, macro_block, "static", outlier_fallback, 1, "nearest")
    _check_factors(macro_block, "static")
    check_input("fake_quantize_by_macro", x, 1, dtype=dtype)
    expected = [*x.shape[:-1], -(-x.shape[-1] // macro_block)]
    if str(macro.dtype) != "torch.uint8" or list(macro.shape) != expected or not macro.is_contiguous():
        raise ValueError(f"macro must be contiguous uint8 {expected}, got {macro.dtype} {list(macro.shape)}")
    from .common.plan import PLAIN
    from .quantization import launch

    return launch.fake_quantize(x, scheme._replace(macro_search="given"), PLAIN, dtype, limit, macro)


def fake_quantize_both(
    x: torch.Tensor,
    *,
    scale_rule: str = "rceil",
    macro_block: int | str | None = None,
    macro_search: str = "static",
    outlier_fallback: float | None = None,
    block_rows: int = 1,
    rounding: tuple[str, str] = ("nearest", "nearest"),
    seed: tuple[int | None, int | None] = (None, None),
    rotation: tuple[int | None, int | None] = (None, None),
    signs: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``fake_quantize(x, ...)`` and ``fake_quantize(x.mT, ...)`` for ``x [..., M, K]``, from one read of it.

    Arguments and errors as in [`fake_quantize`], those given as pairs for ``x`` and for its transpose. With
    ``macro_block="row"`` each side reads ``x``, and the second one a copy.

    Returns:
        Contiguous tensors ``[..., M, K]`` and ``[..., K, M]``.
    """
    scheme, sides = _pair(
        "fake_quantize_both",
        x,
        (scale_rule, macro_block, macro_search, outlier_fallback, block_rows),
        (rounding, seed, rotation, signs),
        dtype,
    )
    from .quantization import launch

    return launch.fake_quantize_both(x, scheme, *sides, dtype)


def quantize(
    x: torch.Tensor,
    *,
    scale_rule: str = "rceil",
    macro_block: int | str | None = None,
    macro_search: str = "static",
    outlier_fallback: float | None = None,
    block_rows: int = 1,
    rounding: str = "nearest",
    seed: int | None = None,
    rotation: int | None = None,
    signs: torch.Tensor | None = None,
    converts: bool = True,
) -> Packed:
    """Codes and scales of ``x``, of which [`dequantize`] makes the bits of [`fake_quantize`]. Reads ``x`` once.

    Arguments and errors as in [`fake_quantize`]; ``converts``: codes of bfloat16 by the instruction that makes E2M1,
    where the GPU has one ([`has_e2m1`]) and the kernel of `quantization/pairs.py` serves. The bits are the same.

    Returns:
        Named tuple of contiguous uint8 tensors: ``codes`` ``[..., ceil(K/2)]``, two E2M1 codes per byte, even index in
        the low nibble; ``scale`` ``[..., ceil(K/32)]``, E8M0; ``macro`` ``[..., ceil(K/macro_block)]`` or `None`;
        ``residual_codes`` and ``residual_scale``, as the first two, or `None`. Where rows share blocks, bytes are there
        for each row. Under a rotation K is the padded length.
    """
    scheme = _scheme(scale_rule, macro_block, macro_search, outlier_fallback, block_rows, rounding)
    check_input("quantize", x, block_rows)
    from .common.plan import checked_side
    from .quantization import launch

    side = checked_side(x, x.shape[-1], rounding, seed, rotation, signs)
    return launch.quantize(x, scheme, side, converts)


def quantize_with_values(
    x: torch.Tensor,
    *,
    scale_rule: str = "rceil",
    macro_block: int | str | None = None,
    macro_search: str = "static",
) -> tuple[Packed, torch.Tensor]:
    """``quantize(x, ...)`` and ``fake_quantize(x, ...)``, rounded to nearest, from one read of ``x``.

    Arguments and errors as in [`fake_quantize`].
    """
    scheme = _scheme(scale_rule, macro_block, macro_search, None, 1, "nearest")
    check_input("quantize_with_values", x, 1)
    from .quantization import launch

    return launch.quantize_with_values(x, scheme)


def quantize_both(
    x: torch.Tensor,
    *,
    scale_rule: str = "rceil",
    macro_block: int | str | None = None,
    macro_search: str = "static",
    outlier_fallback: float | None = None,
    block_rows: int = 1,
    rounding: tuple[str, str] = ("nearest", "nearest"),
    seed: tuple[int | None, int | None] = (None, None),
    rotation: tuple[int | None, int | None] = (None, None),
    signs: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
) -> tuple[Packed, Packed]:
    """``quantize(x, ...)`` and ``quantize(x.mT, ...)`` for ``x [..., M, K]``; see [`fake_quantize_both`]."""
    scheme, sides = _pair(
        "quantize_both",
        x,
        (scale_rule, macro_block, macro_search, outlier_fallback, block_rows),
        (rounding, seed, rotation, signs),
    )
    from .quantization import launch

    return launch.quantize_both(x, scheme, *sides)


def dequantize(
    codes: torch.Tensor,
    scale: torch.Tensor,
    *,
    length: int,
    macro: torch.Tensor | None = None,
    macro_block: int | str | None = None,
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
    check_output(dtype)
    check_packed(
        codes,
        scale,
        length=length,
        macro=macro,
        macro_block=macro_block,
        macro_search=macro_search,
        residual_codes=residual_codes,
        residual_scale=residual_scale,
        outlier_fallback=outlier_fallback,
    )
    from .quantization import launch

    scheme = launch.Scheme("rceil", macro_block, macro_search, outlier_fallback)
    packed = launch.Packed(codes, scale, macro, residual_codes, residual_scale)
    return launch.dequantize(packed, length, scheme, dtype)


def supports(
    dtype: torch.dtype,
    *,
    scale_rule: str,
    macro_block: int | str | None,
    macro_search: str,
    outlier_fallback: float | None,
    rounding: str = "nearest",
    block_rows: int = 1,
    length: int = 0,
) -> str | None:
    """`None` when the functions of this package cover these options bit for bit, for an axis of ``length``, else the
    reason why not, in words."""
    return (
        unsupported_dtype(dtype)
        or unsupported_scheme(scale_rule, macro_block, macro_search, outlier_fallback, block_rows, rounding)
        or unsupported_row(scale_rule, macro_block, macro_search, length)
    )


def _check_factors(macro_block: object, macro_search: object) -> None:
    if not isinstance(macro_block, int) or macro_search == "blockwise":
        raise ValueError(f"{macro_block=}, {macro_search=} has no factors of blocks of a fixed length")


def _scheme(*options: object) -> Scheme:
    """Of scale rule, macro block, search, fallback, block rows and rounding. Raises as [`fake_quantize`] says."""
    check_scheme(*options)
    from .quantization import launch

    return launch.Scheme(*options[:5])


def _pair(
    name: str, x: torch.Tensor, options: tuple, pairs: tuple[tuple, ...], dtype: torch.dtype | None = None
) -> tuple[Scheme, tuple[Side, Side]]:
    """The scheme, and the sides of ``x`` and of its transpose. Raises as [`fake_quantize`] says."""
    first, second = zip(*pairs, strict=True)
    scheme = _scheme(*options, first[0])
    check_scheme(*options, second[0])
    check_input(name, x, options[4], axes=2, dtype=dtype)
    from .common.plan import checked_side

    return scheme, (checked_side(x, x.shape[-1], *first), checked_side(x, x.shape[-2], *second))
