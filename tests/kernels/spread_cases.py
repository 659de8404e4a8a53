# SPDX-License-Identifier: Apache-2.0
"""Some cases out of all combinations of several options, of which any two soon meet in every way."""

from collections import Counter
from collections.abc import Iterator, Sequence


def spread_cases(count: int, *choices: Sequence) -> Iterator[tuple]:
    """``count`` tuples with an element of each of ``choices``. Each takes elements that met those before them in the
    tuple least often, and of equal ones those that were taken least often. A few tuples take every element; about twice
    as many as the two longest of ``choices`` have pairs hold every pair. The same at every call.
    """
    taken, met = Counter(), Counter()
    for _ in range(count):
        case: list[tuple[int, int]] = []
        for place, choice in enumerate(choices):
            options = [(place, number) for number in range(len(choice))]
            case.append(min(options, key=lambda one: (sum(met[other, one] for other in case), taken[one])))
        taken.update(case)
        met.update((one, other) for number, other in enumerate(case) for one in case[:number])
        yield tuple(choices[place][number] for place, number in case)
