# SPDX-License-Identifier: Apache-2.0
"""Error against the precision of the scale: a power of two, with more and more mantissa bits, down to the ideal."""

from dataclasses import dataclass

import torch

from ..numerics import QuantScheme, apply_scheme
from ..numerics.macro import macro_factor, static_macro
from .statistics import error_statistics


#: Mantissa bits of the scale that are tried, and the numbers of elements that share such a mantissa.
MANTISSA_BITS = tuple(range(9))
SHARED_BY = (32, 128)
#: Elements of a tensor that the sweep looks at: its first rows, at least one.
SAMPLE_ELEMENTS = 2**15


@dataclass(frozen=True)
class PrecisionSweep:
    """Mergeable energies of the error of the ceiling rule under scales of growing precision.

    Attributes:
        energy: ``|x|**2``.
        floor: error energy of the ideal scale ``amax / 6`` of every block.
        errors: per number of elements that share a mantissa, the error energies for 0, 1, ... 8 bits.
    """

    energy: float = 0.0
    floor: float = 0.0
    errors: tuple[tuple[float, ...], ...] = ((0.0,) * len(MANTISSA_BITS),) * len(SHARED_BY)

    def __add__(self, other: "PrecisionSweep") -> "PrecisionSweep":
        pairs = zip(self.errors, other.errors, strict=True)
        errors = tuple(tuple(a + b for a, b in zip(*rows, strict=True)) for rows in pairs)
        return PrecisionSweep(self.energy + other.energy, self.floor + other.floor, errors)

    @property
    def floor_relative_mse(self) -> float:
        return self.floor / self.energy if self.energy else float("nan")

    def relative_mse(self, shared_by: int) -> tuple[float, ...]:
        """Return the relative squared error for 0 to 8 mantissa bits, each shared by 32 or 128 elements."""
        errors = self.errors[SHARED_BY.index(shared_by)]
        return tuple(error / self.energy if self.energy else float("nan") for error in errors)

    def to_dict(self) -> dict:
        return {"energy": self.energy, "floor": self.floor, "errors": [list(row) for row in self.errors]}

    @classmethod
    def from_dict(cls, sums: dict) -> "PrecisionSweep":
        return cls(sums["energy"], sums["floor"], tuple(tuple(row) for row in sums["errors"]))


def precision_sweep(x: torch.Tensor) -> PrecisionSweep:
    """Sweep the mantissa bits of the scale over the first rows of a matrix ``x`` (arXiv 2605.20402, figure 2).

    A mantissa of b bits is the macro factor of [`hf_mxfp4.numerics.macro`] cut to its b top bits, so 0 bits are plain
    `rceil`, and 8 bits shared by 128 elements are static macro-block scaling.
    """
    rows = x.detach()[: max(1, SAMPLE_ELEMENTS // max(1, x.shape[-1]))].float()
    plain = error_statistics(rows, QuantScheme())
    errors = tuple(
        tuple(_error_energy(rows, size, bits) if bits else plain.total for bits in MANTISSA_BITS) for size in SHARED_BY
    )
    return PrecisionSweep(plain.energy, plain.grid + plain.unmasked_deadzone, errors)


def _error_energy(rows: torch.Tensor, size: int, bits: int) -> float:
    length = rows.shape[-1]
    padded = torch.nn.functional.pad(rows, (0, -length % size))
    groups = padded.view(*padded.shape[:-1], padded.shape[-1] // size, size)
    m8 = static_macro(groups.abs().amax(dim=-1))
    factor = macro_factor(m8 >> (8 - bits) << (8 - bits)).unsqueeze(-1)
    quantized = apply_scheme((groups * factor).view(padded.shape), QuantScheme()).view(groups.shape) / factor
    return float((quantized.double() - groups.double()).square().sum(dim=-1).sum())
