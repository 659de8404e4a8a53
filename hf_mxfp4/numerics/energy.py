# SPDX-License-Identifier: Apache-2.0
"""Signal and quantization noise: sums of squares, and their ratio in decibels."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch


#: Rows that are compared at a time, to bound the memory for float64 copies.
_ROWS = 1024


def decibels(signal: float, noise: float) -> float:
    """Return the ratio of two energies in decibels: infinite without noise, NaN without either or if not finite."""
    if not math.isfinite(signal + noise) or signal == noise == 0:
        return math.nan
    if noise == 0:
        return math.inf
    if signal == 0:
        return -math.inf
    return 10.0 * math.log10(signal / noise)


@dataclass(kw_only=True)
class ErrorEnergy:
    """Energies (sums of squares) of some values and of what quantization changed in them.

    Reports of loading, packing, export and merging measure their errors with it.

    Attributes:
        signal: energy of the values before they were quantized.
        noise: energy of the differences.
    """

    signal: float = 0.0
    noise: float = 0.0

    def add(self, original: torch.Tensor, quantized: torch.Tensor, *, skip_nan: bool = False) -> None:
        """Count a tensor before and after quantization, in any dtypes. ``skip_nan`` leaves out elements that are NaN;
        otherwise they make the sums NaN."""
        for before, after in zip(original.detach().split(_ROWS), quantized.detach().split(_ROWS), strict=True):
            # In place: memory that is new to the process costs more than the arithmetic.
            before = before.to(torch.float64, copy=True)
            error = after.to(torch.float64, copy=True).sub_(before)
            total = torch.nansum if skip_nan else torch.sum
            self.signal += total(before.square_()).item()
            self.noise += total(error.square_()).item()

    @classmethod
    def of(cls, original: torch.Tensor, quantized: torch.Tensor) -> "ErrorEnergy":
        """Return the energies of one tensor."""
        energy = ErrorEnergy()
        energy.add(original, quantized)
        return energy

    @classmethod
    def total(cls, energies: Iterable["ErrorEnergy"]) -> "ErrorEnergy":
        """Return the sums over several tensors, the same in any order."""
        energies = list(energies)
        return ErrorEnergy(
            signal=math.fsum(energy.signal for energy in energies),
            noise=math.fsum(energy.noise for energy in energies),
        )

    @property
    def sqnr_db(self) -> float:
        """Signal to quantization noise ratio in decibels."""
        return decibels(self.signal, self.noise)
