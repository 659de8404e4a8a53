# SPDX-License-Identifier: Apache-2.0
"""What a run logged about how far its steps moved quantized weights, over how far they moved the masters; see
[`hf_mxfp4.rl.StepMovementCallback`]."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ...files import is_number
from .log import RunRecord


@dataclass(frozen=True)
class LoggedMovement:
    """One measurement: ``total`` within ``interval`` (two standard errors) of all weights, and ``kinds``, the ratios of
    layer types."""

    step: int
    total: float
    interval: float
    kinds: dict[str, float]

    def __str__(self) -> str:
        return f"{self.total:.3g} ± {self.interval:.2g} (step {self.step})"

    @property
    def worst(self) -> str:
        """The layer type with the highest ratio, and the ratio; empty when none was logged."""
        if not self.kinds:
            return ""
        kind = max(self.kinds, key=self.kinds.__getitem__)
        return f"{kind}, {self.kinds[kind]:.3g}"


def logged_movements(record: RunRecord) -> list[LoggedMovement]:
    """All measurements of a run, in order."""
    return [_read(entry) for entry in record.logs if is_number(entry.get("movement/total"))]


def movement_kinds(logged: Iterable[str]) -> list[str]:
    """The layer types among logged names: ``"q_proj"`` of ``"movement/q_proj"``."""
    kinds = {key.removeprefix("movement/") for key in logged if key.startswith("movement/")}
    return sorted(kinds - {"total", "flipped_share"})


def _read(entry: dict[str, Any]) -> LoggedMovement:
    error = entry.get("movement_se/total")
    kinds = {kind: entry[f"movement/{kind}"] for kind in movement_kinds(entry) if is_number(entry[f"movement/{kind}"])}
    return LoggedMovement(entry["step"], entry["movement/total"], 2 * error if is_number(error) else 0.0, kinds)
