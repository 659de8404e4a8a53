# SPDX-License-Identifier: Apache-2.0
"""Blocks of one tensor on their way through quantization: rows to blocks and back, padding, macro factor, scales,
rounding, searches.

The definition that this follows is in [`hf_mxfp4.numerics.quantize`].
"""

from collections.abc import Callable

import torch

from . import corrections as macro
from . import formats as grid
from .corrections import inverse_power_of_two, sum_of_squares
from .formats import (
    BLOCK_SIZE,
    E8M0_NAN,
    decode_e8m0,
    inverse_scale,
    largest_finite_magnitude,
    saturate,
    scale_from_amax,
    to_float32,
)
from .rng import NoiseSource, counted_uniform
from .schemes import QuantScheme


#: Scale exponents that the `mse` rule tries, from `E - 2`; the earlier one wins a tie.
_MSE_OFFSETS = (0, 1, -1)
#: Elements, of all candidates together, that a search for macro factors computes at a time. On the CPU what it needs
#: stays in the processor's cache.
_PORTION, _PORTION_CPU = 1 << 25, 1 << 18


class Blocks:
    """``x`` as float32 blocks ``[..., blocks, 32]``, or tiles ``[..., N/32, blocks, 1024]``: padded, with the macro
    factor found and applied."""

    def __init__(self, x: torch.Tensor, scheme: QuantScheme, axis: int):
        self.scheme = scheme
        self.axis = axis
        rows = to_float32(x.detach().movedim(axis, -1), copy=True)
        self.shape = rows.shape
        length = self.shape[-1]
        self.blocks_per_row = -(-length // BLOCK_SIZE)
        unit = BLOCK_SIZE
        if scheme.macro_block is not None:
            row_unit = max(1, self.blocks_per_row) * BLOCK_SIZE
            unit = row_unit if scheme.macro_block == "row" else max(int(scheme.macro_block), BLOCK_SIZE)
        self.unit = unit
        self.z = to_blocks(rows, unit, scheme.block_rows)
        self.amax = self.z.abs().amax(dim=-1)
        self.m8: torch.Tensor | None = None
        #: Per block, what its values were multiplied by, or divided by.
        self.factor: torch.Tensor | None = None
        self.multiplier: torch.Tensor | None = None
        self.blocks_per_macro = unit // BLOCK_SIZE
        if scheme.macro_block is not None:
            self._apply_macro()

    def quantize(self, source: NoiseSource) -> tuple[tuple, tuple | None]:
        """Grid values and scale bytes of the first pass, and of the residual pass or `None`. Stochastic rounding draws
        from ``source``. Consumes `z`."""
        if self.scheme.outlier_fallback is None:
            return self._pass(self.z, self.amax, self.scheme.rounding, source), None
        q, scale = first = self._pass(self.z.clone(), self.amax, self.scheme.rounding, source)
        residual = self.z - q * decode_e8m0(scale).unsqueeze(-1)
        # Where the first pass is NaN, so is the whole result: the residual says nothing there.
        residual.masked_fill_((scale == E8M0_NAN).unsqueeze(-1), 0.0)
        amax = residual.abs().amax(dim=-1)
        return first, self._pass(residual, amax, self.scheme.rounding, source, draw=1)

    def _pass(
        self, z: torch.Tensor, amax: torch.Tensor, rounding: str, source: NoiseSource = None, draw: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Quantize once: grid values in the shape of ``z``, which is consumed; int32 scale bytes as ``amax``."""
        scale = scale_from_amax(amax, self.scheme.scale_rule)
        if self.scheme.scale_rule.least_squares:
            scale = _least_squares_scale(z, amax, scale)
        y = _over_scale(z, scale, out=z)
        if rounding == "nearest":
            return grid.round_nearest(y), scale
        if isinstance(source, int):
            uniform = counted_uniform(self.shape, source, draw, z.device)
            source = to_blocks(uniform, self.unit, self.scheme.block_rows)
        return grid.round_stochastic(y, source), scale

    def dequantized(self, first: tuple, residual: tuple | None, dtype: torch.dtype) -> torch.Tensor:
        """Values of what [`quantize`] returned, as ``dtype`` and in the layout of ``x``. Consumes it."""
        q, scale = first
        out = q.mul_(decode_e8m0(scale).unsqueeze(-1))
        if residual is not None:
            q2, scale2 = residual
            out.add_(q2.mul_(decode_e8m0(scale2).unsqueeze(-1)).mul_(self.scheme.outlier_fallback))
        if self.multiplier is not None:
            out.mul_(self.multiplier.unsqueeze(-1))
        if self.factor is not None:
            out.div_(self.factor.unsqueeze(-1))
        rows = from_blocks(out, self.shape, self.scheme.block_rows)
        return saturate(rows, dtype).to(dtype).movedim(-1, self.axis)

    def _per_block(self, per_macro: torch.Tensor) -> torch.Tensor:
        return per_macro.repeat_interleave(self.blocks_per_macro, dim=-1)

    def _by_macro(self, per_block: torch.Tensor) -> torch.Tensor:
        n_macro = per_block.shape[-1] // self.blocks_per_macro
        return per_block.view(*per_block.shape[:-1], n_macro, self.blocks_per_macro)

    def _apply_macro(self) -> None:
        if self.scheme.mantissas:
            mantissa = self._in_portions(self._best_mantissa, self.scheme.mantissas)
            self.m8 = macro.pack_mantissas(mantissa)
            self.multiplier = macro.mantissa_factor(mantissa)
            self.z.div_(self.multiplier.unsqueeze(-1))
            self.amax = self.amax / self.multiplier
            return
        if self.scheme.macro_search == "static":
            self.m8 = macro.static_macro(self._by_macro(self.amax).amax(dim=-1))
        else:
            self.m8 = self._in_portions(self._best_macro, macro.DYNAMIC_CANDIDATES)
        self.factor = self._per_block(macro.macro_factor(self.m8))
        self.z.mul_(self.factor.unsqueeze(-1))
        # Rounding is monotonic, so the maximum of the products is the product of the maximum.
        self.amax = self.amax * self.factor

    def _best_macro(self, z: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
        """``m8`` of the candidate with the least squared error per macro block; the smallest factor wins a tie."""
        macro_amax = self._by_macro(amax).amax(dim=-1)
        m8 = macro.dynamic_candidates(macro_amax)
        factor = self._per_block(macro.macro_factor(m8))
        q, scale = self._pass(z * factor.unsqueeze(-1), amax * factor, "nearest")
        error = q.mul_(decode_e8m0(scale).unsqueeze(-1)).div_(factor.unsqueeze(-1)).sub_(z)
        error.mul_(self._per_block(inverse_power_of_two(macro_amax)).unsqueeze(-1))
        sse = self._by_macro(sum_of_squares(error)).sum(dim=-1)
        return m8.gather(0, sse.argmin(dim=0, keepdim=True)).squeeze(0)

    def _best_mantissa(self, z: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
        """Two-bit mantissa of least squared error for every block; the smallest wins a tie, non-finite blocks get 0."""
        factor = macro.mantissa_factor(torch.arange(self.scheme.mantissas, device=z.device)).view(-1, 1, 1)
        q, scale = self._pass(z / factor.unsqueeze(-1), amax / factor, "nearest")
        value = q.mul_(decode_e8m0(scale).unsqueeze(-1)).mul_(factor.unsqueeze(-1))
        # The largest numbers may leave float32 here. An infinite error has no integer: processors disagree on it.
        error = saturate(value, torch.float32).sub_(z).mul_(inverse_power_of_two(amax).unsqueeze(-1))
        sse = sum_of_squares(error)
        return sse.argmin(dim=0).to(torch.int32).masked_fill_(~amax.isfinite(), 0)

    def _in_portions(self, search: Callable[..., torch.Tensor], tries: int) -> torch.Tensor:
        """Return what ``search(z, amax)`` finds, int32 ``[..., n]``, for as many rows of blocks at a time as fit."""
        z, amax = self.z.unsqueeze(0).flatten(0, -3), self.amax.unsqueeze(0).flatten(0, -2)
        portion = _PORTION_CPU if z.device.type == "cpu" else _PORTION
        step = max(1, portion // max(1, tries * z.shape[1:].numel()))
        if z.shape[0] <= step or z.device.type == "meta" or torch.compiler.is_compiling():
            found = search(z, amax)
        else:
            found = torch.cat([search(*some) for some in zip(z.split(step), amax.split(step), strict=True)])
        return found.view(*self.amax.shape[:-1], found.shape[-1])


def _over_scale(z: torch.Tensor, scale: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Blocks divided by their scales, no further from zero than what is finite once it is multiplied again."""
    y = torch.mul(z, inverse_scale(scale).unsqueeze(-1), out=out)
    # A block with NaN or infinity has inverse scale 0: NaN * 0 and inf * 0 are NaN still, hence the masking.
    if y.device.type != "cpu" or (scale == E8M0_NAN).any():
        y.masked_fill_((scale == E8M0_NAN).unsqueeze(-1), 0.0)
    limit = largest_finite_magnitude(scale)
    return y if limit is None else torch.minimum(torch.maximum(y, -limit.unsqueeze(-1)), limit.unsqueeze(-1))


def _least_squares_scale(z: torch.Tensor, amax: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    unit = inverse_power_of_two(amax).unsqueeze(-1)
    scales = [torch.where(first == E8M0_NAN, first, (first + offset).clamp(0, 254)) for offset in _MSE_OFFSETS]
    errors = []
    for scale in scales:
        q = grid.round_nearest(_over_scale(z, scale))
        errors.append(sum_of_squares(q.mul_(decode_e8m0(scale).unsqueeze(-1)).sub_(z).mul_(unit)))
    best = torch.stack(errors).argmin(dim=0, keepdim=True)
    return torch.stack(scales).gather(0, best).squeeze(0)


def to_blocks(rows: torch.Tensor, unit: int, block_rows: int, size: int = BLOCK_SIZE) -> torch.Tensor:
    """Blocks ``[..., K/size, size]`` of rows ``[..., K]``, or tiles ``[..., N/32, K/32, 1024]`` of ``[..., N, K]``.

    Pads with zeros: columns to a multiple of ``unit`` (itself one of ``size``), rows to one of ``block_rows``. Shares
    memory with ``rows`` where it can.
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
    return rows.view(*rows.shape[:-1], rows.shape[-1] // size, size)


def from_blocks(blocks: torch.Tensor, shape: torch.Size, block_rows: int) -> torch.Tensor:
    """Rows of the given shape ``[..., K]`` out of what [`to_blocks`] made of them, without the padding."""
    if block_rows == 1:
        return blocks.flatten(-2)[..., : shape[-1]]
    *lead, n, k, _ = blocks.shape
    tiles = blocks.reshape(*lead, n, k, block_rows, BLOCK_SIZE).transpose(-3, -2)
    return tiles.reshape(*lead, n * block_rows, k * BLOCK_SIZE)[..., : shape[-2], : shape[-1]]


def per_row(of_blocks: torch.Tensor, shape: torch.Size, block_rows: int) -> torch.Tensor:
    """Repeat what belongs to blocks, ``[..., N / block_rows, n]``, for each row of ``shape``: ``[..., N, n]``."""
    if block_rows == 1:
        return of_blocks
    return of_blocks.repeat_interleave(block_rows, dim=-2)[..., : shape[-2], :]
