# SPDX-License-Identifier: Apache-2.0
"""What an analysis finds: statistics per tensor and scheme, what was left out, and what could not be read."""

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field

from .layers import location_of, natural_key
from .schemes import bits_text
from .source import Problem
from .statistics import ErrorStatistics


#: What the ranking by error does not say.
SQNR_NOTE = (
    "SQNR does not rank schemes by the perplexity of the model: between schemes of about the same bits let that "
    "decide (hf-mxfp4 eval), or the accuracy on your task (recipes/evaluate.py)."
)


@dataclass(frozen=True)
class TensorResult:
    """Statistics of one tensor, by scheme (its string form)."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    statistics: dict[str, ErrorStatistics]


@dataclass
class Analysis:
    """All that was found about one model. ``schemes`` are string forms; ``skipped`` has tensor names by the reason."""

    model: str
    schemes: tuple[str, ...]
    results: list[TensorResult] = field(default_factory=list)
    skipped: dict[str, list[str]] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    @property
    def in_order(self) -> list[TensorResult]:
        """The results in natural order of their names."""
        return sorted(self.results, key=lambda r: natural_key(r.name))

    def totals(self) -> dict[str, ErrorStatistics]:
        """Return sums over all tensors, by scheme."""
        return {
            scheme: sum((r.statistics[scheme] for r in self.in_order), ErrorStatistics()) for scheme in self.schemes
        }

    def by_layer_type(self, scheme: str) -> dict[str, ErrorStatistics]:
        return _grouped(self.in_order, scheme, lambda r: location_of(r.name)[0])

    def by_depth(self, scheme: str) -> dict[int, ErrorStatistics]:
        """Return sums by index of the layer; tensors outside of numbered layers are left out."""
        placed = [r for r in self.in_order if location_of(r.name)[1] is not None]
        return dict(sorted(_grouped(placed, scheme, lambda r: location_of(r.name)[1]).items()))

    def worst(self, scheme: str, count: int = 20) -> dict[str, ErrorStatistics]:
        """Return the tensors of largest relative error; all-zero ones, which have none, are left out."""
        known = {r.name: r.statistics[scheme] for r in self.in_order if r.statistics[scheme].energy > 0}
        return dict(sorted(known.items(), key=lambda item: -item[1].relative_mse)[:count])


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
