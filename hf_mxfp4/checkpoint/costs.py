# SPDX-License-Identifier: Apache-2.0
"""What a conversion did to each layer, and what it cost."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch


#: What can happen to a layer: the same bytes, MXFP4 again in a plainer scheme, full precision, or packed from it.
ACTIONS = ("kept", "requantized", "dequantized", "packed")


@dataclass
class LayerCost:
    """What was done to one weight.

    Attributes:
        name: of the layer; of experts, of the one weight that the model has for all of them.
        action: one of [`ACTIONS`].
        reason: why, where it was not the user's choice for all layers.
        matrices: how many linear maps it is, more than one of experts alone.
        signal, noise: energy of the values before, and of their change; elements that are not finite left out.
    """

    name: str
    action: str
    reason: str | None = None
    signal: float = 0.0
    noise: float = 0.0
    matrices: int = 1

    def add(self, before: torch.Tensor, after: torch.Tensor) -> None:
        """Count values before and after the change, in any dtype."""
        before, after = before.float(), after.float()
        self.signal += before.square().nansum(dtype=torch.float64).item()
        self.noise += (after - before).square().nansum(dtype=torch.float64).item()

    @property
    def sqnr_db(self) -> float:
        """Signal to noise in decibels; infinite when nothing changed."""
        return sqnr_db([self])


def sqnr_db(costs: Iterable[LayerCost]) -> float:
    """Signal to noise of several layers in decibels, energies summed; infinite when nothing changed."""
    costs = list(costs)
    signal, noise = (math.fsum(getattr(cost, name) for cost in costs) for name in ("signal", "noise"))
    if noise == 0:
        return math.inf
    return 10.0 * math.log10(signal / noise) if signal else -math.inf


@dataclass
class ConversionReport:
    """What a conversion wrote.

    Attributes:
        path: the folder.
        format: of the checkpoint written; ``"mxfp4_rl"`` is our own packed one.
        scheme: of the checkpoint read, one line.
        layers: one entry per quantized layer, and per fused weight of experts.
        notes: what else is different, in sentences.
    """

    path: Path
    format: str
    scheme: str
    layers: list[LayerCost] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def counts(self) -> dict[str, int]:
        """Number of linear maps by action, those that happened; each expert's count."""
        found = {action: sum(c.matrices for c in self.layers if c.action == action) for action in ACTIONS}
        return {action: count for action, count in found.items() if count}

    @property
    def n_layers(self) -> int:
        """Linear maps that are quantized, before or after."""
        return sum(layer.matrices for layer in self.layers)

    @property
    def changed(self) -> Sequence[LayerCost]:
        """Layers whose values are not exactly what they were."""
        return [layer for layer in self.layers if layer.noise]

    @property
    def total_sqnr_db(self) -> float:
        return sqnr_db(self.layers)

    def to_dict(self) -> dict[str, Any]:
        """JSON-clean; `sqnr_db` is null where nothing changed."""
        layers = [
            {
                "name": c.name,
                "matrices": c.matrices,
                "action": c.action,
                "reason": c.reason,
                "sqnr_db": _finite(c.sqnr_db),
            }
            for c in self.layers
        ]
        return {
            "format": self.format,
            "source_scheme": self.scheme,
            "n_layers": self.n_layers,
            "actions": self.counts(),
            "n_changed": len(self.changed),
            "sqnr_db": _finite(self.total_sqnr_db),
            "notes": self.notes,
            "layers": layers,
        }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
