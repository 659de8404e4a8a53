# SPDX-License-Identifier: Apache-2.0
"""Packed codes and scale bytes of a quantized tensor, and the values that they stand for."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from .corrections import macro_factor, mantissa_factor, unpack_mantissas
from .formats import BLOCK_SIZE, decode_e2m1, decode_e8m0, saturate, unpack_codes
from .schemes import MACRO_SEARCHES, MANTISSAS, QuantScheme, one_of


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
        residual_codes, residual_scale: as ``codes`` and ``scale`` for the outlier-fallback pass, or `None`; all zero in
            blocks that were not selected for it.
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
        parts = (None if part is None else function(part) for part in self.parts)
        return replace(self, **dict(zip(PARTS, parts, strict=True)), **changes)

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the represented values, in the original layout, as ``dtype`` (default: the original dtype)."""
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


def part_sizes(scheme: QuantScheme, length: int) -> tuple[int | None, ...]:
    """Return the bytes of each of `PARTS` for a row of ``length`` elements; `None` for parts that the scheme lacks."""
    n_bytes, n_blocks = (length + 1) // 2, -(-length // BLOCK_SIZE)
    macro = None
    if scheme.macro_block is not None:
        macro = min(1, length) if scheme.macro_block == "row" else -(-length // int(scheme.macro_block))
    residual = (None, None) if scheme.outlier_fallback is None else (n_bytes, n_blocks)
    return n_bytes, n_blocks, macro, *residual


def block_scales(scale: torch.Tensor, macro: torch.Tensor | None, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Scales ``[..., blocks]`` of scale bytes, and of packed block mantissas if there are any; exact in float32."""
    factors = 1.0 if macro is None else mantissa_factor(unpack_mantissas(macro))[..., : scale.shape[-1]]
    return decode_e8m0(scale, dtype) * factors


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
    one_of("macro_search", macro_search, MACRO_SEARCHES)
    if residual_codes is not None and (residual_scale is None or outlier_fallback is None):
        raise ValueError("residual_codes were given without residual_scale and outlier_fallback")
    for name, tensor in (("scale", scale), ("residual_scale", residual_scale)):
        if tensor is not None and tensor.shape[-1] != n_blocks:
            size = tensor.shape[-1]
            raise ValueError(f"{name} has {size} bytes along its last axis; {length} elements need {n_blocks}")

    def values(packed: torch.Tensor, byte: torch.Tensor) -> torch.Tensor:
        element = decode_e2m1(unpack_codes(packed, length)).to(compute)
        product = element * decode_e8m0(byte, compute).repeat_interleave(BLOCK_SIZE, dim=-1)[..., :length]
        return saturate(product, compute)

    out = values(codes, scale)
    if residual_codes is not None:
        out = out + outlier_fallback * values(residual_codes, residual_scale)
    if macro is not None:
        size = max(length, 1) if macro_block == "row" else int(macro_block)
        if macro.shape[-1] != -(-length // size):
            raise ValueError(
                f"macro has {macro.shape[-1]} bytes along its last axis; {length} elements in macro blocks of "
                f"{macro_block} need {-(-length // size)}"
            )
        if macro_search in MANTISSAS:
            per_block = mantissa_factor(unpack_mantissas(macro))
            out = out * per_block.repeat_interleave(BLOCK_SIZE, dim=-1)[..., :length]
        else:
            out = out / macro_factor(macro).repeat_interleave(size, dim=-1)[..., :length]
    return saturate(out, dtype).to(dtype)
