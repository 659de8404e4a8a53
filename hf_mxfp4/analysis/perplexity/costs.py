# SPDX-License-Identifier: Apache-2.0
"""What quantizing each part of a model costs: by how much the divergence from full precision falls with that part left
in full precision, and the bits that this takes."""

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ...module_names import name_matches
from ..errors.layer_names import location_of
from .results import Mean
from .scoring import Score
from .trials import Trials


#: What a part is: a linear layer or a module of experts, all of one type (``mlp.down_proj``), or a decoder layer.
UNITS = ("module", "type", "layer")
_DECODER_LAYER = re.compile(r"(.*?\.\d+)\..*")


@dataclass(frozen=True)
class Part:
    """Layers of a model that are left in full precision together.

    Attributes:
        name: what they have in common.
        layers: their names.
        patterns: what matches them and no others, as `modules_to_not_convert` takes it.
    """

    name: str
    layers: tuple[str, ...]
    patterns: tuple[str, ...]


@dataclass(frozen=True)
class PartCost:
    """What a part costs.

    Attributes:
        part: what is left in full precision.
        kl: the divergence from full precision with it, nats per token.
        gain: by how much that is less than without, paired by text.
        bits: what the average operand takes more.
    """

    part: Part
    kl: Mean
    gain: Mean
    bits: float

    @property
    def sure_gain(self) -> float:
        """The gain less its standard error, by which parts are ranked: what is nearly noise comes last."""
        return self.gain.value - (self.gain.error or 0.0)

    @property
    def gain_per_bit(self) -> float:
        return self.gain.value / self.bits

    def to_dict(self) -> dict[str, Any]:
        return {
            "part": self.part.name,
            "layers": len(self.part.layers),
            "kl": self.kl.to_dict(),
            "gain": self.gain.to_dict(),
            "bits": self.bits,
            "gain_per_bit": self.gain_per_bit,
        }


def parts_of(names: Iterable[str], unit: str) -> list[Part]:
    """The layers called ``names`` in parts, in their order.

    Args:
        unit: one of [`UNITS`]. A layer of no decoder layer is a part of its own.

    Raises `ValueError` for another unit.
    """
    if unit not in UNITS:
        raise ValueError(f"unit={unit!r} is not known; choose one of {', '.join(UNITS)}")
    names, parts = list(names), {}
    for name in names:
        layer = _DECODER_LAYER.fullmatch(name)
        by_unit = {"module": name, "type": location_of(name).layer_type, "layer": layer[1] if layer else name}
        parts.setdefault(by_unit[unit], []).append(name)
    return [Part(name, tuple(layers), _patterns(name, layers, names)) for name, layers in parts.items()]


def _patterns(name: str, layers: Sequence[str], names: Sequence[str]) -> tuple[str, ...]:
    """``name`` where it matches these ``layers`` of all ``names``, and else theirs."""
    return (name,) if [other for other in names if name_matches(other, name)] == layers else tuple(layers)


def part_cost(trials: Trials, part: Part, full: Collection[str] = ()) -> PartCost:
    """The cost of a part where the layers ``full`` are in full precision already."""
    after = {*full, *part.layers}
    before, scores = trials.scores(full), trials.scores(after)
    gains = [old.kl - new.kl for old, new in zip(before, scores, strict=True)]
    return PartCost(part, mean_kl(scores), Mean.of(gains, scores), trials.bits(after) - trials.bits(full))


def part_costs(
    trials: Trials, parts: Sequence[Part], on_part: Callable[[PartCost], None] = lambda cost: None
) -> list[PartCost]:
    """The cost of every part, one pass over the texts each, the dearest first. ``on_part`` is told of each."""
    costs = []
    for part in parts:
        costs.append(part_cost(trials, part))
        on_part(costs[-1])
    return sorted(costs, key=lambda cost: cost.gain.value, reverse=True)


def mean_kl(scores: Sequence[Score]) -> Mean:
    """Divergence from full precision in nats per token."""
    return Mean.of([own.kl for own in scores], scores)
