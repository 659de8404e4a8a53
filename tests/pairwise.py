# SPDX-License-Identifier: Apache-2.0
"""Thins products of options: few cases in which every two values of different options still meet.

Most faults of combined options need no more than two of them (Kuhn, Wallace and Gallo, "Software fault interactions
and implications for software testing", IEEE Transactions on Software Engineering 30(6), 2004).
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest


#: Places of values, one for each option.
Places = tuple[int, ...]


def pairwise(*options: Sequence, allowed: Callable[..., bool] | None = None) -> list[tuple]:
    """Cases, in the order of the product, with every pair of values that an allowed case has; always the same.

    ``options``: the values of each option. ``allowed``: whether a case, given as arguments, exists.
    """
    return [_values(options, places) for places in _covering(_existing(options, allowed))]


def pairwise_params(*options: Sequence, allowed: Callable[..., bool] | None = None) -> list[Any]:
    """Parameters of a test: the pairwise cases in every run, the rest of the product in the long one."""
    existing = _existing(options, allowed)
    few = set(_covering(existing))
    return [pytest.param(*_values(options, p), marks=() if p in few else pytest.mark.large) for p in existing]


def _existing(options: Sequence[Sequence], allowed: Callable[..., bool] | None) -> list[Places]:
    product = itertools.product(*(range(len(values)) for values in options))
    return [places for places in product if allowed is None or allowed(*_values(options, places))]


def _values(options: Sequence[Sequence], places: Places) -> tuple:
    return tuple(values[place] for values, place in zip(options, places, strict=True))


def _covering(cases: list[Places]) -> list[Places]:
    """Greedily, each time the case with most of the pairs that are missing; the first of equals."""
    bits: dict[tuple, int] = {}
    masks = []
    for places in cases:
        size = min(2, len(places))  # a single option has no pairs
        met = itertools.combinations(enumerate(places), size)
        masks.append(sum(1 << bits.setdefault(pair, len(bits)) for pair in met))
    missing, chosen = (1 << len(bits)) - 1, []
    while missing:
        best = max(range(len(cases)), key=lambda number: (masks[number] & missing).bit_count())
        chosen.append(best)
        missing &= ~masks[best]
    return [cases[number] for number in sorted(chosen)]
