# SPDX-License-Identifier: Apache-2.0
"""Packed codes and scale bytes of a quantized tensor, and the values that they stand for."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from .corrections import macro_factor, mantissa_factor, unpack_mantissas
from .formats import BLOCK_SIZE, decode_e2m1, decode_e8m0, saturate, unpack_codes
from .schemes import QuantScheme


#: Fields of an [`MXFP4Tensor`] that are tensors.
PARTS = ("codes", "scale", "macro", "residual_codes", "residual_scale")


@dataclass(eq=False)
class MXFP4Tensor:
    """A quantized tensor. Blocks run along the last axis of the stored tensors; ``axis`` says where it was. Bytes are
    stored for every row, also where 32 rows share a block.

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

    @property
    def parts(self) -> tuple[torch.Tensor | None, ...]:
        """The tensors, in the order of `PARTS`."""
        return self.codes, self.scale, self.macro, self.residual_codes, self.residual_scale

    def map(self, function: Callable[[torch.Tensor], torch.Tensor], **changes: Any) -> "MXFP4Tensor":
        """Return this with ``function`` of each tensor, and other fields changed."""
        parts = {}
        for name, part in zip(PARTS, self.parts, strict=True):
            parts[name] = None if part is None else function(part)
        return replace(self, **parts, **changes)

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the represented values, in the original layout, as ``dtype`` (default: the original dtype).

        Computed in float32, so that the result is that of [`fake_quantize`]; without macro factors and residual in
        float64 when that is asked for, where every one of the 16 x 256 pairs of a code and a scale byte is exact. In a
        dtype that cannot hold a value it saturates at the largest finite one; NaN stays NaN.

        Raises `ValueError` when the shapes do not fit together.
        """
        dtype = dtype or self.dtype
        for name, part, size in zip(PARTS, self.parts, part_sizes(self.scheme, self.length), strict=True):
            if part is not None and part.shape[-1] != size:
                raise ValueError(
                    f"{name} has {part.shape[-1]} bytes along its last axis; {self.length} elements need {size}"
                )
        compute = torch.float32
        if dtype == torch.float64 and self.macro is None and self.residual_codes is None:
            compute = torch.float64
        out = self._values(self.codes, self.scale, compute)
        if self.residual_codes is not None:
            out = out + self.scheme.outlier_fallback * self._values(self.residual_codes, self.residual_scale, compute)
        if self.scheme.mantissas:
            out = out * self._per_element(mantissa_factor(unpack_mantissas(self.macro)), BLOCK_SIZE)
        elif self.macro is not None:
            if self.scheme.macro_block == "row":
                size = max(self.length, 1)
            else:
                size = int(self.scheme.macro_block)
            out = out / self._per_element(macro_factor(self.macro), size)
        return saturate(out, dtype).to(dtype).movedim(-1, self.axis)

    def _values(self, codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return elements times their block scales, cut to the finite range."""
        elements = decode_e2m1(unpack_codes(codes, self.length)).to(dtype)
        scales = self._per_element(decode_e8m0(scale, dtype), BLOCK_SIZE)
        return saturate(elements * scales, dtype)

    def _per_element(self, factors: torch.Tensor, size: int) -> torch.Tensor:
        """Repeat factors for the ``size`` elements that share one."""
        return factors.repeat_interleave(size, dim=-1)[..., : self.length]


def part_sizes(scheme: QuantScheme, length: int) -> tuple[int | None, ...]:
    """Return the bytes of each of `PARTS` for a row of ``length`` elements; `None` for parts that the scheme lacks."""
    n_bytes = -(-length // 2)
    n_blocks = -(-length // BLOCK_SIZE)
    macro = None
    if scheme.macro_block == "row":
        macro = min(1, length)
    elif scheme.macro_block is not None:
        macro = -(-length // int(scheme.macro_block))
    if scheme.outlier_fallback is None:
        return n_bytes, n_blocks, macro, None, None
    return n_bytes, n_blocks, macro, n_bytes, n_blocks


def block_scales(scale: torch.Tensor, macro: torch.Tensor | None, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the scales ``[..., blocks]`` of scale bytes, and of packed block mantissas if there are any; exact in
    float32."""
    scales = decode_e8m0(scale, dtype)
    if macro is None:
        return scales
    # The last byte may have mantissas of blocks that do not exist.
    factors = mantissa_factor(unpack_mantissas(macro))[..., : scale.shape[-1]]
    return scales * factors
