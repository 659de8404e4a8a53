# SPDX-License-Identifier: Apache-2.0
"""Generated word problems of several steps of arithmetic, solved step by step: GSM8K in the small.

A model of a few million parameters learns them from scratch, so the loss that quantization brings, and what RL gives
back of it, can be measured without a download and without a large model.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from hf_mxfp4.rl.rewards.numbers import gsm8k_strict_reward, is_flexible_correct, is_strict_correct

from .base import Task, as_prompt, choose_rows, make_dataset


NAMES = ("Ann", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gita", "Hugo", "Ines", "Jon")
ITEMS = ("apples", "books", "coins", "stamps", "shells", "cards", "pens", "beads")
_ADD = ("buys {n} more", "finds {n} more", "gets {n} from {other}")
_SUBTRACT = ("gives {n} to {other}", "loses {n}", "sells {n}")
_MULTIPLY = {2: "doubles the number", 3: "triples the number"}
_QUESTION = "How many {item} does {name} have?"
#: Every number of a problem, in between too, is from 0 to this.
LARGEST = 199


def load(
    *,
    seed: int = 0,
    n_train: int | None = None,
    n_test: int | None = None,
    conversational: bool = False,
    size: int = 40_000,
    steps: tuple[int, int] = (2, 4),
) -> Task:
    """Prompts such as ``"Ann has 23 apples. Ann buys 14 more. Ann loses 9. How many apples does Ann have?"``, with the
    completion ``" 23+14=37 37-9=28 #### 28"``.

    `size` different problems of `steps` steps (from, to) drawn by `seed`; one in ten is held out as the test. `n_train`
    and `n_test` draw a subset. The same `seed` must be used for training and evaluation.

    Raises:
        ValueError: no problem, or a range of steps that is empty, or a subset that is empty or larger than its split.
    """
    if len(steps) != 2 or not 1 <= steps[0] <= steps[1]:
        raise ValueError(f"steps must be the fewest, at least 1, and the most, got {steps}")
    first, last = steps
    if size < 10:
        raise ValueError(f"size must be at least 10 so that both splits have problems, got {size}")
    draw = random.Random(seed)
    rows: dict[str, dict] = {}
    while len(rows) < size:
        row = _problem(draw, draw.randint(first, last), conversational)
        rows.setdefault(str(row["prompt"]), row)
    problems = list(rows.values())
    n_held_out = size // 10
    splits = {}
    for split, part, wanted in (("test", problems[:n_held_out], n_test), ("train", problems[n_held_out:], n_train)):
        chosen = choose_rows(len(part), wanted, what=f"word_problems: the {split} split", seed=seed)
        splits[split] = make_dataset([part[index] for index in chosen])
    return Task(
        name="word_problems",
        train=splits["train"],
        test=splits["test"],
        reward_funcs=[gsm8k_strict_reward],
        scores={"strict": is_strict_correct, "flexible": is_flexible_correct},
        max_completion_length=13 * last + 16,
    )


def vocabulary() -> Iterator[str]:
    """Texts with every word, digit and sign of every problem and its solution, the same for all seeds and sizes."""
    yield "0123456789 +-*=#"
    for name in NAMES:
        yield f"{name} {name}"  # as the first word of a problem, and after a space
    for item in ITEMS:
        yield f" {item}."
    for sentence in (*_ADD, *_SUBTRACT, *_MULTIPLY.values()):
        yield f" has {sentence}.".format(n=0, other=NAMES[0])
    yield " " + _QUESTION.format(item=ITEMS[0], name=NAMES[0])


def _problem(draw: random.Random, n_steps: int, conversational: bool) -> dict:
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
    return {
        "prompt": as_prompt(" ".join(sentences), conversational),
        "completion": completion,
        "answer": str(value),
    }


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
