# SPDX-License-Identifier: Apache-2.0
"""Tasks: problems read from JSON lines or Hub datasets (GSM8K, MATH-500, and your own), and generated ones, which small
models learn on a CPU."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets

from hf_mxfp4.lab.texts import json_lines
from hf_mxfp4.rl.math_answers import check_math_answer, is_boxed_correct, is_math_correct
from hf_mxfp4.rl.rewards import (
    exact_match_reward,
    gsm8k_flexible_reward,
    gsm8k_gold,
    gsm8k_strict_reward,
    is_exact_match,
    is_flexible_correct,
    is_strict_correct,
    math_reward,
    normalize_number,
)

from .base import SCORE_FORM, Subsets, Task, check_score, choose_rows, load_function, reward_of


#: Scores of the task ``file``: the answer to the letter, as a number, or as mathematics. Each has a check of gold
#: answers, scores by name, and a reward.
_NUMBERS = {"strict": is_strict_correct, "flexible": is_flexible_correct}
_MATHEMATICS = {"boxed": is_boxed_correct, "flexible": is_math_correct}
SCORES = {
    "exact_match": (str, {"exact_match": is_exact_match}, exact_match_reward),
    "number": (normalize_number, _NUMBERS, gsm8k_flexible_reward),
    "math": (check_math_answer, _MATHEMATICS, math_reward),
}
_GSM8K = 'Reason step by step, and finish with the final answer on a line of its own as "#### <number>".'
_MATH = "Reason step by step, and put the final answer within \\boxed{{}}."


@dataclass(frozen=True, kw_only=True)
class Source(Subsets):
    """Where the problems of a task come from, JSON lines or else a Hub dataset, and the format string with the field
    ``{question}`` that makes prompts of them. With ``test_only`` no train split is read."""

    train_file: str | None = None
    test_file: str | None = None
    dataset_name: str | None = None
    dataset_config: str | None = None
    prompt_template: str | None = None
    test_only: bool = False

    def read(
        self,
        name: str,
        columns: Sequence[str],
        read_row: Callable[[dict[str, Any]], tuple[str, str, str]],
        templates: tuple[str, str],
        **task: Any,
    ) -> Task:
        """Read a task.

        Args:
            columns: that are read; all hold text.
            read_row: the question, the reference completion and the answer of a row; what it raises is blamed on the
                row.
            templates: of plain and of conversational prompts.
            task: the other attributes of [`Task`].
        """
        template = self.prompt_template or templates[self.conversational]
        _check_template(template)
        splits: dict[str, Any] = {"train": None}
        sources = (("train", self.train_file, self.n_train), ("test", self.test_file, self.n_test))
        for split, path, wanted in sources[self.test_only :]:
            source = self._rows(name, split, path, columns)
            rows = []
            for index in choose_rows(len(source), wanted, what=f"{name}: the {split} split", seed=self.seed):
                where, row = source[index]
                try:
                    question, *rest = read_row(row)
                except (TypeError, ValueError) as error:
                    raise ValueError(f"{where}: {error}") from error
                rows.append((template.format(question=question), *rest))
            splits[split] = self.dataset(rows)
        return Task(name, **splits, **task)

    def _rows(self, name: str, split: str, path: str | None, columns: Sequence[str]) -> list[tuple[str, dict]]:
        """Return the rows of a split, each with where it is from."""
        if path is None and self.dataset_name is None:
            raise ValueError(
                f"the task {name!r} needs {split}_file, JSON lines with {' and '.join(map(repr, columns))}, or "
                "dataset_name"
            )
        rows = self._read_hub(split, columns) if path is None else _read_lines(Path(path))
        for where, row in rows:
            for key in columns:
                if not isinstance(row, dict) or not isinstance(row.get(key), str):
                    found = ", ".join(map(repr, row)) if isinstance(row, dict) else "no object"
                    raise ValueError(
                        f"{where}: {key!r} must be there and hold a string (found: {found or 'nothing'}); other "
                        "columns are named with --task file, --prompt_column and --answer_column"
                    )
        return rows

    def _read_hub(self, split: str, columns: Sequence[str]) -> list[tuple[str, dict]]:
        what = f"{self.dataset_name} ({self.dataset_config})" if self.dataset_config else self.dataset_name
        try:
            dataset = datasets.load_dataset(self.dataset_name, self.dataset_config, split=split)
        except Exception as error:  # offline, unknown, gated, a broken cache
            raise RuntimeError(
                f"could not load the {split} split of {what}: {type(error).__name__}: {error}\nWithout access to the "
                f"Hub, pass train_file and test_file: JSON lines with {' and '.join(f'`{name}`' for name in columns)}."
            ) from error
        return [(f"{what}, {split} row {index}", row) for index, row in enumerate(dataset)]


def _read_lines(path: Path) -> list[tuple[str, Any]]:
    """Read JSON lines as (``"path:line"``, value); blank lines are skipped."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    rows = list(json_lines(path))
    if not rows:
        raise ValueError(f"{path} is empty: no JSON lines in it")
    return rows


def _check_template(template: str) -> None:
    try:
        has_question = template.format(question="\0") != template.format(question="")
    except (IndexError, KeyError, ValueError) as error:
        raise ValueError(f"prompt_template {template!r} can have no field but {{question}}: {error!r}") from error
    if not has_question:
        raise ValueError(f"prompt_template must contain {{question}}, got {template!r}")


# ---- tasks that are read ---------------------------------------------------------------------------------------------


def strip_annotations(solution: str) -> str:
    """Return a GSM8K solution without its calculator annotations: ``"48/2=<<48/2=24>>24" -> "48/2=24"``."""
    return re.sub(r"<<[^<>\n]*>>", "", solution)


def gsm8k(source: Source) -> Task:
    """GSM8K (grade-school maths, Cobbe et al., arXiv 2110.14168), or anything in its format: columns ``question`` and
    ``answer``, a solution with ``#### <number>``."""
    return source.read(
        "gsm8k",
        ("question", "answer"),
        lambda row: (row["question"], strip_annotations(row["answer"]), gsm8k_gold(row["answer"])),
        ("Question: {question}\n" + _GSM8K + "\nAnswer:", "{question}\n\n" + _GSM8K),
        reward_funcs=[gsm8k_strict_reward],
        scores=_NUMBERS,
        max_completion_length=512,
    )


def math500(source: Source) -> Task:
    """MATH-500 (Hendrycks et al., arXiv 2103.03874; the 500 problems of Lightman et al., arXiv 2305.20050), or anything
    with its columns ``problem``, ``solution`` and ``answer`` (LaTeX), compared by math-verify. It has no train
    split."""

    def read_row(row: dict[str, Any]) -> tuple[str, str, str]:
        check_math_answer(row["answer"])
        return row["problem"], row["solution"], row["answer"]

    return source.read(
        "math500",
        ("problem", "solution", "answer"),
        read_row,
        ("Problem: {question}\n" + _MATH + "\nSolution:", "{question}\n\n" + _MATH),
        reward_funcs=[math_reward],
        scores=_MATHEMATICS,
        max_completion_length=2048,
    )


def own_problems(
    source: Source, *, prompt_column: str = "prompt", answer_column: str = "answer", score: str = "exact_match"
) -> Task:
    """Problems of your own; the prompt column alone is the prompt by default.

    ``score`` is one of `SCORES`, or ``FILE.py:function``. Raises `ValueError` for an unknown score, or an answer that
    the score cannot read.
    """
    own = load_function(score, "score", SCORE_FORM) if ".py:" in score else None
    if own is None and score not in SCORES:
        raise ValueError(f"unknown score {score!r}: the scores are {', '.join(SCORES)} and FILE.py:function")
    check, scores, reward = SCORES[score] if own is None else (str, {own.__name__: own}, reward_of(own))

    def read_row(row: dict[str, Any]) -> tuple[str, str, str]:
        check(row[answer_column])
        return row[prompt_column], row[answer_column], row[answer_column]

    task = source.read(
        "file",
        (prompt_column, answer_column),
        read_row,
        ("{question}", "{question}"),
        reward_funcs=[reward],
        scores=scores,
        max_completion_length=512,
    )
    if own:
        tried = task.test.select(range(min(2, len(task.test))))
        check_score(own, score, tried["completion"], tried["answer"])
    return task


# ---- generated tasks -------------------------------------------------------------------------------------------------

ALPHABET = "0123456789+="
_LIMIT = 50


def arithmetic(subsets: Subsets) -> Task:
    """Prompts ``"a+b="`` for all pairs 0 <= a, b < 50, shuffled by the seed; one fifth, 500, is held out as the test. A
    model of 0.6M parameters learns it on two CPU cores in minutes."""
    problems = [(f"{a}+{b}=", str(a + b), str(a + b)) for a in range(_LIMIT) for b in range(_LIMIT)]
    return Task(
        "arithmetic",
        **subsets.split("arithmetic", problems, len(problems) // 5),
        reward_funcs=[exact_match_reward],
        scores={"exact_match": is_exact_match},
        max_completion_length=4,  # two digits, the end, and one to get wrong
    )


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
    problems = [(SHOTS + question, f"{gold}\n", str(gold)) for question, gold in problems]
    return Task(
        "few_shot",
        **subsets.split("few_shot", problems, _HELD_OUT),
        reward_funcs=[reward_of(is_first_line_correct)],
        scores={"first_line": is_first_line_correct},
        max_completion_length=3,  # two digits and the end of the line
    )
