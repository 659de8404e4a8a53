# SPDX-License-Identifier: Apache-2.0
"""Quantize, dequantize and fake-quantize: the one numeric definition that every layer, kernel and file format follows.

Definition, per block of 32 elements along ``axis`` (all steps in float32):

1. with macro blocks, ``z = f * x`` ([`hf_mxfp4.numerics.macro`]), otherwise ``z = x``;
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
from .scales import BLOCK_SIZE, ScaleRule, decode_e8m0, inverse_scale, largest_finite_magnitude, scale_from_amax
from .scheme import QuantScheme


@dataclass(frozen=True)
class MXFP4Tensor:
    """A quantized tensor. Blocks run along the last axis of the stored tensors; ``axis`` says where it was.

    Attributes:
        codes: uint8 ``[..., ceil(K/2)]``, two E2M1 codes per byte, even index in the low nibble.
        scale: uint8 ``[..., ceil(K/32)]``, E8M0.
        macro: uint8 ``[..., ceil(K/macro_block)]`` or `None`; factor ``1 + byte/256``.
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
        macro_search: ``"static"`` (factor from the macro maximum) or ``"dynamic"`` (the best of 16 by squared error).
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
        blocks = _Blocks(x, scheme, axis)
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
        out = out / _factor_per_element(macro, size, length).to(compute)
    return _saturate(out, dtype).to(dtype)


def apply_scheme(
    x: torch.Tensor, scheme: QuantScheme, *, axis: int = -1, generator: torch.Generator | None = None
) -> torch.Tensor:
    """[`fake_quantize`] with its options given as a [`QuantScheme`]."""
    axis = check_input(x, axis)
    with torch.no_grad():
        blocks = _Blocks(x, scheme, axis)
        out = blocks.dequantized(*blocks.quantize(generator))
        out = out.flatten(-2)[..., : x.shape[axis]]
        return _saturate(out, x.dtype).to(x.dtype).movedim(-1, axis)


class _Blocks:
    """``x`` as float32 blocks ``[..., blocks, 32]``, padded, with its macro factor found and applied."""

    def __init__(self, x: torch.Tensor, scheme: QuantScheme, axis: int):
        self.scheme = scheme
        length = x.shape[axis]
        rows = _as_float32(x.detach().movedim(axis, -1))
        unit = BLOCK_SIZE
        if scheme.macro_block is not None:
            row_unit = max(1, -(-length // BLOCK_SIZE)) * BLOCK_SIZE
            unit = row_unit if scheme.macro_block == "row" else max(scheme.macro_block, BLOCK_SIZE)
        padding = -length % unit
        if padding:
            rows = torch.nn.functional.pad(rows, (0, padding))
        rows = rows.contiguous()
        self.z = rows.view(*rows.shape[:-1], rows.shape[-1] // BLOCK_SIZE, BLOCK_SIZE)
        self.amax = self.z.abs().amax(dim=-1)
        self.m8: torch.Tensor | None = None
        self.blocks_per_macro = unit // BLOCK_SIZE
        if scheme.macro_block is not None:
            self._apply_macro()

    def quantize(self, generator: torch.Generator | None) -> tuple[tuple, tuple | None]:
        """Grid values and scale bytes of the first pass, and of the residual pass or `None`."""
        first = _quantize_pass(self.z, self.amax, self.scheme, generator)
        if self.scheme.outlier_fallback is None:
            return first, None
        q, scale = first
        residual = self.z - q * decode_e8m0(scale).unsqueeze(-1)
        # Where the first pass is NaN, so is the whole result: the residual says nothing there.
        residual.masked_fill_((scale == 255).unsqueeze(-1), 0.0)
        return first, _quantize_pass(residual, residual.abs().amax(dim=-1), self.scheme, generator)

    def dequantized(self, first: tuple, residual: tuple | None) -> torch.Tensor:
        """Values ``[..., blocks, 32]`` of what [`quantize`] returned. Consumes it."""
        q, scale = first
        out = q.mul_(decode_e8m0(scale).unsqueeze(-1))
        if residual is not None:
            q2, scale2 = residual
            out.add_(q2.mul_(decode_e8m0(scale2).unsqueeze(-1)).mul_(self.scheme.outlier_fallback))
        if self.m8 is not None:
            out.div_(self._per_block(macro.macro_factor(self.m8)).unsqueeze(-1))
        return out

    def _per_block(self, per_macro: torch.Tensor) -> torch.Tensor:
        return per_macro.repeat_interleave(self.blocks_per_macro, dim=-1)

    def _by_macro(self, per_block: torch.Tensor) -> torch.Tensor:
        n_macro = per_block.shape[-1] // self.blocks_per_macro
        return per_block.view(*per_block.shape[:-1], n_macro, self.blocks_per_macro)

    def _apply_macro(self) -> None:
        macro_amax = self._by_macro(self.amax).amax(dim=-1)
        if self.scheme.macro_search == "static":
            self.m8 = macro.static_macro(macro_amax)
        else:
            self.m8 = self._search_macro(macro_amax)
        factor = self._per_block(macro.macro_factor(self.m8))
        self.z.mul_(factor.unsqueeze(-1))
        # Rounding is monotonic, so the maximum of the products is the product of the maximum.
        self.amax = self.amax * factor

    def _search_macro(self, macro_amax: torch.Tensor) -> torch.Tensor:
        """``m8`` of the candidate with the least squared error per macro block; the smallest factor wins a tie."""
        best_error: torch.Tensor | None = None
        best = torch.zeros_like(macro_amax, dtype=torch.int32)
        unit = _inverse_power_of_two(macro_amax)
        for candidate in range(macro.DYNAMIC_CANDIDATES):
            m8 = macro.dynamic_macro(candidate, macro_amax)
            factor = self._per_block(macro.macro_factor(m8)).unsqueeze(-1)
            z = self.z * factor
            q, scale = _quantize_pass(z, self.amax * factor.squeeze(-1), self.scheme, None, rounding="nearest")
            error = q.mul_(decode_e8m0(scale).unsqueeze(-1)).div_(factor).sub_(self.z)
            error.mul_(self._per_block(unit).unsqueeze(-1))
            sse = self._by_macro(_sum_of_squares(error)).sum(dim=-1)
            if best_error is None:
                best_error = sse
                best = m8
            else:
                better = sse < best_error
                best_error = torch.where(better, sse, best_error)
                best = torch.where(better, m8, best)
        return best


def _quantize_pass(
    z: torch.Tensor,
    amax: torch.Tensor,
    scheme: QuantScheme,
    generator: torch.Generator | None,
    rounding: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One quantization: grid values ``[..., blocks, 32]`` (float32) and scale bytes ``[..., blocks]`` (int32)."""
    scale = scale_from_amax(amax, scheme.scale_rule)
    if scheme.scale_rule is ScaleRule.MSE:
        scale = _least_squares_scale(z, amax, scale)
    rounding = rounding or scheme.rounding
    return _round_to_grid(z, scale, rounding, generator), scale


def _round_to_grid(
    z: torch.Tensor, scale: torch.Tensor, rounding: str, generator: torch.Generator | None = None
) -> torch.Tensor:
    # A block with NaN or infinity has inverse scale 0: NaN * 0 and inf * 0 are NaN still, hence the masking.
    y = z * inverse_scale(scale).unsqueeze(-1)
    if z.device.type != "cpu" or (scale == 255).any():
        y.masked_fill_((scale == 255).unsqueeze(-1), 0.0)
    limit = largest_finite_magnitude(scale)
    if limit is not None:
        y = torch.minimum(torch.maximum(y, -limit.unsqueeze(-1)), limit.unsqueeze(-1))
    if rounding == "stochastic":
        return grid.round_stochastic(y, generator)
    return grid.round_nearest(y)


def _least_squares_scale(z: torch.Tensor, amax: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    unit = _inverse_power_of_two(amax).unsqueeze(-1)
    best, best_error = first, None
    for offset in (0, 1, -1):
        scale = torch.where(first == 255, first, (first + offset).clamp(0, 254))
        q = _round_to_grid(z, scale, "nearest")
        error = q.mul_(decode_e8m0(scale).unsqueeze(-1)).sub_(z).mul_(unit)
        sse = _sum_of_squares(error)
        if best_error is None:
            best_error = sse
        else:
            better = sse < best_error
            best_error = torch.where(better, sse, best_error)
            best = torch.where(better, scale, best)
    return best


def _sum_of_squares(error: torch.Tensor) -> torch.Tensor:
    """Sums over the last axis, in units of 2**-23, as int64: the same in whatever order they are added. ``error`` is
    below 2 in magnitude and is consumed."""
    return error.square_().mul_(2.0**23).to(torch.int32).sum(dim=-1)


def _as_float32(x: torch.Tensor) -> torch.Tensor:
    """A float32 copy of ``x``, in which finite values stay finite."""
    if x.dtype == torch.float64:
        largest = torch.finfo(torch.float32).max
        x = torch.where(x.isinf(), x, x.clamp(-largest, largest))
    return x.to(torch.float32, copy=True)


def _inverse_power_of_two(amax: torch.Tensor) -> torch.Tensor:
    """``2**-floor(log2 amax)``, to bring errors into a range whose squares neither overflow nor vanish."""
    exponent = (amax.view(torch.int32) >> 23) & 0xFF
    return ((254 - exponent).clamp_(1, 254) << 23).view(torch.float32)


def _factor_per_element(m8: torch.Tensor, macro_block: int, length: int) -> torch.Tensor:
    return macro.macro_factor(m8).repeat_interleave(macro_block, dim=-1)[..., :length]


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
