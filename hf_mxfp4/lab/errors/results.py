# SPDX-License-Identifier: Apache-2.0
"""What an analysis finds: statistics per tensor and scheme, what was left out, and what could not be read."""

import re
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .layer_names import TensorLocation, location_of
from .statistics import ErrorStatistics
from .sweep import PrecisionSweep


if TYPE_CHECKING:  # it is made of what is in this room
    from ..perplexity.results import Evaluation


@dataclass(frozen=True)
class TensorResult:
    """Statistics of one tensor, by scheme (its string form). ``kind`` is ``"weight"`` or ``"activation"``."""

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    statistics: dict[str, ErrorStatistics]
    sweep: PrecisionSweep | None = None

    @property
    def location(self) -> TensorLocation:
        return location_of(self.name)


@dataclass(frozen=True)
class Problem:
    """A shard or tensor that could not be analysed, and why."""

    where: str
    reason: str


@dataclass
class Analysis:
    """All that was found about one model.

    ``schemes`` are those asked for (string forms, in order); activations can have others, see [`schemes_of`].
    ``skipped`` lists tensor names by the reason for leaving them out. ``evaluation`` has the perplexity of the schemes,
    where a text was given.
    """

    model: str
    schemes: tuple[str, ...]
    results: list[TensorResult] = field(default_factory=list)
    skipped: dict[str, list[str]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    evaluation: "Evaluation | None" = None

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of tensors that there are results for, weights first."""
        present = {result.kind for result in self.results}
        return tuple(kind for kind in ("weight", "activation") if kind in present)

    def schemes_of(self, kind: str) -> tuple[str, ...]:
        """The schemes that the results of one kind have statistics for."""
        return tuple(next(result.statistics for result in self.results if result.kind == kind))

    def of_kind(self, kind: str) -> list[TensorResult]:
        """The results of one kind in natural order of their names."""
        return sorted((r for r in self.results if r.kind == kind), key=lambda r: natural_key(r.name))

    def total(self, kind: str, scheme: str) -> ErrorStatistics:
        return sum((r.statistics[scheme] for r in self.of_kind(kind)), ErrorStatistics())

    def by_layer_type(self, kind: str, scheme: str) -> dict[str, ErrorStatistics]:
        return _grouped(self.of_kind(kind), scheme, lambda r: r.location.layer_type)

    def by_depth(self, kind: str, scheme: str) -> dict[int, ErrorStatistics]:
        """Return sums by index of the layer; tensors outside of numbered layers are left out."""
        placed = [r for r in self.of_kind(kind) if r.location.depth is not None]
        return dict(sorted(_grouped(placed, scheme, lambda r: r.location.depth).items()))

    def worst(self, kind: str, scheme: str, count: int = 20) -> list[TensorResult]:
        """The tensors of largest relative error; all-zero ones, which have none, are left out."""
        known = [r for r in self.of_kind(kind) if r.statistics[scheme].energy > 0]
        return sorted(known, key=lambda r: -r.statistics[scheme].relative_mse)[:count]

    def sweep(self, kind: str) -> PrecisionSweep:
        return sum((r.sweep for r in self.of_kind(kind) if r.sweep is not None), PrecisionSweep())


def natural_key(name: str) -> list[tuple[int, int | str]]:
    """Return a key that sorts "layers.2" before "layers.10"."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in re.split(r"(\d+)", name) if part]


def _grouped(results: Iterable[TensorResult], scheme: str, key: Callable[[TensorResult], Hashable]) -> dict:
    groups: dict = {}
    for result in results:
        group = key(result)
        groups[group] = groups.get(group, ErrorStatistics()) + result.statistics[scheme]
    return groups
