# SPDX-License-Identifier: Apache-2.0
"""What merging adapters into quantized weights cost."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class MergeError:
    """Energies (sums of squares) of one merged weight: of the sum ``W + delta``, of ``delta``, and of the error that
    quantizing the sum made.

    Of packed weights and of trainable ones in the same way: ``W`` are the values that the layer computes with before
    adapters are merged, which for a master weight are those of ``Q(master)``.
    """

    signal: float
    update: float
    noise: float

    @classmethod
    def of(cls, total: torch.Tensor, update: torch.Tensor, merged: torch.Tensor) -> "MergeError":
        """From the float32 sum, the adapters' part of it, and the values that the merged layer computes with."""
        parts = (total, update, merged - total)
        return cls(*(float(torch.linalg.vector_norm(part, dtype=torch.float64)) ** 2 for part in parts))

    @classmethod
    def summed(cls, errors: Iterable["MergeError"]) -> "MergeError":
        errors = list(errors)
        return cls(*(sum(getattr(error, part) for error in errors) for part in ("signal", "update", "noise")))

    @property
    def sqnr_db(self) -> float:
        """Signal to quantization noise ratio of the merged weight, in decibels."""
        return _decibels(self.signal, self.noise)

    @property
    def update_sqnr_db(self) -> float:
        """The same for what the adapters add: below 0, more was lost in quantizing than they had changed."""
        return _decibels(self.update, self.noise)


@dataclass(frozen=True)
class MergeReport:
    """The errors of merging, by the layers' names; `model.merge_report` after `merge_and_unload`.

    Attributes:
        layers: by name; of experts whose adapters are on single parameters, by the parameters' names.
        kind: of the weights: ``"packed"``, ``"trainable"``, or both.
    """

    layers: dict[str, MergeError]
    kind: str = "packed"

    @property
    def total(self) -> MergeError:
        """Return the energies summed over the layers."""
        return MergeError.summed(self.layers.values())

    def __str__(self) -> str:
        lines = [f"merged into {len(self.layers)} {self.kind} layers: {_line(self.total)}"]
        return "\n".join([*lines, *(f"  {name}: {_line(error)}" for name, error in self.layers.items())])


def _line(error: MergeError) -> str:
    return f"SQNR {error.sqnr_db:.2f} dB, of the adapters' change {error.update_sqnr_db:.2f} dB"


def _decibels(signal: float, noise: float) -> float:
    """Infinite without noise; NaN where there is nothing, or where weights are not finite."""
    if not (math.isfinite(signal) and math.isfinite(noise)) or signal == noise == 0:
        return math.nan
    if noise == 0:
        return math.inf
    return 10.0 * math.log10(signal / noise) if signal > 0 else -math.inf
