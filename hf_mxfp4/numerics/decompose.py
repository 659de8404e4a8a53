# SPDX-License-Identifier: Apache-2.0
"""The exact three-way decomposition of an MXFP4 error (arXiv 2605.20402, section 3)."""

import math
from dataclasses import dataclass
from typing import Any

import torch

from .blocks import Blocks, from_blocks, to_blocks
from .energy import decibels
from .formats import BLOCK_SIZE, decode_e8m0, round_nearest
from .nvfp4 import NVFP4_GROUP, dequantize_nvfp4, nvfp4_tensor_scale, quantize_nvfp4
from .quantize import check_input
from .schemes import NVFP4, QuantScheme, Treatment


#: Names of the three components, as attributes of [`ErrorDecomposition`].
COMPONENTS = ("scale_bias", "deadzone", "grid")


@dataclass(frozen=True)
class ErrorDecomposition:
    """``scale_bias + deadzone + grid == Q(x) - x``, bit for bit, element by element (float64, the shape of ``x``).

    ``x`` and ``Q(x)`` are taken in float32: rounding the result to a narrower dtype is not quantization error.

    Attributes:
        scale_bias: error of using the quantizer's own scales instead of ``amax / 6``, outside the deadzone.
        deadzone: error on the elements below a quarter step, ``|x| < amax / 24`` of their block.
        grid: error of the grid at the ideal scale ``amax / 6``, outside the deadzone.
        deadzone_fraction: share of elements in the deadzone.
        zero_fraction: share of elements that the quantizer sends to zero, zeros of ``x`` not counted.
        energy: sum of ``x**2``.
        scale_ratio: per block of a non-zero maximum, the scale in use over the ideal ``amax / 6`` (float64, flat): the
            gamma of arXiv 2605.20402. A ratio of step sizes, not a gain: the scale multiplies what it divided.
    """

    scale_bias: torch.Tensor
    deadzone: torch.Tensor
    grid: torch.Tensor
    deadzone_fraction: float
    zero_fraction: float
    energy: float
    scale_ratio: torch.Tensor

    @property
    def scale_ratio_log2(self) -> torch.Tensor:
        """``delta = log2(gamma)`` of every block; in [0, 1) for the plain `rceil` rule."""
        return self.scale_ratio.log2()

    @property
    def total(self) -> torch.Tensor:
        """Return the whole error ``Q(x) - x``."""
        return self.scale_bias + self.deadzone + self.grid

    @property
    def energy_ratio(self) -> dict[str, float]:
        """Energy of each component over that of the whole error. The three need not sum to 1: scale bias and grid
        error are correlated. All NaN when there is no error."""
        whole = _energy(self.total)
        return {name: _ratio(_energy(getattr(self, name)), whole) for name in COMPONENTS}

    @property
    def relative_mse(self) -> float:
        """``|Q(x) - x|**2 / |x|**2``; NaN for an all-zero ``x``."""
        return _ratio(_energy(self.total), self.energy)

    @property
    def sqnr_db(self) -> float:
        """Signal to quantization noise ratio in decibels; infinite when there is no error."""
        return -decibels(_energy(self.total), self.energy)

    @property
    def cosine_scale_grid(self) -> float:
        """Cosine of the angle between scale bias and grid error; NaN when one of them is zero."""
        return _cosine(self.scale_bias, self.grid)


def decompose(x: torch.Tensor, *, axis: int = -1, **options: Any) -> ErrorDecomposition:
    """Split the error of quantizing ``x`` into scale bias, deadzone truncation and grid noise.

    With ``s* = amax / 6`` per block, ``Q*`` the grid at that scale and ``D = {|x| < amax / 24}``: the deadzone part is
    ``Q - x`` on D, the grid part ``Q* - x`` off D and the scale part ``Q - Q*`` off D. For the plain ``rceil`` rule
    this is the definition of arXiv 2605.20402 (there Q and Q* are both zero on D); the sum is exact for every scheme.

    Arguments as in [`fake_quantize`]; ``options`` are the fields of a [`QuantScheme`]. Raises `ValueError` when ``x``
    holds NaN or infinity, for which no error exists.
    """
    return decompose_scheme(x, QuantScheme(**options), axis=axis)


def decompose_scheme(
    x: torch.Tensor,
    scheme: QuantScheme | Treatment,
    *,
    axis: int = -1,
    generator: torch.Generator | None = None,
    tensor_scale: torch.Tensor | None = None,
) -> ErrorDecomposition:
    """[`decompose`] with its options given as a [`QuantScheme`], or under NVFP4, whose blocks have 16 elements, with
    the ``tensor_scale`` of a tensor that ``x`` is a part of. Stochastic rounding draws from ``generator``."""
    axis = check_input(x, axis, scheme.block_rows)
    x = x.detach().float()
    if not torch.isfinite(x).all():
        raise ValueError("cannot decompose the error of a tensor that holds NaN or infinity")
    if isinstance(scheme, QuantScheme):
        block_size = BLOCK_SIZE
        blocks = Blocks(x, scheme, axis)
        first, residual = blocks.quantize(generator)
        _, byte = first
        scale_ratio = _scale_ratio(blocks.amax, decode_e8m0(byte))
        quantized = blocks.dequantized(first, residual, x.dtype)
    elif scheme is not NVFP4:
        raise ValueError(f"errors of {scheme} have no such components; give a scheme of MXFP4, or nvfp4")
    else:
        block_size = NVFP4_GROUP
        rows = x.movedim(axis, -1)
        if tensor_scale is None:
            tensor_scale = nvfp4_tensor_scale(rows)
        quantized, scale_ratio = _nvfp4(rows, tensor_scale)
        quantized = quantized.movedim(-1, axis)
    ideal, deadzone = _ideal_quantization(x.movedim(axis, -1), scheme.block_rows, block_size)
    ideal = ideal.movedim(-1, axis)
    deadzone = deadzone.movedim(-1, axis)

    error = quantized.double() - x.double()
    zero = torch.zeros((), dtype=torch.float64, device=x.device)
    # Off the deadzone all terms are float32 numbers of similar size, so the float64 differences are exact.
    grid_error = torch.where(deadzone, zero, ideal.double() - x.double())
    scale_bias = torch.where(deadzone, zero, error - grid_error)
    becomes_zero = (quantized == 0) & (x != 0)
    return ErrorDecomposition(
        scale_bias=scale_bias,
        deadzone=torch.where(deadzone, error, zero),
        grid=grid_error,
        # The mean of no elements is NaN.
        deadzone_fraction=deadzone.double().mean().item(),
        zero_fraction=becomes_zero.double().mean().item(),
        energy=_energy(x.double()),
        scale_ratio=scale_ratio,
    )


def _scale_ratio(amax: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return scales over ideal ones, for blocks that have one."""
    ideal = amax.double() / 6.0  # of z, that is, of x before it is divided by the factor again
    return (scale.double() / ideal)[ideal > 0]


def _nvfp4(rows: torch.Tensor, tensor_scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``Q`` of float32 rows ``[..., K]``, and the ratios of scales."""
    codes, scale, _ = quantize_nvfp4(rows, tensor_scale)
    amax = to_blocks(rows, NVFP4_GROUP, 1, NVFP4_GROUP).abs().amax(dim=-1)
    values = dequantize_nvfp4(codes, scale, tensor_scale, rows.shape[-1], rows.dtype)
    return values, _scale_ratio(amax, scale.float() * tensor_scale)


def _ideal_quantization(rows: torch.Tensor, block_rows: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``Q*`` rounded to float32, and the deadzone mask, of float32 rows ``[..., K]`` in blocks of ``size``."""
    blocks = to_blocks(rows, size, block_rows, size).double()
    amax = blocks.abs().amax(dim=-1, keepdim=True)
    ratio = torch.where(amax > 0, blocks * 6.0 / amax.clamp(min=torch.finfo(torch.float64).tiny), 0.0)
    # 6 x / amax is rounded to float32 before the grid: a tie can fall to the other side only where the two neighbours
    # are equally near to within a rounding error.
    ideal = (round_nearest(ratio.float()).double() * (amax / 6.0)).float()
    deadzone = blocks.abs() * 24.0 < amax
    return from_blocks(ideal, rows.shape, block_rows), from_blocks(deadzone, rows.shape, block_rows)


def _energy(x: torch.Tensor) -> float:
    return float(x.square().sum())


def _ratio(part: float, whole: float) -> float:
    """Return a quotient; NaN when there is nothing to divide by."""
    if whole == 0:
        return math.nan
    return part / whole


def _cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    norms = math.sqrt(_energy(a) * _energy(b))
    return _ratio(float((a * b).sum()), norms)
