# SPDX-License-Identifier: Apache-2.0
"""Which parts of a model to leave in full precision for a budget of bits, chosen by some texts, measured on others."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...config import MXFP4RLConfig
from .costs import Part, PartCost, mean_kl, part_cost
from .schemes import ModelScheme
from .trials import Trials


#: Of this many texts one is chosen by: choosing takes a pass for every part, measuring one for every scheme.
CHOSEN_BY = 4
#: Texts that are needed: of fewer, those to choose by have no standard error worth the name.
LEAST_TEXTS = 8
#: Parts that are measured again once others are in full precision, since gains do not add up.
_AGAIN = 16
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Suggestion:
    """A scheme, and what to leave in full precision.

    Attributes:
        scheme: what all other layers have.
        parts: in the order in which they were chosen.
        bits: of an operand on average, see [`hf_mxfp4.analysis.perplexity.operands.average_bits`].
        budget: the bits that were allowed.
    """

    scheme: ModelScheme
    parts: tuple[Part, ...]
    bits: float
    budget: float

    @property
    def name(self) -> str:
        return f"{self.scheme.name}, {len(self.parts)} part{'s' * (len(self.parts) > 1)} in full precision"

    @property
    def modules_to_not_convert(self) -> list[str]:
        """What the scheme leaves out already, and the parts, by name."""
        patterns = sorted(pattern for part in self.parts for pattern in part.patterns)
        return [*(self.scheme.config.modules_to_not_convert or ()), *patterns]

    def model_scheme(self) -> ModelScheme:
        """The suggestion as a scheme that can be measured."""
        config = replace(self.scheme.config, modules_to_not_convert=self.modules_to_not_convert)
        return replace(self.scheme, name=self.name, config=config, average=self.bits)

    def options(self) -> dict[str, Any]:
        """The options of [`MXFP4RLConfig`] that say it, without those that go without saying."""
        wanted = replace(self.model_scheme().config, dither_ties=True)
        options = dict(wanted.to_dict())
        for name in list(options):
            fewer = {key: value for key, value in options.items() if key != name}
            if name != "mode" and MXFP4RLConfig.from_dict(fewer) == wanted:
                options = fewer
        return options


def split_texts(batches: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The texts to choose by, the first of every [`CHOSEN_BY`], and those to measure on, all others; each text once.

    Raises `ValueError` for fewer than [`LEAST_TEXTS`], of which copies count once.
    """
    texts = list({tuple(ids[0].tolist()): ids for ids in batches}.values())
    if len(texts) < LEAST_TEXTS:
        raise ValueError(
            f"{len(texts)} texts are too few to choose by some and measure on others: give {LEAST_TEXTS} or more, or "
            "of one long text shorter windows (--max-length)"
        )
    chosen = range(0, len(texts), CHOSEN_BY)
    return [texts[i] for i in chosen], [texts[i] for i in range(len(texts)) if i not in chosen]


def check_budget(trials: Trials, parts: Sequence[Part], budget: float) -> None:
    """Raise `ValueError` for a budget that the scheme alone exceeds, or that has no room for any part."""
    base = trials.bits()
    if budget < base - _ROUNDING:
        raise ValueError(
            f"a budget of {budget:g} bits is below the {base:.4f} that {trials.scheme.name} takes by itself; give a "
            "larger budget, or a scheme of fewer bits"
        )
    least = min(trials.bits(part.layers) for part in parts)
    if budget < least - _ROUNDING:
        raise ValueError(
            f"a budget of {budget:g} bits has no room for any part in full precision: with the smallest one "
            f"{trials.scheme.name} takes {least:.4f}; give that at least, or smaller parts (--by module)"
        )


def suggest(
    trials: Trials,
    costs: Sequence[PartCost],
    budget: float,
    on_round: Callable[[int, float, float], None] = lambda parts, bits, kl: None,
) -> Suggestion:
    """The parts that lower the divergence most for their bits, as far as a budget allows.

    Greedy: parts are ranked by their sure gain per bit and taken until half of what is left of the budget is spent;
    then the best of the others are measured again, in the model that has these in full precision already, until none
    fits or gains more than its standard error. A round that does not lower the divergence is undone and the last.

    Args:
        trials: of the texts to choose by.
        costs: of all parts, see [`hf_mxfp4.analysis.perplexity.costs.part_costs`].
        budget: bits of an operand on average.
        on_round: told how many parts there are, their bits and their divergence, after each round.

    Raises `ValueError` as [`check_budget`] does, and where no part has a gain.
    """
    check_budget(trials, [cost.part for cost in costs], budget)
    chosen: tuple[Part, ...] = ()
    while candidates := _candidates(trials, costs, chosen, budget):
        if chosen:
            again = [part_cost(trials, cost.part, _layers(chosen)) for cost in candidates[:_AGAIN]]
            candidates = _ranked(again)
        taken = _take(trials, candidates, chosen, budget)
        kl = mean_kl(trials.scores(_layers(taken))).value
        if taken == chosen or kl >= mean_kl(trials.scores(_layers(chosen))).value:
            break
        chosen = taken
        on_round(len(chosen), trials.bits(_layers(chosen)), kl)
    if not chosen:
        raise ValueError(
            "no part that fits the budget gains more than the standard error of its gain; give more texts (--samples), "
            "or a larger budget"
        )
    return Suggestion(trials.scheme, chosen, trials.bits(_layers(chosen)), budget)


def _candidates(trials: Trials, costs: Sequence[PartCost], chosen: tuple[Part, ...], budget: float) -> list[PartCost]:
    """What is not chosen yet, fits, and gains something, the best first."""
    layers = _layers(chosen)
    fitting = [
        c for c in costs if c.part not in chosen and trials.bits(layers | {*c.part.layers}) <= budget + _ROUNDING
    ]
    return _ranked(fitting)


def _ranked(costs: Sequence[PartCost]) -> list[PartCost]:
    gaining = [cost for cost in costs if cost.sure_gain > 0]
    return sorted(gaining, key=lambda cost: cost.sure_gain / cost.bits, reverse=True)


def _take(trials: Trials, candidates: Sequence[PartCost], chosen: tuple[Part, ...], budget: float) -> tuple[Part, ...]:
    """``chosen`` and the best candidate, and of the next ones as many as half of what is left of the budget pays."""
    start, taken = trials.bits(_layers(chosen)), chosen
    for candidate in candidates:
        bits = trials.bits(_layers((*taken, candidate.part)))
        if taken == chosen or bits <= start + (budget - start) / 2:
            taken = (*taken, candidate.part)
    return taken


def _layers(parts: Sequence[Part]) -> frozenset[str]:
    return frozenset(name for part in parts for name in part.layers)
