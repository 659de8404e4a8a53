# SPDX-License-Identifier: Apache-2.0
"""Quantize, dequantize and fake-quantize: the one numeric definition that every layer, kernel and file format follows.

Definition, per block of 32 elements along ``axis`` (all steps in float32):

1. with macro blocks, ``z = f * x`` ([`hf_mxfp4.numerics.macro`]), otherwise ``z = x``; with blockwise mantissas
   ``z = x / g``, ``g = 1 + m / 4``, and the result is multiplied by ``g`` where it says ``/ f``;
2. scale ``s = 2**e`` from the largest ``|z|`` of the block ([`ScaleRule`]); ``q = round(z / s)`` on the E2M1 grid;
3. with outlier fallback, the residual ``z - s * q`` is quantized in the same way to ``s2 * q2``
   (arXiv 2605.20402, "outlier fallback");
4. the result is ``(s * q + alpha * s2 * q2) / f``.

Searches (the ``mse`` rule, dynamic macro factors) compare squared errors as integers: each error is divided by the
power of two below the block's (macro block's) largest magnitude, squared, cut to a multiple of 2**-23, and these are
added up. The sum then does not depend on its order, so all backends and processors choose alike.

Edge policy. An axis that is not a multiple of 32 is padded with zeros that no result shows. An all-zero block has
scale byte 0 and codes 0. A block that holds NaN or infinity has scale byte 255 and codes 0, and dequantizes to NaN as a
whole. Scale exponents saturate at bytes 0 and 254. A finite input never becomes infinite: where the nearest grid value
would not be finite in float32 (magnitudes above 3.5 * 2**126), or in the output dtype, the result is the largest finite
one. The sign of a zero is not kept.
"""

from dataclasses import dataclass

import torch

from . import grid, macro
from .blocks import Blocks
from .scales import BLOCK_SIZE, ScaleRule, decode_e8m0
from .scheme import QuantScheme


@dataclass(frozen=True)
class MXFP4Tensor:
    """A quantized tensor. Blocks run along the last axis of the stored tensors; ``axis`` says where it was.

    Attributes:
        codes: uint8 ``[..., ceil(K/2)]``, two E2M1 codes per byte, even index in the low nibble.
        scale: uint8 ``[..., ceil(K/32)]``, E8M0.
        macro: uint8 ``[..., ceil(K/macro_block)]`` or `None`; factor ``1 + byte/256``, or four block mantissas.
        residual_codes, residual_scale: as ``codes`` and ``scale`` for the outlier-fallback pass, or `None`.
        length: K, the number of elements along the quantized axis.
        axis: position of that axis in the original tensor.
        scheme: what was applied.
        dtype: dtype of the original tensor.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    macro: torch.Tensor | None
    residual_codes: torch.Tensor | None
    residual_scale: torch.Tensor | None
    length: int
    axis: int
    scheme: QuantScheme
    dtype: torch.dtype

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The represented values, in the original layout, as ``dtype`` (default: the original dtype)."""
        out = dequantize(
            self.codes,
            self.scale,
            length=self.length,
            macro=self.macro,
            macro_block=self.scheme.macro_block,
            macro_search=self.scheme.macro_search,
            residual_codes=self.residual_codes,
            residual_scale=self.residual_scale,
            outlier_fallback=self.scheme.outlier_fallback,
            dtype=dtype or self.dtype,
        )
        return out.movedim(-1, self.axis)


def fake_quantize(
    x: torch.Tensor,
    *,
    scale_rule: ScaleRule | str = ScaleRule.RCEIL,
    macro_block: int | str | None = None,
    macro_search: str = "static",
    outlier_fallback: float | None = None,
    rounding: str = "nearest",
    axis: int = -1,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """The MXFP4 values of ``x``, in its own shape and dtype. No gradient flows; layers add the straight-through one.

    Args:
        x: floating-point tensor with at least one axis; computed on as float32 (larger float64 values as its largest).
        scale_rule: how block scales are chosen; see [`ScaleRule`].
        macro_block: elements per macro block (32, 64, 128, 256 or ``"row"``), or `None` for no macro-block scaling.
        macro_search: ``"static"`` (factor from the macro maximum), ``"dynamic"`` (the best of 16 by squared error) or
            ``"blockwise"`` (no common factor: two mantissa bits for each block's scale, by squared error).
        outlier_fallback: weight ``alpha`` in (0, 1] of the quantized residual, or `None` for one pass only.
        rounding: ``"nearest"`` (ties to even) or ``"stochastic"`` (both passes).
        axis: the axis that blocks run along, normally the contraction axis of a matrix product.
        generator: source of randomness for stochastic rounding.

    Raises:
        TypeError: ``x`` is not a floating-point tensor.
        ValueError: an argument is outside its supported set, or ``x`` has no axes.
    """
    scheme = QuantScheme(scale_rule, macro_block, macro_search, outlier_fallback, rounding)
    return apply_scheme(x, scheme, axis=axis, generator=generator)


def quantize(
    x: torch.Tensor,
    *,
    scale_rule: ScaleRule | str = ScaleRule.RCEIL,
    macro_block: int | str | None = None,
    macro_search: str = "static",
    outlier_fallback: float | None = None,
    rounding: str = "nearest",
    axis: int = -1,
    generator: torch.Generator | None = None,
) -> MXFP4Tensor:
    """Codes and scales of ``x``: ``quantize(x, ...).dequantize()`` equals ``fake_quantize(x, ...)`` bit for bit.

    Arguments and errors as in [`fake_quantize`].
    """
    scheme = QuantScheme(scale_rule, macro_block, macro_search, outlier_fallback, rounding)
    axis = check_input(x, axis)
    with torch.no_grad():
        length = x.shape[axis]
        blocks = Blocks(x, scheme, axis)
        (q, scale), residual = blocks.quantize(generator)
        n_blocks = -(-length // BLOCK_SIZE)

        def codes_of(values: torch.Tensor) -> torch.Tensor:
            return grid.pack_codes(grid.encode_e2m1(values).flatten(-2)[..., :length])

        def scale_of(byte: torch.Tensor) -> torch.Tensor:
            return byte[..., :n_blocks].to(torch.uint8).contiguous()

        return MXFP4Tensor(
            codes=codes_of(q),
            scale=scale_of(scale),
            macro=None if blocks.m8 is None else blocks.m8.to(torch.uint8),
            residual_codes=None if residual is None else codes_of(residual[0]),
            residual_scale=None if residual is None else scale_of(residual[1]),
            length=length,
            axis=axis,
            scheme=scheme,
            dtype=x.dtype,
        )


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
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Values ``[..., length]`` of packed codes and scale bytes, laid out as in [`MXFP4Tensor`].

    Computed in float32, so that the result is that of [`fake_quantize`]; without macro factors and residual in float64
    when that is asked for, where every one of the 16 x 256 pairs of a code and a scale byte is exact. In a dtype that
    cannot hold a value it saturates at the largest finite one; NaN stays NaN.

    Raises `ValueError` when the shapes do not fit together.
    """
    plain = macro is None and residual_codes is None
    compute = torch.float64 if plain and dtype == torch.float64 else torch.float32
    n_blocks = -(-length // BLOCK_SIZE)
    if macro is not None and macro_block is None:
        raise ValueError("macro factors were given without macro_block, the number of elements that share one")
    if residual_codes is not None and (residual_scale is None or outlier_fallback is None):
        raise ValueError("residual_codes were given without residual_scale and outlier_fallback")
    for name, tensor in (("scale", scale), ("residual_scale", residual_scale)):
        if tensor is not None and tensor.shape[-1] != n_blocks:
            size = tensor.shape[-1]
            raise ValueError(f"{name} has {size} bytes along its last axis; {length} elements need {n_blocks}")

    def values(packed: torch.Tensor, byte: torch.Tensor) -> torch.Tensor:
        element = grid.decode_e2m1(grid.unpack_codes(packed, length)).to(compute)
        product = element * decode_e8m0(byte, compute).repeat_interleave(BLOCK_SIZE, dim=-1)[..., :length]
        return _saturate(product, compute)

    out = values(codes, scale)
    if residual_codes is not None:
        out = out + outlier_fallback * values(residual_codes, residual_scale)
    if macro is not None:
        size = max(length, 1) if macro_block == "row" else macro_block
        if macro.shape[-1] != -(-length // size):
            raise ValueError(
                f"macro has {macro.shape[-1]} bytes along its last axis; {length} elements in macro blocks of "
                f"{macro_block} need {-(-length // size)}"
            )
        if macro_search == "blockwise":
            out = out * _multiplier_per_element(macro, length)
        else:
            out = out / _factor_per_element(macro, size, length)
    return _saturate(out, dtype).to(dtype)


def apply_scheme(
    x: torch.Tensor, scheme: QuantScheme, *, axis: int = -1, generator: torch.Generator | None = None
) -> torch.Tensor:
    """[`fake_quantize`] with its options given as a [`QuantScheme`]."""
    axis = check_input(x, axis)
    with torch.no_grad():
        blocks = Blocks(x, scheme, axis)
        return unblock(blocks.dequantized(*blocks.quantize(generator)), x, axis)


def unblock(values: torch.Tensor, x: torch.Tensor, axis: int) -> torch.Tensor:
    """Values ``[..., blocks, 32]`` of the blocks of ``x`` in its layout and dtype. ``values`` is consumed."""
    rows = values.flatten(-2)[..., : x.shape[axis]]
    return _saturate(rows, x.dtype).to(x.dtype).movedim(-1, axis)


def _factor_per_element(m8: torch.Tensor, macro_block: int, length: int) -> torch.Tensor:
    return macro.macro_factor(m8).repeat_interleave(macro_block, dim=-1)[..., :length]


def _multiplier_per_element(packed: torch.Tensor, length: int) -> torch.Tensor:
    per_block = macro.mantissa_factor(macro.unpack_mantissas(packed))
    return per_block.repeat_interleave(BLOCK_SIZE, dim=-1)[..., :length]


def _saturate(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Clamp to the finite range of ``dtype`` and of the computation; NaN passes. ``values`` is consumed."""
    largest = min(torch.finfo(dtype).max, torch.finfo(values.dtype).max)
    return values.clamp_(-largest, largest)


def check_input(x: torch.Tensor, axis: int) -> int:
    """The axis as a non-negative number; raises `TypeError` or `ValueError` for what cannot be quantized along it."""
    if not isinstance(x, torch.Tensor) or not x.is_floating_point():
        kind = x.dtype if isinstance(x, torch.Tensor) else type(x).__name__
        raise TypeError(f"MXFP4 quantization needs a floating-point tensor, got {kind}")
    if x.dim() == 0:
        raise ValueError("MXFP4 quantization needs at least one axis, got a scalar tensor")
    if not -x.dim() <= axis < x.dim():
        raise ValueError(f"axis={axis} is out of range for a tensor with {x.dim()} axes")
    return axis % x.dim()
