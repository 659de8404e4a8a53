# SPDX-License-Identifier: Apache-2.0
"""What a conversion did to each layer, and the error that it added."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..files import json_clean


#: What can happen to a layer: the same bytes, MXFP4 again from its packed values, full precision with the quantized
#: values, MXFP4 straight from full precision, or full precision as it was.
ACTIONS = ("kept", "requantized", "dequantized", "packed", "left")
#: What an error is measured against: full-precision weights that were read, or the values of packed ones.
ORIGINAL, PACKED = "the full-precision weights", "the packed values"
#: Rows that are compared at a time.
_ROWS = 1024


@dataclass
class LayerCost:
    """What was done to one weight.

    Attributes:
        name: of the layer; for experts, of the one weight that the model has for all of them.
        action: one of [`ACTIONS`].
        reason: why, if it was not the user's choice for all layers.
        matrices: number of linear maps, more than one for experts only.
        n_weights: elements.
        signal, noise: energy of the values before, and of their change; elements that are not finite left out.
        bytes_before, bytes_after: size of its tensors in the files read and written, biases not counted.
    """

    name: str
    action: str
    reason: str | None = None
    matrices: int = 1
    n_weights: int = 0
    signal: float = 0.0
    noise: float = 0.0
    bytes_before: int = 0
    bytes_after: int = 0

    def add(self, before: torch.Tensor, after: torch.Tensor) -> None:
        """Count a matrix before and after the change, in any dtypes."""
        for old, new in zip(before.split(_ROWS), after.split(_ROWS), strict=True):
            self.signal += old.float().square().nansum(dtype=torch.float64).item()
            self.noise += (new.float() - old.float()).square().nansum(dtype=torch.float64).item()

    @property
    def sqnr_db(self) -> float:
        """Signal to noise in decibels; infinite when nothing changed."""
        return sqnr_db([self])


def sqnr_db(costs: Iterable[LayerCost]) -> float:
    """Return signal to noise of several layers in decibels, energies summed; infinite when nothing changed."""
    costs = list(costs)
    signal, noise = (math.fsum(getattr(cost, name) for cost in costs) for name in ("signal", "noise"))
    if noise == 0:
        return math.inf
    return 10.0 * math.log10(signal / noise) if signal else -math.inf


def bits_per_weight(costs: Iterable[LayerCost], when: str = "after") -> float | None:
    """Return bits in the files per element of some layers, ``"before"`` or ``"after"``; `None` without elements."""
    costs = list(costs)
    n_weights = sum(cost.n_weights for cost in costs)
    return 8 * sum(getattr(cost, f"bytes_{when}") for cost in costs) / n_weights if n_weights else None


@dataclass
class ConversionReport:
    """What a conversion wrote.

    Attributes:
        path: the folder.
        format: of the checkpoint written; ``"mxfp4_rl"`` is our own packed one.
        scheme: of the checkpoint read, one line.
        layers: one entry per quantized layer, and per fused weight of experts.
        notes: what else is different, in sentences.
        weights: the scheme of the weights written, if it differs from that of those read.
        against: [`ORIGINAL`] or [`PACKED`], what errors are measured against.
        source_sqnr_db: of a packed checkpoint that was read, the recorded SQNR of its values against what was packed,
            in decibels.
        bytes_before, bytes_after: all tensors in the files read and written.
        file: name of the file in ``path`` that holds this report.
    """

    path: Path
    format: str
    scheme: str
    layers: list[LayerCost] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    weights: str | None = None
    against: str = ORIGINAL
    source_sqnr_db: float | None = None
    bytes_before: int = 0
    bytes_after: int = 0
    file: str | None = None

    def counts(self) -> dict[str, int]:
        """Return the number of linear maps by action, those that happened; each expert counts."""
        found = {action: sum(c.matrices for c in self.layers if c.action == action) for action in ACTIONS}
        return {action: count for action, count in found.items() if count}

    @property
    def n_layers(self) -> int:
        """Linear maps that are quantized, before or after, or that only the format leaves in full precision."""
        return sum(layer.matrices for layer in self.layers)

    @property
    def changed(self) -> Sequence[LayerCost]:
        """Layers whose values are not exactly what they were."""
        return [layer for layer in self.layers if layer.noise]

    @property
    def total_sqnr_db(self) -> float:
        return sqnr_db(self.layers)

    def error(self) -> str:
        """Return the error of all weights in one sentence, and what it is measured against."""
        if self.against == ORIGINAL:
            exact = "no weight differs from the full-precision ones"
            return f"{_sqnr(self.total_sqnr_db)} against {ORIGINAL}" if self.changed else exact
        before = "whose distance from the original weights is not recorded"
        if self.source_sqnr_db is not None:
            before = f"which themselves have {_sqnr(self.source_sqnr_db)} against the original weights"
        measured = f"{_sqnr(self.total_sqnr_db)} against" if self.changed else "bit for bit"
        return f"{measured} {PACKED}, {before}"

    def to_dict(self) -> dict[str, Any]:
        """Return a value for JSON; `sqnr_db` is null where nothing changed."""
        shown = ("name", "matrices", "action", "reason", "sqnr_db", "bytes_before", "bytes_after")
        return json_clean(
            {
                "format": self.format,
                "source_scheme": self.scheme,
                "weights": self.weights,
                "n_layers": self.n_layers,
                "actions": self.counts(),
                "n_changed": len(self.changed),
                "sqnr_db": self.total_sqnr_db,
                "sqnr_against": self.against,
                "source_sqnr_db": self.source_sqnr_db,
                "bytes_before": self.bytes_before,
                "bytes_after": self.bytes_after,
                "bits_per_weight_before": bits_per_weight(self.layers, "before"),
                "bits_per_weight_after": bits_per_weight(self.layers),
                "notes": self.notes,
                "layers": [{name: getattr(layer, name) for name in shown} for layer in self.layers],
            }
        )


def _sqnr(value: float) -> str:
    return f"SQNR {value:.2f} dB"
