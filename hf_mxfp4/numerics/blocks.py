# SPDX-License-Identifier: Apache-2.0
"""One tensor on its way through quantization: from rows to blocks, macro factors, scales, rounding, and back to rows.

[`Blocks`] takes the steps of the definition in [`hf_mxfp4.numerics.quantize`] in their order. In this file, ``z`` are
the float32 values of blocks, ``amax`` their largest magnitudes, ``q`` values on the E2M1 grid and ``byte`` E8M0 scales.
"""

from collections.abc import Callable

import torch

from mxfp4_kernels.scale_rules import ScaleRule

from .corrections import (
    DYNAMIC_CANDIDATES,
    dynamic_candidates,
    inverse_power_of_two,
    macro_factor,
    mantissa_factor,
    pack_mantissas,
    static_macro,
    sum_of_squares,
)
from .formats import (
    BLOCK_SIZE,
    E8M0_NAN,
    decode_e8m0,
    encode_e2m1,
    inverse_scale,
    largest_finite_magnitude,
    pack_codes,
    round_nearest,
    round_stochastic,
    saturate,
    scale_from_amax,
    to_float32,
)
from .rng import NoiseSource, counted_uniform
from .schemes import QuantScheme


#: Grid values ``[..., blocks, 32]``, and the scale bytes ``[..., blocks]`` (int32) that they are multiplied by.
Quantized = tuple[torch.Tensor, torch.Tensor]

#: What a rule of least squares adds to its first scale byte; the earlier one wins a tie.
_LEAST_SQUARES_OFFSETS = (0, 1, -1)
#: Elements, of all candidates together, that a search for macro factors computes at a time.
_PORTION = 1 << 25
#: The same on the CPU, where they should stay in the processor's cache.
_PORTION_CPU = 1 << 18


class Blocks:
    """A tensor as float32 blocks ``[..., blocks, 32]``, or tiles ``[..., N/32, blocks, 1024]``, padded with zeros.

    Macro factors or block mantissas, if the scheme has them, are found and applied.

    Attributes:
        shape: of the rows ``[..., K]``, which run along the quantized axis.
        z: values of blocks, after macro factors or mantissas.
        amax: largest magnitudes of blocks, ``[..., blocks]``.
        m8: macro bytes ``[..., macro blocks]`` (int32), or `None`.
    """

    def __init__(self, x: torch.Tensor, scheme: QuantScheme, axis: int):
        self.scheme = scheme
        self.axis = axis
        rows = to_float32(x.detach().movedim(axis, -1), copy=True)
        self.shape = rows.shape
        self.blocks_per_row = -(-rows.shape[-1] // BLOCK_SIZE)
        if scheme.macro_block is None:
            self.blocks_per_macro = 1
        elif scheme.macro_block == "row":
            self.blocks_per_macro = max(1, self.blocks_per_row)
        else:
            self.blocks_per_macro = int(scheme.macro_block) // BLOCK_SIZE
        self.z = self._to_blocks(rows)
        self.amax = self.z.abs().amax(dim=-1)
        self.m8: torch.Tensor | None = None
        # For each block, what its values were multiplied by, or divided by.
        self._factor: torch.Tensor | None = None
        self._divisor: torch.Tensor | None = None
        if scheme.mantissas:
            self._apply_mantissas()
        elif scheme.macro_block is not None:
            self._apply_macro_factors()

    # ---- macro factors and block mantissas --------------------------------------------------------------------------

    def _apply_macro_factors(self) -> None:
        """Multiply the values of each macro block by its factor ``1 + m8 / 256``."""
        if self.scheme.macro_search == "static":
            self.m8 = static_macro(self._by_macro(self.amax).amax(dim=-1))
        else:
            self.m8 = self._in_portions(self._best_macro, DYNAMIC_CANDIDATES)
        self._factor = self._per_block(macro_factor(self.m8))
        self.z.mul_(self._factor.unsqueeze(-1))
        # Rounding is monotonic, so the maximum of the products is the product of the maximum.
        self.amax = self.amax * self._factor

    def _apply_mantissas(self) -> None:
        """Divide the values of each block by the mantissa ``1 + m / 4`` of its scale."""
        mantissa = self._in_portions(self._best_mantissa, self.scheme.mantissas)
        self.m8 = pack_mantissas(mantissa)
        self._divisor = mantissa_factor(mantissa)
        self.z.div_(self._divisor.unsqueeze(-1))
        self.amax = self.amax / self._divisor

    def _best_macro(self, z: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
        """``m8`` of the candidate with the least squared error per macro block; the smallest factor wins a tie."""
        macro_amax = self._by_macro(amax).amax(dim=-1)
        m8 = dynamic_candidates(macro_amax)
        factor = self._per_block(macro_factor(m8))
        q, byte = quantize_to_nearest(z * factor.unsqueeze(-1), amax * factor, self.scheme.scale_rule)
        error = _values(q, byte).div_(factor.unsqueeze(-1)).sub_(z)
        error.mul_(self._per_block(inverse_power_of_two(macro_amax)).unsqueeze(-1))
        sum_per_macro = self._by_macro(sum_of_squares(error)).sum(dim=-1)
        best = sum_per_macro.argmin(dim=0, keepdim=True)
        return m8.gather(0, best).squeeze(0)

    def _best_mantissa(self, z: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
        """Two-bit mantissa of least squared error for every block; the smallest wins a tie, non-finite blocks get 0."""
        candidates = torch.arange(self.scheme.mantissas, device=z.device)
        divisor = mantissa_factor(candidates).view(-1, 1, 1)
        q, byte = quantize_to_nearest(z / divisor.unsqueeze(-1), amax / divisor, self.scheme.scale_rule)
        value = _values(q, byte).mul_(divisor.unsqueeze(-1))
        # The largest numbers may leave float32 here. An infinite error has no integer: processors disagree on it.
        error = saturate(value, torch.float32).sub_(z).mul_(inverse_power_of_two(amax).unsqueeze(-1))
        best = sum_of_squares(error).argmin(dim=0)
        return best.to(torch.int32).masked_fill_(~amax.isfinite(), 0)

    def _in_portions(self, search: Callable[..., torch.Tensor], n_candidates: int) -> torch.Tensor:
        """Return what ``search(z, amax)`` finds, int32 ``[..., n]``, for as many rows of blocks at a time as fit."""
        z = self.z.unsqueeze(0).flatten(0, -3)
        amax = self.amax.unsqueeze(0).flatten(0, -2)
        portion = _PORTION_CPU if z.device.type == "cpu" else _PORTION
        n_rows = max(1, portion // max(1, n_candidates * z.shape[1:].numel()))
        if z.shape[0] <= n_rows or z.device.type == "meta" or torch.compiler.is_compiling():
            best = search(z, amax)
        else:
            portions = zip(z.split(n_rows), amax.split(n_rows), strict=True)
            best = torch.cat([search(*portion_of_both) for portion_of_both in portions])
        return best.view(*self.amax.shape[:-1], best.shape[-1])

    def _per_block(self, per_macro: torch.Tensor) -> torch.Tensor:
        return per_macro.repeat_interleave(self.blocks_per_macro, dim=-1)

    def _by_macro(self, per_block: torch.Tensor) -> torch.Tensor:
        n_macros = per_block.shape[-1] // self.blocks_per_macro
        return per_block.view(*per_block.shape[:-1], n_macros, self.blocks_per_macro)

    # ---- scales and rounding ----------------------------------------------------------------------------------------

    def quantize(self, source: NoiseSource) -> tuple[Quantized, Quantized | None]:
        """Return the first pass, and that of its residual or `None`. Stochastic rounding draws from ``source``.
        Consumes ``z``."""
        if self.scheme.outlier_fallback is None:
            return self._quantize_once(self.z, self.amax, source, draw=0), None
        q, byte = self._quantize_once(self.z.clone(), self.amax, source, draw=0)
        residual = self.z - q * decode_e8m0(byte).unsqueeze(-1)
        # Where the first pass is NaN, so is the whole result: the residual says nothing there.
        residual.masked_fill_((byte == E8M0_NAN).unsqueeze(-1), 0.0)
        return (q, byte), self._quantize_once(residual, residual.abs().amax(dim=-1), source, draw=1)

    def _quantize_once(self, z: torch.Tensor, amax: torch.Tensor, source: NoiseSource, draw: int) -> Quantized:
        """Quantize values ``z``, which are consumed, with random numbers ``draw`` of ``source``."""
        if self.scheme.rounding == "nearest":
            return quantize_to_nearest(z, amax, self.scheme.scale_rule)
        byte = scale_bytes(z, amax, self.scheme.scale_rule)
        y = _over_scale(z, byte, out=z)
        if isinstance(source, int):
            return round_stochastic(y, self._to_blocks(counted_uniform(self.shape, source, draw, z.device))), byte
        return round_stochastic(y, source), byte

    # ---- results ----------------------------------------------------------------------------------------------------

    def dequantized(self, first: Quantized, residual: Quantized | None, dtype: torch.dtype) -> torch.Tensor:
        """Values of what [`quantize`] returned, as ``dtype`` and in the layout of ``x``. Consumes it."""
        out = _values(*first)
        if residual is not None:
            out.add_(_values(*residual).mul_(self.scheme.outlier_fallback))
        if self._divisor is not None:
            out.mul_(self._divisor.unsqueeze(-1))
        if self._factor is not None:
            out.div_(self._factor.unsqueeze(-1))
        rows = from_blocks(out, self.shape, self.scheme.block_rows)
        return saturate(rows, dtype).to(dtype).movedim(-1, self.axis)

    def packed(self, quantized: Quantized) -> tuple[torch.Tensor, torch.Tensor]:
        """Return codes ``[..., ceil(K/2)]`` and scale bytes ``[..., ceil(K/32)]``, both uint8."""
        q, byte = quantized
        codes = from_blocks(encode_e2m1(q), self.shape, self.scheme.block_rows)
        return pack_codes(codes), self.bytes_per_row(byte[..., : self.blocks_per_row])

    def bytes_per_row(self, byte: torch.Tensor) -> torch.Tensor:
        """Return bytes of blocks as uint8, repeated for each row where rows share blocks."""
        byte = byte.to(torch.uint8)
        if self.scheme.block_rows > 1:
            byte = byte.repeat_interleave(self.scheme.block_rows, dim=-2)[..., : self.shape[-2], :]
        return byte.contiguous()

    def _to_blocks(self, rows: torch.Tensor) -> torch.Tensor:
        return to_blocks(rows, self.blocks_per_macro * BLOCK_SIZE, self.scheme.block_rows)


def quantize_to_nearest(z: torch.Tensor, amax: torch.Tensor, rule: ScaleRule) -> Quantized:
    """Quantize the values of blocks, which are consumed, to nearest."""
    byte = scale_bytes(z, amax, rule)
    return round_nearest(_over_scale(z, byte, out=z)), byte


def scale_bytes(z: torch.Tensor, amax: torch.Tensor, rule: ScaleRule) -> torch.Tensor:
    """Return the scale bytes (int32) of blocks under a rule."""
    first = scale_from_amax(amax, rule)
    if not rule.least_squares:
        return first
    unit = inverse_power_of_two(amax).unsqueeze(-1)
    candidates = []
    errors = []
    for offset in _LEAST_SQUARES_OFFSETS:
        byte = torch.where(first == E8M0_NAN, first, (first + offset).clamp(0, 254))
        error = _values(round_nearest(_over_scale(z, byte)), byte).sub_(z).mul_(unit)
        candidates.append(byte)
        errors.append(sum_of_squares(error))
    best = torch.stack(errors).argmin(dim=0, keepdim=True)
    return torch.stack(candidates).gather(0, best).squeeze(0)


def _values(q: torch.Tensor, byte: torch.Tensor) -> torch.Tensor:
    """Grid values times their scales. ``q`` is consumed."""
    return q.mul_(decode_e8m0(byte).unsqueeze(-1))


def _over_scale(z: torch.Tensor, byte: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Blocks divided by their scales, no further from zero than what is finite once it is multiplied again."""
    y = torch.mul(z, inverse_scale(byte).unsqueeze(-1), out=out)
    # A block with NaN or infinity has inverse scale 0: NaN * 0 and inf * 0 are NaN still, hence the masking.
    is_nan = byte == E8M0_NAN
    if y.device.type != "cpu" or is_nan.any():
        y.masked_fill_(is_nan.unsqueeze(-1), 0.0)
    limit = largest_finite_magnitude(byte)
    if limit is None:
        return y
    limit = limit.unsqueeze(-1)
    return torch.minimum(torch.maximum(y, -limit), limit)


# ---- rows and blocks ------------------------------------------------------------------------------------------------


def to_blocks(rows: torch.Tensor, unit: int, block_rows: int, size: int = BLOCK_SIZE) -> torch.Tensor:
    """Blocks ``[..., K/size, size]`` of rows ``[..., K]``, or tiles ``[..., N/32, K/32, 1024]`` of ``[..., N, K]``.

    Pads with zeros: columns to a multiple of ``unit`` (itself one of ``size``), rows to one of ``block_rows``. Shares
    memory with ``rows`` where it can.
    """
    column_padding = -rows.shape[-1] % unit
    row_padding = -rows.shape[-2] % block_rows if block_rows > 1 else 0
    if row_padding:
        rows = torch.nn.functional.pad(rows, (0, column_padding, 0, row_padding))
    elif column_padding:
        rows = torch.nn.functional.pad(rows, (0, column_padding))
    if block_rows == 1:
        rows = rows.contiguous()
        return rows.view(*rows.shape[:-1], rows.shape[-1] // size, size)
    *lead, n, k = rows.shape
    tiles = rows.reshape(*lead, n // block_rows, block_rows, k // BLOCK_SIZE, BLOCK_SIZE).transpose(-3, -2)
    return tiles.reshape(*lead, n // block_rows, k // BLOCK_SIZE, block_rows * BLOCK_SIZE)


def from_blocks(blocks: torch.Tensor, shape: torch.Size, block_rows: int) -> torch.Tensor:
    """Rows of the given shape ``[..., K]`` out of what [`to_blocks`] made of them, without the padding."""
    if block_rows == 1:
        return blocks.flatten(-2)[..., : shape[-1]]
    *lead, n, k, _ = blocks.shape
    tiles = blocks.reshape(*lead, n, k, block_rows, BLOCK_SIZE).transpose(-3, -2)
    return tiles.reshape(*lead, n * block_rows, k * BLOCK_SIZE)[..., : shape[-2], : shape[-1]]
