# SPDX-License-Identifier: Apache-2.0
"""Tasks whose problems are generated: nothing to download, and small models learn them on a CPU."""

import random
from collections.abc import Iterator, Sequence
from typing import Any

from hf_mxfp4.rl.rewards import (
    exact_match_reward,
    gsm8k_strict_reward,
    is_exact_match,
    is_flexible_correct,
    is_strict_correct,
    rewards_of,
)

from .base import Subsets, Task


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


def is_first_line_correct(completion: str, answer: str) -> bool:
    """Return whether the first line of `completion` is `answer`: models that continue text go on with another sum."""
    return is_exact_match(completion.split("\n", 1)[0], answer)


def first_line_reward(completions: Sequence[Any], answer: Sequence[str], **kwargs: Any) -> list[float]:
    """Return 1.0 where [`is_first_line_correct`], else 0.0."""
    return rewards_of(is_first_line_correct, completions, answer)


def few_shot(subsets: Subsets) -> Task:
    """Prompts ``"12-5=7\\n8+9=17\\n14+9="``: sums and differences of numbers from 1 to 20, none negative, after two
    solved ones, which a small language model half knows. A third is held out as the test."""
    numbers = range(1, 21)
    problems = [(f"{a}+{b}=", a + b) for a in numbers for b in numbers]
    problems += [(f"{a}-{b}=", a - b) for a in numbers for b in range(1, a + 1)]
    random.Random(subsets.seed).shuffle(problems)
    problems = [(SHOTS + question, f"{gold}\n", str(gold)) for question, gold in problems]
    return Task(
        "few_shot",
        **subsets.split("few_shot", problems, len(problems) // 3),
        reward_funcs=[first_line_reward],
        scores={"first_line": is_first_line_correct},
        max_completion_length=3,  # two digits and the end of the line
    )


# ---- word_problems --------------------------------------------------------------------------------------------------

NAMES = ("Ann", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gita", "Hugo", "Ines", "Jon")
ITEMS = ("apples", "books", "coins", "stamps", "shells", "cards", "pens", "beads")
_ADD = ("buys {n} more", "finds {n} more", "gets {n} from {other}")
_SUBTRACT = ("gives {n} to {other}", "loses {n}", "sells {n}")
_MULTIPLY = {2: "doubles the number", 3: "triples the number"}
_QUESTION = "How many {item} does {name} have?"
#: Every number of a problem, in between too, is from 0 to this.
LARGEST = 199


def word_problems(subsets: Subsets, *, problem_count: int = 40_000, problem_steps: Sequence[int] = (2, 4)) -> Task:
    """GSM8K in the small, for models of a few million parameters: prompts such as ``"Ann has 23 apples. Ann buys 14
    more. Ann loses 9. How many apples does Ann have?"``, with the completion ``" 23+14=37 37-9=28 #### 28"``.

    `problem_count` different problems of `problem_steps` steps (from, to); one in ten is held out as the test.

    Raises:
        ValueError: fewer than 10 problems, or a range of steps that is empty.
    """
    steps = tuple(problem_steps) if isinstance(problem_steps, Sequence) else ()
    if len(steps) != 2 or not all(isinstance(n, int) for n in steps) or not 1 <= steps[0] <= steps[1]:
        raise ValueError(
            f"problem_steps={problem_steps!r} must be the fewest, at least 1, and the most, such as [2, 4]"
        )
    if not isinstance(problem_count, int) or problem_count < 10:
        raise ValueError(f"problem_count={problem_count!r} must be at least 10, so that both splits have problems")
    draw = random.Random(subsets.seed)
    problems: dict[str, tuple[str, str, str]] = {}
    while len(problems) < problem_count:
        problem = _word_problem(draw, draw.randint(*steps))
        problems.setdefault(problem[0], problem)
    return Task(
        "word_problems",
        **subsets.split("word_problems", list(problems.values()), problem_count // 10),
        reward_funcs=[gsm8k_strict_reward],
        scores={"strict": is_strict_correct, "flexible": is_flexible_correct},
        max_completion_length=13 * steps[1] + 16,
    )


def vocabulary() -> Iterator[str]:
    """Yield texts with every word, digit and sign of every word problem and its solution."""
    yield "0123456789 +-*=#"
    for name in NAMES:
        yield f"{name} {name}"  # as the first word of a problem, and after a space
    for item in ITEMS:
        yield f" {item}."
    for sentence in (*_ADD, *_SUBTRACT, *_MULTIPLY.values()):
        yield f" has {sentence}.".format(n=0, other=NAMES[0])
    yield " " + _QUESTION.format(item=ITEMS[0], name=NAMES[0])


def _word_problem(draw: random.Random, n_steps: int) -> tuple[str, str, str]:
    name, other = draw.sample(NAMES, 2)
    item = draw.choice(ITEMS)
    value = draw.randint(2, 99)
    sentences = [f"{name} has {value} {item}."]
    solution = []
    for _ in range(n_steps):
        sentence, text, value = _step(draw, value, other)
        sentences.append(f"{name} {sentence}.")
        solution.append(text)
    sentences.append(_QUESTION.format(item=item, name=name))
    completion = "".join(f" {text}" for text in [*solution, f"#### {value}"])
    return " ".join(sentences), completion, str(value)


def _step(draw: random.Random, value: int, other: str) -> tuple[str, str, int]:
    """One step from `value` on: its sentence, its calculation, and the new value."""
    kinds = [kind for kind, possible in (("+", value < LARGEST), ("-", value > 0), ("*", 0 < value)) if possible]
    kind = draw.choice(kinds)
    factors = [factor for factor in _MULTIPLY if value * factor <= LARGEST]
    if kind == "*" and factors:
        n = draw.choice(factors)
        return _MULTIPLY[n], f"{value}*{n}={value * n}", value * n
    if kind == "-" or value == LARGEST:
        n = draw.randint(1, min(value, 99))
        return draw.choice(_SUBTRACT).format(n=n, other=other), f"{value}-{n}={value - n}", value - n
    n = draw.randint(1, min(LARGEST - value, 99))
    return draw.choice(_ADD).format(n=n, other=other), f"{value}+{n}={value + n}", value + n
