# SPDX-License-Identifier: Apache-2.0
"""What an analysis finds: statistics per tensor and scheme, what was left out, and what could not be read."""

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field

from .layers import location_of, natural_key
from .schemes import bits_text
from .source import Problem
from .statistics import ErrorStatistics
from .sweep import PrecisionSweep


#: What the ranking by error does not say.
SQNR_NOTE = (
    "SQNR does not rank schemes by the perplexity of the model: between schemes of about the same bits let that "
    "decide (hf-mxfp4 eval), or the accuracy on your task (recipes/evaluate.py)."
)


@dataclass(frozen=True)
class TensorResult:
    """Statistics of one tensor, by scheme (its string form). ``kind`` is ``"weight"`` or ``"activation"``."""

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    statistics: dict[str, ErrorStatistics]
    sweep: PrecisionSweep | None = None


@dataclass
class Analysis:
    """All that was found about one model.

    ``schemes`` are those asked for (string forms, in order); activations can have others, see [`schemes_of`].
    ``skipped`` lists tensor names by the reason for leaving them out.
    """

    model: str
    schemes: tuple[str, ...]
    results: list[TensorResult] = field(default_factory=list)
    skipped: dict[str, list[str]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of tensors that there are results for, weights first."""
        present = {result.kind for result in self.results}
        return tuple(kind for kind in ("weight", "activation") if kind in present)

    def schemes_of(self, kind: str) -> tuple[str, ...]:
        """Return the schemes that the results of one kind have statistics for."""
        return tuple(next(result.statistics for result in self.results if result.kind == kind))

    def of_kind(self, kind: str) -> list[TensorResult]:
        """Return the results of one kind in natural order of their names."""
        return sorted((r for r in self.results if r.kind == kind), key=lambda r: natural_key(r.name))

    def total(self, kind: str, scheme: str) -> ErrorStatistics:
        return sum((r.statistics[scheme] for r in self.of_kind(kind)), ErrorStatistics())

    def totals(self, kind: str) -> dict[str, ErrorStatistics]:
        return {scheme: self.total(kind, scheme) for scheme in self.schemes_of(kind)}

    def by_layer_type(self, kind: str, scheme: str) -> dict[str, ErrorStatistics]:
        return _grouped(self.of_kind(kind), scheme, lambda r: location_of(r.name)[0])

    def by_depth(self, kind: str, scheme: str) -> dict[int, ErrorStatistics]:
        """Return sums by index of the layer; tensors outside of numbered layers are left out."""
        placed = [r for r in self.of_kind(kind) if location_of(r.name)[1] is not None]
        return dict(sorted(_grouped(placed, scheme, lambda r: location_of(r.name)[1]).items()))

    def worst(self, kind: str, scheme: str, count: int = 20) -> dict[str, ErrorStatistics]:
        """Return the tensors of largest relative error; all-zero ones, which have none, are left out."""
        known = {r.name: r.statistics[scheme] for r in self.of_kind(kind) if r.statistics[scheme].energy > 0}
        return dict(sorted(known.items(), key=lambda item: -item[1].relative_mse)[:count])

    def sweep(self, kind: str) -> PrecisionSweep:
        return sum((r.sweep for r in self.of_kind(kind) if r.sweep is not None), PrecisionSweep())


def least_error(by_scheme: Mapping[str, ErrorStatistics]) -> str:
    """Name, in one sentence, the scheme of least error for each number of bits; empty where there is no error."""
    groups: dict[str, list[tuple[str, ErrorStatistics]]] = {}
    for scheme, statistics in by_scheme.items():
        if statistics.total > 0:
            groups.setdefault(bits_text(scheme), []).append((scheme, statistics))
    parts = []
    for bits, members in sorted(groups.items(), key=lambda item: float(item[0])):
        (best, statistics), *others = sorted(members, key=lambda item: -item[1].sqnr_db)
        next_best = f", next is {others[0][0]} with {others[0][1].sqnr_db:.2f}" if others else ""
        parts.append(f"at {bits} bits an element {best} (SQNR {statistics.sqnr_db:.2f} dB{next_best})")
    return f"Verdict, least error: {'; '.join(parts)}." if parts else ""


def _grouped(results: Iterable[TensorResult], scheme: str, key: Callable[[TensorResult], Hashable]) -> dict:
    groups: dict = {}
    for result in results:
        group = key(result)
        groups[group] = groups.get(group, ErrorStatistics()) + result.statistics[scheme]
    return groups
