# SPDX-License-Identifier: Apache-2.0
"""Tasks whose problems are generated: nothing to download, and small models learn them on a CPU."""

import random

from hf_mxfp4.rl.rewards import (
    exact_match_reward,
    is_exact_match,
)

from .base import Subsets, Task, reward_of


# ---- arithmetic -----------------------------------------------------------------------------------------------------

ALPHABET = "0123456789+="
_LIMIT = 50


def arithmetic(subsets: Subsets) -> Task:
    """Prompts ``"a+b="`` for all pairs 0 <= a, b < 50, shuffled by the seed; one fifth, 500, is held out as the test. A
    model of 0.6M parameters learns it on two CPU cores in minutes."""
    pairs = [(a, b) for a in range(_LIMIT) for b in range(_LIMIT)]
    random.Random(subsets.seed).shuffle(pairs)
    problems = [(f"{a}+{b}=", str(a + b), str(a + b)) for a, b in pairs]
    return Task(
        "arithmetic",
        **subsets.split("arithmetic", problems, len(problems) // 5),
        reward_funcs=[exact_match_reward],
        scores={"exact_match": is_exact_match},
        max_completion_length=4,  # two digits, the end, and one to get wrong
    )


# ---- few_shot -------------------------------------------------------------------------------------------------------

SHOTS = "12-5=7\n8+9=17\n"
_LARGEST, _HELD_OUT = 25, 600


def is_first_line_correct(completion: str, answer: str) -> bool:
    """Return whether the first line of `completion` is `answer`: models that continue text go on with another sum."""
    return is_exact_match(completion.split("\n", 1)[0], answer)


def few_shot(subsets: Subsets) -> Task:
    r"""Prompts ``"12-5=7\n8+9=17\n14+9="``: sums and differences of numbers from 1 to 25, none negative, after two
    solved ones, which a small language model half knows. Of 950, 600 are held out as the test: enough to tell two
    points of accuracy apart within a seed."""
    numbers = range(1, _LARGEST + 1)
    problems = [(f"{a}+{b}=", a + b) for a in numbers for b in numbers]
    problems += [(f"{a}-{b}=", a - b) for a in numbers for b in range(1, a + 1)]
    random.Random(subsets.seed).shuffle(problems)
    problems = [(SHOTS + question, f"{gold}\n", str(gold)) for question, gold in problems]
    return Task(
        "few_shot",
        **subsets.split("few_shot", problems, _HELD_OUT),
        reward_funcs=[reward_of(is_first_line_correct)],
        scores={"first_line": is_first_line_correct},
        max_completion_length=3,  # two digits and the end of the line
    )
