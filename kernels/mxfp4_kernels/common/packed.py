# SPDX-License-Identifier: Apache-2.0
"""Codes and scales of a quantized tensor, and how many bytes each of them has."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from .arguments import PackedPointers, RowBytes
from .scheme import BLOCK, Scheme
from .tensors import output_tensor


class Packed(NamedTuple):
    """Contiguous uint8 tensors of a quantized tensor ``[..., K]``. Where rows share blocks, each row has bytes.

    Attributes:
        codes: ``[..., ceil(K/2)]``, two E2M1 codes per byte, even index in the low nibble.
        scale: ``[..., ceil(K/32)]``, E8M0.
        macro: ``[..., ceil(K/macro_block)]``, or `None`.
        residual_codes, residual_scale: as the first two, or `None`.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    macro: torch.Tensor | None = None
    residual_codes: torch.Tensor | None = None
    residual_scale: torch.Tensor | None = None

    @classmethod
    def empty(cls, device: torch.device, shape: tuple[int, ...], scheme: Scheme) -> Packed:
        """Return uninitialized tensors for values of a shape."""
        parts: list[torch.Tensor | None] = []
        for per_byte in _elements_per_byte(scheme):
            if per_byte is None:
                parts.append(None)
            else:
                n_bytes = -(-shape[-1] // per_byte)
                parts.append(torch.empty((*shape[:-1], n_bytes), dtype=torch.uint8, device=device))
        return cls(*parts)

    def check(self, length: int, scheme: Scheme) -> None:
        """Raise `TypeError` or `ValueError` for tensors that do not fit together, ``length`` K or the scheme."""
        for (name, tensor), per_byte in zip(self._asdict().items(), _elements_per_byte(scheme), strict=True):
            if tensor is None and per_byte is None:
                continue
            if tensor is None:
                raise ValueError(f"{name} is missing for {scheme}")
            if per_byte is None:
                raise ValueError(f"{name} is given for {scheme}")
            if tensor.dtype != torch.uint8:
                raise TypeError(f"{name} must be uint8, got {tensor.dtype}")
            if tensor.device != self.codes.device:
                raise ValueError(f"{name} is on {tensor.device}, codes are on {self.codes.device}")
            shape = [*self.codes.shape[:-1], -(-length // per_byte)]
            if list(tensor.shape) != shape:
                raise ValueError(f"{name} has the shape {list(tensor.shape)}; {length} elements need {shape}")

    def pointers(self) -> PackedPointers:
        """Return the tensors as a kernel takes them, contiguous."""
        return PackedPointers(*(None if part is None else part.contiguous() for part in self))


def output_packed(out: Packed | None, shape: Sequence[int], scheme: Scheme, device: torch.device) -> Packed:
    """Return codes and scales that a kernel writes for values of a shape: ``out``, or new ones. Raises as
    [`output_tensor`]."""
    if out is None:
        return Packed.empty(device, tuple(shape), scheme)
    out.check(shape[-1], scheme)
    for name, part in out._asdict().items():
        if part is not None:
            output_tensor(part, (*shape[:-1], part.shape[-1]), torch.uint8, device, f"{name} of out")
    return out


def _elements_per_byte(scheme: Scheme) -> tuple[int | None, ...]:
    """Return how many elements share a byte of each part of a [`Packed`]; `None` for parts that the scheme lacks."""
    if scheme.outlier_fallback is None:
        return 2, BLOCK, scheme.macro_block, None, None
    return 2, BLOCK, scheme.macro_block, 2, BLOCK


@functools.lru_cache(maxsize=1024)
def row_bytes(length: int, scheme: Scheme) -> RowBytes:
    """Return the bytes in a packed row of ``length`` elements.

    Kernels count macro blocks of 32 where a scheme has none, but read and write no byte of them.
    """
    return RowBytes(
        -(-length // 2),
        -(-length // BLOCK),
        -(-length // (scheme.macro_block or BLOCK)),
    )
