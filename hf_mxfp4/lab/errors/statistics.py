# SPDX-License-Identifier: Apache-2.0
"""Sums that describe the quantization error of one tensor, of a layer type or of a whole model, in constant memory;
random data to try schemes on."""

import dataclasses
import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ...numerics import BLOCK_SIZE, NVFP4, OperandScheme, decibels, decompose_scheme, nvfp4_tensor_scale
from ...numerics.nvfp4 import NVFP4_GROUP


#: Bins of the histogram of ``delta = log2(s / s*)``, and its range; values beyond it count in the outermost bins.
HISTOGRAM_BINS = 64
HISTOGRAM_RANGE = (-2.0, 2.0)
#: Elements per row of random data; every row has its own standard deviation.
ROW = 1024
#: Elements that are decomposed at once, a multiple of every macro block: small enough for a processor's cache.
CHUNK_ELEMENTS = 2**16


@dataclass(frozen=True)
class ErrorStatistics:
    """Mergeable sums over the elements and blocks of a tensor ``x`` and its quantized values ``Q``; ``a + b`` is the
    statistics of both tensors together.

    ``s* = amax / 6``, ``Q*`` and the deadzone D are those of [`hf_mxfp4.decompose`], whose three components have
    disjoint masks: of their pairs only scale bias and grid can correlate. arXiv 2605.20402 (section 3) takes the scale
    error ``Q - Q*`` everywhere, and ``Q* - x`` on D for the deadzone: the ``unmasked`` sums are of these.

    Attributes:
        elements: number of elements.
        blocks: number of blocks whose maximum is not zero.
        energy: ``|x|**2``.
        scale_bias, deadzone, grid, total: energies of the three components and of ``Q - x``.
        scale_dot_grid: dot product of scale bias and grid error.
        quantized_dot: ``<Q, x>``.
        unmasked_scale, unmasked_deadzone: energies of ``Q - Q*`` everywhere and of ``Q* - x`` on D.
        unmasked_dot: dot product of these two.
        deadzone_count, zero_count: elements in D; non-zero elements that are quantized to zero.
        gamma_sum, gamma_square_sum: sums over blocks of ``gamma = s / s*`` and of its square.
        delta_sum, delta_square_sum: sums over blocks of ``delta = log2 gamma`` and of its square.
        histogram: blocks per bin of delta.
    """

    elements: int = 0
    blocks: int = 0
    energy: float = 0.0
    scale_bias: float = 0.0
    deadzone: float = 0.0
    grid: float = 0.0
    total: float = 0.0
    scale_dot_grid: float = 0.0
    quantized_dot: float = 0.0
    unmasked_scale: float = 0.0
    unmasked_deadzone: float = 0.0
    unmasked_dot: float = 0.0
    deadzone_count: int = 0
    zero_count: int = 0
    gamma_sum: float = 0.0
    gamma_square_sum: float = 0.0
    delta_sum: float = 0.0
    delta_square_sum: float = 0.0
    histogram: tuple[int, ...] = (0,) * HISTOGRAM_BINS

    def __add__(self, other: "ErrorStatistics") -> "ErrorStatistics":
        if not isinstance(other, ErrorStatistics):
            return NotImplemented
        sums: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            first = getattr(self, field.name)
            second = getattr(other, field.name)
            if field.name == "histogram":
                sums[field.name] = tuple(map(operator.add, first, second))
            else:
                sums[field.name] = first + second
        return ErrorStatistics(**sums)

    @property
    def relative_mse(self) -> float:
        """``|Q - x|**2 / |x|**2``; NaN when x is zero throughout."""
        return quotient(self.total, self.energy)

    @property
    def sqnr_db(self) -> float:
        """Signal to quantization noise ratio in decibels; infinite without error, NaN when x is zero throughout."""
        return -decibels(self.total, self.energy)

    @property
    def floor_relative_mse(self) -> float:
        """[`relative_mse`] of the ideal scale ``s* = amax / 6`` in every block: what absmax scaling cannot go below."""
        return quotient(self.grid + self.unmasked_deadzone, self.energy)

    @property
    def energy_ratio(self) -> dict[str, float]:
        """Energy of each component over that of the whole error; NaN without error."""
        return {name: quotient(getattr(self, name), self.total) for name in ("scale_bias", "deadzone", "grid")}

    @property
    def cosine_scale_grid(self) -> float:
        """Cosine of the angle between scale bias and grid error, as in [`hf_mxfp4.decompose`]."""
        return _cosine(self.scale_dot_grid, self.scale_bias, self.grid)

    @property
    def paper_cosines(self) -> dict[str, float]:
        """The three pairwise cosines of arXiv 2605.20402, figure 1, from the unmasked sums. Deadzone and grid have no
        element in common, so theirs is zero whatever the scheme; NaN where a component is zero."""
        return {
            "scale_bias/deadzone": _cosine(self.unmasked_dot, self.unmasked_scale, self.unmasked_deadzone),
            "scale_bias/grid": _cosine(self.scale_dot_grid, self.unmasked_scale, self.grid),
            "deadzone/grid": _cosine(0.0, self.unmasked_deadzone, self.grid),
        }

    @property
    def gain(self) -> float:
        """``<Q, x> / <x, x>``: the factor by which the quantizer scales what it is given, on average."""
        return quotient(self.quantized_dot, self.energy)

    @property
    def deadzone_fraction(self) -> float:
        """Share of elements in the deadzone."""
        return quotient(self.deadzone_count, self.elements)

    @property
    def zero_fraction(self) -> float:
        """Share of elements that the quantizer sends to zero, zeros of x not counted."""
        return quotient(self.zero_count, self.elements)

    @property
    def gamma_mean(self) -> float:
        return quotient(self.gamma_sum, self.blocks)

    @property
    def gamma_variance(self) -> float:
        return _variance(self.gamma_sum, self.gamma_square_sum, self.blocks)

    @property
    def delta_mean(self) -> float:
        return quotient(self.delta_sum, self.blocks)

    @property
    def delta_variance(self) -> float:
        return _variance(self.delta_sum, self.delta_square_sum, self.blocks)

    def to_dict(self) -> dict:
        """Return the sums, JSON-clean; [`from_dict`] reads them back to an equal object."""
        return {**dataclasses.asdict(self), "histogram": list(self.histogram)}

    @classmethod
    def from_dict(cls, sums: dict) -> "ErrorStatistics":
        return cls(**{**sums, "histogram": tuple(sums["histogram"])})

    def summary(self) -> dict[str, float]:
        """Return the derived numbers by name, in the order in which reports show them."""
        return {
            "elements": self.elements,
            "relative_mse": self.relative_mse,
            "sqnr_db": self.sqnr_db,
            "floor_relative_mse": self.floor_relative_mse,
            **{f"ratio_{name}": value for name, value in self.energy_ratio.items()},
            "cosine_scale_grid": self.cosine_scale_grid,
            "cosine_scale_deadzone_unmasked": self.paper_cosines["scale_bias/deadzone"],
            "cosine_scale_grid_unmasked": self.paper_cosines["scale_bias/grid"],
            "deadzone_fraction": self.deadzone_fraction,
            "zero_fraction": self.zero_fraction,
            "gain": self.gain,
            "gamma_mean": self.gamma_mean,
            "gamma_variance": self.gamma_variance,
            "delta_mean": self.delta_mean,
            "delta_variance": self.delta_variance,
        }


def error_statistics(x: torch.Tensor, scheme: OperandScheme, *, axis: int = -1) -> ErrorStatistics:
    """Return the statistics of quantizing ``x`` with blocks along ``axis``. Memory beyond ``x`` itself does not grow
    with it. Under NVFP4 all of ``x`` has one tensor scale.

    The tensor is taken in chunks of whole rows along ``axis``. Stochastic rounding starts from the same seed in every
    call.

    Raises:
        TypeError: ``x`` is not a floating-point tensor.
        ValueError: ``x`` holds NaN or infinity, or has no axis.
    """
    if not isinstance(x, torch.Tensor) or not x.is_floating_point() or x.dim() == 0:
        decompose_scheme(x, scheme, axis=axis)  # raises what fits
    x = x.detach().movedim(axis, -1)
    generator = None
    if scheme.rounding == "stochastic":
        generator = torch.Generator(x.device).manual_seed(0)
    tensor_scale = None
    if scheme is NVFP4:
        tensor_scale = nvfp4_tensor_scale(x)
    total = ErrorStatistics()
    with torch.no_grad():
        for rows in _chunks(x, scheme):
            total += _chunk_statistics(rows, scheme, generator, tensor_scale)
    return total


def _chunks(x: torch.Tensor, scheme: OperandScheme) -> Iterator[torch.Tensor]:
    """Yield pieces ``[rows, columns]`` of ``x``, whose last axis is the quantized one: whole rows or tiles of rows."""
    if x.numel() == 0:
        return
    tiles = max(1, CHUNK_ELEMENTS // x.shape[-1] // scheme.block_rows)
    if x.dim() == 1:
        matrices = x[None, None]
    else:
        matrices = x.reshape(-1, *x.shape[-2:])
    for matrix in matrices:
        yield from matrix.split(tiles * scheme.block_rows)


def _chunk_statistics(
    x: torch.Tensor, scheme: OperandScheme, generator: torch.Generator | None, tensor_scale: torch.Tensor | None
) -> ErrorStatistics:
    """Return the statistics of a matrix ``[rows, columns]`` with blocks along its columns."""
    parts = decompose_scheme(x, scheme, generator=generator, tensor_scale=tensor_scale)
    wide = x.float().double()
    block_size = NVFP4_GROUP if scheme is NVFP4 else BLOCK_SIZE
    in_deadzone = _deadzone(wide, scheme.block_rows, block_size)
    scale_bias = _sum(parts.scale_bias.square())
    deadzone = _sum(parts.deadzone.square())
    grid = _sum(parts.grid.square())
    deadzone_dot = _sum(parts.deadzone * wide)
    # The error outside the deadzone. From here on tensors are reused.
    outside = parts.scale_bias + parts.grid
    outside_total = _sum(outside.square())
    outside_dot = _sum(outside.mul_(wide))
    squares = wide.square_()
    energy = _sum(squares)
    hidden = _sum(squares.mul_(in_deadzone))
    gamma = parts.scale_ratio
    delta = parts.scale_ratio_log2
    return ErrorStatistics(
        elements=x.numel(),
        blocks=gamma.numel(),
        energy=energy,
        scale_bias=scale_bias,
        deadzone=deadzone,
        grid=grid,
        total=deadzone + outside_total,
        scale_dot_grid=(outside_total - scale_bias - grid) / 2,
        quantized_dot=energy + deadzone_dot + outside_dot,
        # On D, Q* is zero and Q is x plus the deadzone part. Where Q is zero too, these sums cancel exactly.
        unmasked_scale=scale_bias + (deadzone + deadzone_dot + deadzone_dot + hidden),
        unmasked_deadzone=hidden,
        unmasked_dot=-(deadzone_dot + hidden),
        deadzone_count=int(in_deadzone.sum()),
        zero_count=round(parts.zero_fraction * x.numel()),
        gamma_sum=_sum(gamma),
        gamma_square_sum=_sum(gamma.square()),
        delta_sum=_sum(delta),
        delta_square_sum=_sum(delta.square()),
        histogram=_histogram(delta),
    )


def _histogram(delta: torch.Tensor) -> tuple[int, ...]:
    low, high = HISTOGRAM_RANGE
    bins = ((delta - low) * (HISTOGRAM_BINS / (high - low))).floor()
    bins = bins.clamp_(0, HISTOGRAM_BINS - 1).long()
    return tuple(torch.bincount(bins, minlength=HISTOGRAM_BINS).tolist())


def _deadzone(x: torch.Tensor, block_rows: int, size: int) -> torch.Tensor:
    """Return the mask of ``|x| < amax / 24`` of a float64 matrix; amax is the maximum of a block of ``size`` elements,
    or of a tile."""
    n, k = x.shape
    padded = torch.nn.functional.pad(x.abs(), (0, -k % size, 0, -n % block_rows))
    tiles = padded.view(padded.shape[0] // block_rows, block_rows, padded.shape[1] // size, size)
    amax = tiles.amax(dim=(1, 3), keepdim=True)
    return (tiles * 24.0 < amax).view(padded.shape)[:n, :k]


def _sum(x: torch.Tensor) -> float:
    # Rows first: torch shares out one long sum over however many threads there are, which would show in the last bits.
    return float(x.sum(dim=-1).sum())


def quotient(a: float, b: float) -> float:
    """Return ``a / b``; NaN where ``b`` is zero."""
    if b == 0:
        return math.nan
    return a / b


def _cosine(dot: float, a: float, b: float) -> float:
    return quotient(dot, math.sqrt(a * b))


def _variance(total: float, squares: float, count: int) -> float:
    if count == 0:
        return math.nan
    # A variance of zero may come out below it by the last bits.
    return max(0.0, squares / count - (total / count) ** 2)


def sample(distribution: str, elements: int, seed: int) -> torch.Tensor:
    """Draw float32 ``[rows, 1024]`` of at least ``elements`` elements.

    The standard deviations of the rows are log-uniform over one octave, which averages over where block maxima fall
    between two powers of two.

    Args:
        distribution: ``"gaussian"``, ``"laplace"``, ``"student-t"`` of 4 degrees of freedom, ``"uniform"``, or
            ``"outliers"``, which has 8 of the 1024 channels 30 times as large as the others.
    """
    rows = math.ceil(elements / ROW)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        spread = torch.exp2(torch.rand(rows, 1))
        if distribution == "laplace":
            x = torch.distributions.Laplace(0.0, 1.0).sample((rows, ROW))
        elif distribution == "student-t":
            x = torch.distributions.StudentT(4.0).sample((rows, ROW))
        elif distribution == "uniform":
            x = torch.rand(rows, ROW) * 2 - 1
        else:
            x = torch.randn(rows, ROW)
        if distribution == "outliers":
            x[:, torch.randperm(ROW)[:8]] *= 30
        return x * spread
