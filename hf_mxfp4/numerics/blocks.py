# SPDX-License-Identifier: Apache-2.0
"""Blocks of one tensor on their way through quantization: rows to blocks and back, padding, macro factor, scales,
rounding, searches.

The definition that this follows is in [`hf_mxfp4.numerics.quantize`].
"""

from collections.abc import Callable

import torch

from . import e2m1 as grid
from . import macro
from .e8m0 import (
    BLOCK_SIZE,
    E8M0_NAN,
    ScaleRule,
    decode_e8m0,
    inverse_scale,
    largest_finite_magnitude,
    scale_from_amax,
)
from .errors import importance_weights, inverse_power_of_two, sum_of_squares
from .fallback import block_errors, select_share
from .packed import saturate
from .rng import NoiseSource, counted_uniform
from .schemes import QuantScheme


#: Scale exponents that the `mse` rule tries, from `E - 2`; the earlier one wins a tie.
_MSE_OFFSETS = (0, 1, -1)


class Blocks:
    """``x`` as float32 blocks ``[..., blocks, 32]``, or tiles ``[..., N/32, blocks, 1024]``: padded, with the macro
    factor found and applied."""

    def __init__(self, x: torch.Tensor, scheme: QuantScheme, axis: int, importance: torch.Tensor | None = None):
        self.scheme = scheme
        rows = _as_float32(x.detach().movedim(axis, -1))
        self.shape = rows.shape
        length = self.shape[-1]
        self.blocks_per_row = -(-length // BLOCK_SIZE)
        unit = BLOCK_SIZE
        if scheme.macro_block is not None:
            row_unit = max(1, self.blocks_per_row) * BLOCK_SIZE
            unit = row_unit if scheme.macro_block == "row" else max(scheme.macro_block, BLOCK_SIZE)
        self.unit = unit
        self.z = to_blocks(rows, unit, scheme.block_rows)
        self.weight: torch.Tensor | None = None
        if importance is not None:
            weight = importance_weights(importance, length, scheme).to(x.device).expand(scheme.block_rows, length)
            self.weight = to_blocks(weight.contiguous(), unit, scheme.block_rows).squeeze(0)
        self.amax = self.z.abs().amax(dim=-1)
        self.m8: torch.Tensor | None = None
        self.multiplier: torch.Tensor | None = None
        #: Blocks with a residual pass, where the scheme selects them, and blocks in all.
        self.n_fallback: torch.Tensor | None = None
        self.n_blocks = self.amax[..., : self.blocks_per_row].numel()
        self.blocks_per_macro = unit // BLOCK_SIZE
        if scheme.macro_block is not None:
            self._apply_macro()

    def quantize(
        self,
        source: NoiseSource,
        select: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> tuple[tuple, tuple | None]:
        """Grid values and scale bytes of the first pass, and of the residual pass or `None`. Stochastic rounding draws
        from ``source``.

        Under a ``fallback_rate``, ``select`` maps the errors of the blocks to the mask of those that get the residual
        pass; without it they are the scheme's share of largest errors.
        """
        first = _quantize_pass(self.z, self.amax, self.scheme, self._noise(source, 0), self.weight)
        if self.scheme.outlier_fallback is None:
            return first, None
        q, scale = first
        residual = self.z - q * decode_e8m0(scale).unsqueeze(-1)
        # Where the first pass is NaN, so is the whole result: the residual says nothing there.
        residual.masked_fill_((scale == E8M0_NAN).unsqueeze(-1), 0.0)
        if self.scheme.fallback_rate is not None:
            self._keep_selected(residual, select)
        amax = residual.abs().amax(dim=-1)
        return first, _quantize_pass(residual, amax, self.scheme, self._noise(source, 1), self.weight)

    def _noise(self, source: NoiseSource, draw: int) -> torch.Generator | torch.Tensor | None:
        """What [`grid.round_stochastic`] takes."""
        if not isinstance(source, int):
            return source
        return to_blocks(counted_uniform(self.shape, source, draw, self.z.device), self.unit, self.scheme.block_rows)

    def _keep_selected(self, residual: torch.Tensor, select: Callable[[torch.Tensor], torch.Tensor] | None) -> None:
        """Zero the residual of the blocks that are not selected: an all-zero block has scale byte 0 and codes 0."""
        factor = None
        if self.multiplier is None and self.m8 is not None:
            factor = self._per_block(macro.macro_factor(self.m8))
        errors = block_errors(residual, self.amax, factor, self.multiplier)[..., : self.blocks_per_row]
        mask = select_share(errors, self.scheme.fallback_rate) if select is None else select(errors)
        self.n_fallback = mask.sum()
        residual[..., : self.blocks_per_row, :].masked_fill_(~mask.unsqueeze(-1), 0.0)

    def rows(self, of_elements: torch.Tensor) -> torch.Tensor:
        """What belongs to elements, ``[..., blocks, 32]`` or tiles, as rows ``[..., K]`` without the padding."""
        return from_blocks(of_elements, self.shape, self.scheme.block_rows)

    def dequantized(self, first: tuple, residual: tuple | None) -> torch.Tensor:
        """Values ``[..., blocks, 32]`` of what [`quantize`] returned. Consumes it."""
        q, scale = first
        out = q.mul_(decode_e8m0(scale).unsqueeze(-1))
        if residual is not None:
            q2, scale2 = residual
            out.add_(q2.mul_(decode_e8m0(scale2).unsqueeze(-1)).mul_(self.scheme.outlier_fallback))
        if self.multiplier is not None:
            out.mul_(self.multiplier.unsqueeze(-1))
        elif self.m8 is not None:
            out.div_(self._per_block(macro.macro_factor(self.m8)).unsqueeze(-1))
        return out

    def _per_block(self, per_macro: torch.Tensor) -> torch.Tensor:
        return per_macro.repeat_interleave(self.blocks_per_macro, dim=-1)

    def _by_macro(self, per_block: torch.Tensor) -> torch.Tensor:
        n_macro = per_block.shape[-1] // self.blocks_per_macro
        return per_block.view(*per_block.shape[:-1], n_macro, self.blocks_per_macro)

    def _apply_macro(self) -> None:
        if self.scheme.macro_search == "blockwise":
            mantissa = self._search_mantissas()
            self.m8 = macro.pack_mantissas(mantissa)
            self.multiplier = macro.mantissa_factor(mantissa)
            self.z.div_(self.multiplier.unsqueeze(-1))
            self.amax = self.amax / self.multiplier
            return
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
        unit = inverse_power_of_two(macro_amax)
        for candidate in range(macro.DYNAMIC_CANDIDATES):
            m8 = macro.dynamic_macro(candidate, macro_amax)
            factor = self._per_block(macro.macro_factor(m8)).unsqueeze(-1)
            z = self.z * factor
            amax = self.amax * factor.squeeze(-1)
            q, scale = _quantize_pass(z, amax, self.scheme, None, self.weight, rounding="nearest")
            error = q.mul_(decode_e8m0(scale).unsqueeze(-1)).div_(factor).sub_(self.z)
            error.mul_(self._per_block(unit).unsqueeze(-1))
            sse = self._by_macro(sum_of_squares(error, self.weight)).sum(dim=-1)
            best, best_error = _keep_better(best, best_error, m8, sse)
        return best

    def _search_mantissas(self) -> torch.Tensor:
        """Two-bit mantissa of least squared error for every block; the smallest wins a tie, non-finite blocks get 0."""
        best_error: torch.Tensor | None = None
        best = torch.zeros_like(self.amax, dtype=torch.int32)
        unit = inverse_power_of_two(self.amax).unsqueeze(-1)
        for candidate in range(macro.BLOCK_MANTISSAS):
            mantissa = torch.full_like(best, candidate)
            factor = macro.mantissa_factor(mantissa)
            z = self.z / factor.unsqueeze(-1)
            q, scale = _quantize_pass(z, self.amax / factor, self.scheme, None, self.weight, rounding="nearest")
            value = q.mul_(decode_e8m0(scale).unsqueeze(-1)).mul_(factor.unsqueeze(-1))
            # The largest numbers may leave float32 here. An infinite error has no integer: processors disagree on it.
            error = saturate(value, torch.float32).sub_(self.z).mul_(unit)
            best, best_error = _keep_better(best, best_error, mantissa, sum_of_squares(error, self.weight))
        return best.masked_fill_(~self.amax.isfinite(), 0)


def _quantize_pass(
    z: torch.Tensor,
    amax: torch.Tensor,
    scheme: QuantScheme,
    noise: torch.Generator | torch.Tensor | None,
    weight: torch.Tensor | None,
    rounding: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One quantization: grid values in the shape of ``z`` (float32) and scale bytes in that of ``amax`` (int32).
    ``weight`` is that of the squared errors in searches."""
    scale = scale_from_amax(amax, scheme.scale_rule)
    if scheme.scale_rule is ScaleRule.MSE:
        scale = _least_squares_scale(z, amax, scale, weight)
    rounding = rounding or scheme.rounding
    return _round_to_grid(z, scale, rounding, noise), scale


def _round_to_grid(
    z: torch.Tensor, scale: torch.Tensor, rounding: str, noise: torch.Generator | torch.Tensor | None = None
) -> torch.Tensor:
    # A block with NaN or infinity has inverse scale 0: NaN * 0 and inf * 0 are NaN still, hence the masking.
    y = z * inverse_scale(scale).unsqueeze(-1)
    if z.device.type != "cpu" or (scale == E8M0_NAN).any():
        y.masked_fill_((scale == E8M0_NAN).unsqueeze(-1), 0.0)
    limit = largest_finite_magnitude(scale)
    if limit is not None:
        y = torch.minimum(torch.maximum(y, -limit.unsqueeze(-1)), limit.unsqueeze(-1))
    if rounding == "stochastic":
        return grid.round_stochastic(y, noise)
    return grid.round_nearest(y)


def _least_squares_scale(
    z: torch.Tensor, amax: torch.Tensor, first: torch.Tensor, weight: torch.Tensor | None
) -> torch.Tensor:
    unit = inverse_power_of_two(amax).unsqueeze(-1)
    best, best_error = first, None
    for offset in _MSE_OFFSETS:
        scale = torch.where(first == E8M0_NAN, first, (first + offset).clamp(0, 254))
        q = _round_to_grid(z, scale, "nearest")
        error = q.mul_(decode_e8m0(scale).unsqueeze(-1)).sub_(z).mul_(unit)
        best, best_error = _keep_better(best, best_error, scale, sum_of_squares(error, weight))
    return best


def _keep_better(
    best: torch.Tensor, best_error: torch.Tensor | None, candidate: torch.Tensor, error: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The candidate where its error is less, else the best so far; the first candidate stands for itself."""
    if best_error is None:
        return candidate, error
    better = error < best_error
    return torch.where(better, candidate, best), torch.where(better, error, best_error)


def _as_float32(x: torch.Tensor) -> torch.Tensor:
    """A float32 copy of ``x``, in which finite values stay finite."""
    if x.dtype == torch.float64:
        largest = torch.finfo(torch.float32).max
        x = torch.where(x.isinf(), x, x.clamp(-largest, largest))
    return x.to(torch.float32, copy=True)


def to_blocks(rows: torch.Tensor, unit: int, block_rows: int) -> torch.Tensor:
    """Blocks ``[..., K/32, 32]`` of rows ``[..., K]``, or tiles ``[..., N/32, K/32, 1024]`` of ``[..., N, K]``.

    Pads with zeros: columns to a multiple of ``unit`` (itself one of 32), rows to one of ``block_rows``. Shares memory
    with ``rows`` where it can.
    """
    padding = -rows.shape[-1] % unit
    if block_rows > 1:
        row_padding = -rows.shape[-2] % block_rows
        if padding or row_padding:
            rows = torch.nn.functional.pad(rows, (0, padding, 0, row_padding))
        *lead, n, k = rows.shape
        tiles = rows.reshape(*lead, n // block_rows, block_rows, k // BLOCK_SIZE, BLOCK_SIZE).transpose(-3, -2)
        return tiles.reshape(*lead, n // block_rows, k // BLOCK_SIZE, block_rows * BLOCK_SIZE)
    if padding:
        rows = torch.nn.functional.pad(rows, (0, padding))
    rows = rows.contiguous()
    return rows.view(*rows.shape[:-1], rows.shape[-1] // BLOCK_SIZE, BLOCK_SIZE)


def from_blocks(blocks: torch.Tensor, shape: torch.Size, block_rows: int) -> torch.Tensor:
    """Rows of the given shape ``[..., K]`` out of what [`to_blocks`] made of them, without the padding."""
    if block_rows == 1:
        return blocks.flatten(-2)[..., : shape[-1]]
    *lead, n, k, _ = blocks.shape
    tiles = blocks.reshape(*lead, n, k, block_rows, BLOCK_SIZE).transpose(-3, -2)
    return tiles.reshape(*lead, n * block_rows, k * BLOCK_SIZE)[..., : shape[-2], : shape[-1]]


def per_row(of_blocks: torch.Tensor, shape: torch.Size, block_rows: int) -> torch.Tensor:
    """What belongs to blocks, ``[..., N / block_rows, n]``, for each of the rows of ``shape``: ``[..., N, n]``."""
    if block_rows == 1:
        return of_blocks
    return of_blocks.repeat_interleave(block_rows, dim=-2)[..., : shape[-2], :]
