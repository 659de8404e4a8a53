# SPDX-License-Identifier: Apache-2.0
"""MXFP4 values as E4M3 elements times one float32 scale per row or per 128 elements: what FP8 tensor cores multiply.

Every E2M1 value times ``2**s`` with s in -8..6 is an E4M3 value (OCP 8-bit floating point: three mantissa bits, normal
from 2**-6 to 448, steps of 2**-9 below). So the exponents of blocks go into the elements, relative to the largest of
their group, which gets s = 6, and what the group has in common goes into its scale: a power of two, over the macro
factor where there is one.

Definition, per group (a row, or 128 elements of it) with scale bytes b, over blocks that are neither zero nor NaN:

1. scale byte ``g = max(max(b) - 6, 2)``; scale ``2**(g - 127) / f`` (float32, f = 1 without macro factor);
2. element ``q * 2**(b - g)``, rounded to E4M3 to nearest, ties to even.

This is exact for blocks with ``b - g >= -8``. The others are counted; their elements are off by at most ``2**-10``
scales, that is ``2**-15`` of the largest magnitude in the group. Blocks of zeros fit anywhere, also where their scale
byte says otherwise; NaN blocks have NaN elements. Scales are never subnormal.
"""

from dataclasses import dataclass

import torch

from . import macro
from .formats import e2m1 as grid
from .formats.e8m0 import BLOCK_SIZE, E8M0_NAN, decode_e8m0
from .packed import MXFP4Tensor, saturate
from .schemes import QuantScheme, one_of


#: Elements that share a scale: a whole row, or 128.
FOLD_GROUPS = ("row", 128)
_GROUP = 128
#: Exponents of blocks inside of E4M3: the largest, and the least that holds 0.5 and 1.5.
_HIGHEST, _LOWEST = 6, -8
# 2**(2 - 127), over a factor below 2, is a normal number.
_LEAST_SCALE_BYTE = 2


@dataclass(frozen=True)
class FoldedOperand:
    """A matrix ready for FP8 tensor cores, contraction last.

    Attributes:
        elements: ``float8_e4m3fn [..., 128 * ceil(K/128)]``, zero from column K on (in a NaN block, NaN).
        scale: float32 ``[..., 1]``, or ``[..., ceil(K/128)]`` of groups of 128.
        n_inexact: int32 scalar on the same device: blocks whose elements were rounded.
        length: K.
        group: ``"row"`` or 128.
    """

    elements: torch.Tensor
    scale: torch.Tensor
    n_inexact: torch.Tensor
    length: int
    group: int | str

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The values ``[..., K]``; computed in float64 when that is asked for, otherwise in float32. What the dtype
        cannot hold saturates; NaN stays NaN."""
        compute = torch.float64 if dtype == torch.float64 else torch.float32
        scale = self.scale.to(compute)
        if self.group != "row":
            scale = scale.repeat_interleave(_GROUP, dim=-1)
        return saturate((self.elements.to(compute) * scale)[..., : self.length], dtype).to(dtype)


def fold_unsupported_reason(scheme: QuantScheme, group: int | str) -> str | None:
    """Why tensors of this scheme do not fold in these groups; `None` when they do."""
    if scheme.outlier_fallback is not None:
        return "outlier fallback makes two FP8 products of one; a single product of the dense values costs no more"
    if scheme.macro_block is None:
        return None
    if scheme.macro_search == "blockwise":
        return "block mantissas vary every 32 elements, and 1.5 * 1.75 = 1.0101b * 2 has a bit more than E4M3"
    if scheme.macro_block != _GROUP:
        return f"macro_block={scheme.macro_block!r}: the factor joins scales of {_GROUP} elements alone"
    if group == "row":
        return "macro factors vary along the row, so that no scale of a whole row holds them; fold by 128"
    return None


def fold(tensor: MXFP4Tensor, group: int | str = "row") -> FoldedOperand:
    """``tensor`` as E4M3 elements and scales of groups along its quantized axis, which comes last.

    Raises `ValueError` for a scheme that [`fold_unsupported_reason`] refuses, or another group.
    """
    one_of("group", group, FOLD_GROUPS)
    if (reason := fold_unsupported_reason(tensor.scheme, group)) is not None:
        raise ValueError(f"this tensor does not fold: {reason}")
    q, byte = _padded(tensor)
    top = _that_count(q, byte)
    n_blocks = byte.shape[-1]
    blocks_per_group = n_blocks if group == "row" else _GROUP // BLOCK_SIZE
    if n_blocks:
        top = top.view(*top.shape[:-1], n_blocks // blocks_per_group, blocks_per_group).amax(dim=-1)
    elif group == "row":
        top = top.new_zeros(*top.shape[:-1], 1)
    base = _base(top)
    elements, n_inexact = _elements(q, byte, base.repeat_interleave(blocks_per_group, dim=-1))
    scale = decode_e8m0(base)
    if tensor.macro is not None:
        scale = scale / macro.macro_factor(tensor.macro)
    return FoldedOperand(elements.flatten(-2), scale, n_inexact, tensor.length, group)


def fold_across(tensor: MXFP4Tensor) -> FoldedOperand:
    """The values of a matrix ``[M, K]`` quantized along its rows as an operand that is contracted along M, ``[K, M]``
    with groups of 128 rows: what a backward product needs of an operand of the forward one.

    Raises `ValueError` for a scheme that [`fold_unsupported_reason`] refuses, one with macro factors, which vary along
    the new contraction, or another axis.
    """
    reason = fold_unsupported_reason(tensor.scheme, _GROUP)
    if reason is None and tensor.scheme.macro_block is not None:
        reason = "macro factors vary along the other axis, too"
    if reason is None and (tensor.codes.dim() != 2 or tensor.axis != 1):
        reason = "it is no matrix with blocks along its rows"
    if reason is not None:
        raise ValueError(f"this tensor does not fold across its rows: {reason}")
    n_rows, length = tensor.codes.shape[0], tensor.length
    q, byte = _padded(tensor)
    padding = -n_rows % _GROUP
    q = torch.nn.functional.pad(q, (0, 0, 0, 0, 0, padding))
    byte = torch.nn.functional.pad(byte, (0, 0, 0, padding))
    top = _that_count(q, byte)
    n_groups = byte.shape[0] // _GROUP
    base = _base(top.view(n_groups, _GROUP, byte.shape[1]).amax(dim=1))
    elements, n_inexact = _elements(q, byte, base.repeat_interleave(_GROUP, dim=0))
    scale = decode_e8m0(base).repeat_interleave(BLOCK_SIZE, dim=1)[:, :length]
    return FoldedOperand(elements.flatten(-2)[:, :length].t(), scale.t(), n_inexact, n_rows, _GROUP)


def _padded(tensor: MXFP4Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Grid values ``[..., blocks, 32]`` and scale bytes ``[..., blocks]`` (int32) of whole groups of 128."""
    q = grid.decode_e2m1(grid.unpack_codes(tensor.codes, tensor.length))
    n_blocks = -(-tensor.length // _GROUP) * (_GROUP // BLOCK_SIZE)
    q = torch.nn.functional.pad(q, (0, n_blocks * BLOCK_SIZE - tensor.length))
    byte = torch.nn.functional.pad(tensor.scale.to(torch.int32), (0, n_blocks - tensor.scale.shape[-1]))
    return q.view(*q.shape[:-1], n_blocks, BLOCK_SIZE), byte


def _that_count(q: torch.Tensor, byte: torch.Tensor) -> torch.Tensor:
    """Scale bytes of blocks that are neither zero nor NaN; 0 of the others."""
    return torch.where((q != 0).any(dim=-1) & (byte != E8M0_NAN), byte, 0)


def _base(top: torch.Tensor) -> torch.Tensor:
    """Scale bytes of groups, from the largest of their blocks."""
    return (top - _HIGHEST).clamp_(min=_LEAST_SCALE_BYTE)


def _elements(q: torch.Tensor, byte: torch.Tensor, base: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 elements of blocks whose groups have the scale bytes ``base``, and the number of those rounded."""
    is_nan = byte == E8M0_NAN
    shift = byte - base
    # Below 2**-40 of the scale elements are zeros anyway.
    power = decode_e8m0(127 + shift.clamp(-40, _HIGHEST)).masked_fill_(is_nan, torch.nan)
    inexact = (q != 0).any(dim=-1) & ~is_nan & (shift < _LOWEST)
    return (q * power.unsqueeze(-1)).to(torch.float8_e4m3fn), inexact.sum(dtype=torch.int32)
