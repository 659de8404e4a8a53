# SPDX-License-Identifier: Apache-2.0
"""Two checkpoints side by side: how far their weights are apart, and the quantization error of each."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from ...checkpoint import ShardError, StoredTensor
from ...files import json_clean
from ...numerics import QuantScheme
from ..errors.layer_names import location_of
from ..errors.results import Problem, natural_key
from ..errors.source import Source, SourceError
from ..errors.statistics import ErrorStatistics, error_statistics
from ..errors.weights import OnBytes, Selection, readable_shards, weight_slices
from ..report.columns import number


@dataclass(frozen=True)
class Pair:
    """Statistics of both sides, and of their difference: ``|a|**2`` and ``|a - b|**2``. ``a + b`` merges."""

    first: ErrorStatistics = ErrorStatistics()
    second: ErrorStatistics = ErrorStatistics()
    energy: float = 0.0
    distance: float = 0.0

    def __add__(self, other: "Pair") -> "Pair":
        if not isinstance(other, Pair):
            return NotImplemented
        return Pair(
            self.first + other.first,
            self.second + other.second,
            self.energy + other.energy,
            self.distance + other.distance,
        )

    @property
    def relative_difference(self) -> float:
        """``|a - b| / |a|``; NaN when a is zero."""
        return math.sqrt(self.distance / self.energy) if self.energy else math.nan

    @property
    def mse_ratio(self) -> float:
        """Relative squared error of the second over that of the first; NaN where one is not defined."""
        first = self.first.relative_mse
        return self.second.relative_mse / first if first else math.nan

    @property
    def sqnr_gain_db(self) -> float:
        """Decibels by which the second has the better signal to noise ratio."""
        difference = self.second.sqnr_db - self.first.sqnr_db
        return difference if math.isfinite(difference) else math.nan

    def summary(self) -> dict[str, float]:
        """Return the derived numbers by name."""
        return {
            "first_relative_mse": self.first.relative_mse,
            "second_relative_mse": self.second.relative_mse,
            "mse_ratio": self.mse_ratio,
            "sqnr_gain_db": self.sqnr_gain_db,
            "relative_difference": self.relative_difference,
        }


@dataclass
class Comparison:
    """Pairs by tensor name; ``only_first`` and ``only_second`` are names that one side has alone.

    ``scheme``: the one that two checkpoints are compared under; `None` for two schemes on one checkpoint, whose weights
    do not differ.
    """

    first: str
    second: str
    pairs: dict[str, Any] = field(default_factory=dict)
    only_first: list[str] = field(default_factory=list)
    only_second: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    scheme: str | None = None

    #: What sums of pairs start from.
    zero: ClassVar[Any] = Pair()
    #: Over the table of [`worst`].
    worst_title: ClassVar[str] = "where B is worst against A"

    @property
    def columns(self) -> dict[str, Callable[[Any], str]]:
        """Titles of a table of pairs, and how to fill the cells."""
        columns: dict[str, Callable[[Any], str]] = {
            "A rel. MSE %": lambda pair: number(100 * pair.first.relative_mse, 4),
            "B rel. MSE %": lambda pair: number(100 * pair.second.relative_mse, 4),
            "B / A": lambda pair: number(pair.mse_ratio, 4),
            "SQNR gain dB": lambda pair: number(pair.sqnr_gain_db, 2),
        }
        if self.scheme is not None:
            columns["|A-B| / |A|"] = lambda pair: number(pair.relative_difference, 6)
        return columns

    @property
    def groups_title(self) -> str:
        return "by layer" if self.scheme is None else f"under {self.scheme}, by layer"

    def lines(self) -> list[str]:
        """Return sentences on what is compared."""
        return [f"A: {self.first}", f"B: {self.second}"]

    def total(self) -> Any:
        return sum(self.pairs.values(), self.zero)

    def by_layer_type(self) -> dict[str, Any]:
        groups: dict[str, Any] = {}
        for name in sorted(self.pairs, key=natural_key):
            layer_type = location_of(name).layer_type
            groups[layer_type] = groups.get(layer_type, self.zero) + self.pairs[name]
        return groups

    def numbers(self, pair: Any) -> dict[str, float]:
        """The derived numbers of a pair that mean something in this comparison."""
        found = pair.summary()
        if self.scheme is None:
            found.pop("relative_difference", None)
        return found

    def to_dict(self) -> dict[str, Any]:
        """All of it, JSON-clean; numbers that do not exist are null."""
        return json_clean(
            {
                "first": self.first,
                "second": self.second,
                "scheme": self.scheme,
                "total": self.numbers(self.total()),
                "by_layer_type": {name: self.numbers(pair) for name, pair in self.by_layer_type().items()},
                "worst": self.worst(),
                "tensors": {name: self.numbers(pair) for name, pair in self.pairs.items()},
                "only_first": self.only_first,
                "only_second": self.only_second,
                "problems": [{"where": problem.where, "reason": problem.reason} for problem in self.problems],
            }
        )

    def worst(self, count: int = 20) -> list[str]:
        """Tensors whose error grew most from the first to the second; those without a ratio are left out."""
        known = [name for name in sorted(self.pairs, key=natural_key) if not math.isnan(self.pairs[name].mse_ratio)]
        return sorted(known, key=lambda name: -self.pairs[name].mse_ratio)[:count]


def compare_checkpoints(
    first: Source,
    second: Source,
    scheme: QuantScheme,
    selections: tuple[Selection, Selection],
    on_bytes: OnBytes = lambda count, name: None,
) -> Comparison:
    """Compare the tensors that both checkpoints have under the same name, in slices.

    Raises [`SourceError`] when they have no tensor to quantize in common, or one stores quantized weights.
    """
    result = Comparison(first.name, second.name, scheme=str(scheme))
    mine = _selected(first, selections[0], result.problems)
    theirs = _selected(second, selections[1], result.problems)
    result.only_first = sorted(mine.keys() - theirs.keys(), key=natural_key)
    result.only_second = sorted(theirs.keys() - mine.keys(), key=natural_key)
    common = sorted(mine.keys() & theirs.keys(), key=natural_key)
    if not common and not result.problems:
        raise SourceError(f"{first.name} and {second.name} have no tensor to quantize in common")
    for name in common:
        (a, axis), (b, other_axis) = mine[name], theirs[name]
        if a.shape != b.shape or axis != other_axis:
            result.problems.append(Problem(name, f"shapes differ: {list(a.shape)} and {list(b.shape)}"))
            continue
        try:
            result.pairs[name] = _compare_tensor(a, b, axis, scheme, on_bytes)
        except (ShardError, ValueError) as error:
            result.problems.append(Problem(name, str(error)))
    return result


def compare_schemes(
    model: str, results: Sequence[tuple[str, ErrorStatistics, ErrorStatistics]], schemes: tuple[str, str]
) -> Comparison:
    """The same tensors under two schemes: name, statistics under the first, under the second."""
    pairs = {name: Pair(first, second, first.energy, 0.0) for name, first, second in results}
    return Comparison(f"{model}, {schemes[0]}", f"{model}, {schemes[1]}", pairs)


def _selected(source: Source, selection: Selection, problems: list[Problem]) -> dict[str, tuple[StoredTensor, int]]:
    found = {}
    for _, _, tensors in readable_shards(source, problems):
        for tensor in tensors:
            decision = selection.classify(tensor)
            if decision.stored:
                raise SourceError(
                    f"{source.name} stores quantized weights, such as {decision.stored}; compare full-precision ones"
                )
            if decision.axis is not None:
                found[tensor.name] = (tensor, decision.axis)
    return found


def _compare_tensor(a: StoredTensor, b: StoredTensor, axis: int, scheme: QuantScheme, on_bytes: OnBytes) -> Pair:
    whole = Pair()
    slices = zip(weight_slices(a, axis, [scheme]), weight_slices(b, axis, [scheme]), strict=True)
    for x, y in slices:
        bad = int((~torch.isfinite(x)).sum()) + int((~torch.isfinite(y)).sum())
        if bad:
            raise ValueError(f"{bad} elements of a slice are NaN or infinite")
        wide = x.double()
        energy = float(wide.square().sum(dim=-1).sum())
        distance = float((wide - y.double()).square_().sum(dim=-1).sum())
        whole = whole + Pair(error_statistics(x, scheme), error_statistics(y, scheme), energy, distance)
        on_bytes(x.numel() * x.element_size() + y.numel() * y.element_size(), a.name)
    return whole
