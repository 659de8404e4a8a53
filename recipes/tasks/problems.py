# SPDX-License-Identifier: Apache-2.0
"""Tasks: problems read from JSON lines or Hub datasets (GSM8K, MATH-500, and your own), and generated ones, which small
models learn on a CPU."""

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets

from hf_mxfp4.lab.evaluation.texts import json_lines
from hf_mxfp4.recipes.common.reporting import tell
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

from .base import COLUMNS, SCORE_FORM, Subsets, Task, check_score, choose_rows, load_function, reward_of


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


#: A row of a dataset, with where it is from, for error messages.
Rows = list[tuple[str, dict[str, Any]]]
#: Of a dataset without a test split, this share of the rows is held out, and no more than this number.
_HELD_OUT_SHARE = 5
_HELD_OUT_ROWS = 500


@dataclass(frozen=True, kw_only=True)
class Source(Subsets):
    """Where the problems of a task come from, and the format string with the field ``{question}`` that makes prompts of
    them.

    Attributes:
        dataset: JSON lines, or a folder or a dataset on the Hub, as ``name`` or ``name:config``.
        eval_dataset: another one to evaluate on. Without it, that is the test split of ``dataset``, or else its
            validation split, or else rows that are held out of it by the seed.
        prompt_template: in place of the task's.
        test_only: read no train split, unless the test rows come from it.
    """

    dataset: str | None = None
    eval_dataset: str | None = None
    prompt_template: str | None = None
    test_only: bool = False

    def read(
        self,
        name: str,
        splits: dict[str, Rows],
        columns: Sequence[str],
        read_row: Callable[[dict[str, Any]], tuple[str, str, str]],
        templates: tuple[str, str],
        *,
        keep_others: bool = False,
        **task: Any,
    ) -> Task:
        """Make a task of the rows that [`Source.rows`] gave.

        Args:
            columns: that are read; all hold text.
            read_row: the question, the reference completion and the answer of a row; what it raises is blamed on the
                row.
            templates: of plain and of conversational prompts.
            keep_others: keep the other columns of the first row, which rewards then get.
            task: the other attributes of [`Task`].
        """
        template = self.prompt_template or templates[self.conversational]
        _check_template(template)
        read: dict[str, Any] = {"train": None}
        for split, rows in splits.items():
            _check_columns(rows, columns)
            wanted = self.n_test if split == "test" else self.n_train
            chosen = choose_rows(len(rows), wanted, what=f"{name}: the {split} split", seed=self.seed)
            problems = []
            for index in chosen:
                where, row = rows[index]
                try:
                    question, completion, answer = read_row(row)
                except (TypeError, ValueError) as error:
                    raise ValueError(f"{where}: {error}") from error
                problems.append((template.format(question=question), completion, answer))
            dataset = self.as_dataset(problems)
            if keep_others:
                _, first = rows[chosen[0]]
                for column in first:
                    if column not in (*columns, *COLUMNS):
                        dataset = dataset.add_column(column, [rows[index][1].get(column) for index in chosen])
            read[split] = dataset
        return Task(name, **read, **task)

    def rows(self, name: str) -> dict[str, Rows]:
        """Read the rows of the test split, and unless ``test_only`` is set those of the train split, for the task
        ``name``. Raises `ValueError`, `FileNotFoundError` and `RuntimeError` where there are none."""
        if self.dataset is None and not (self.test_only and self.eval_dataset):
            raise ValueError(f"the task {name!r} needs a dataset: JSON lines, a folder, or a dataset on the Hub")
        splits: dict[str, Rows] = {}
        if not (self.test_only and self.eval_dataset):
            splits = _read(self.dataset)
        train = splits.get("train")
        if self.eval_dataset is not None:
            evaluated = _read(self.eval_dataset)
            test = evaluated.get("test") or evaluated.get("validation") or evaluated["train"]
        else:
            test = splits.get("test") or splits.get("validation")
        if test is None:
            train, test = self._hold_out(train)
        if self.test_only:
            return {"test": test}
        if train is None:
            raise ValueError(f"{self.dataset} has no train split; it can only be evaluated on, as eval_dataset")
        return {"train": train, "test": test}

    def _hold_out(self, rows: Rows) -> tuple[Rows, Rows]:
        """Split rows into those that are trained on and those that are held out."""
        n_held_out = min(len(rows) // _HELD_OUT_SHARE, _HELD_OUT_ROWS)
        if n_held_out == 0:
            raise ValueError(f"{self.dataset} has {len(rows)} rows, too few to hold some out; name an eval_dataset")
        held_out = choose_rows(len(rows), n_held_out, what=str(self.dataset), seed=self.seed)
        tell("held out", f"{n_held_out} of the {len(rows)} rows of {self.dataset}, to evaluate on")
        kept = sorted({*range(len(rows))} - {*held_out})
        return [rows[index] for index in kept], [rows[index] for index in held_out]


def _check_columns(rows: Rows, columns: Sequence[str]) -> None:
    """Raise `ValueError` for a row without text in one of these columns."""
    for where, row in rows:
        for key in columns:
            if not isinstance(row, dict) or not isinstance(row.get(key), str):
                found = ", ".join(map(repr, row)) if isinstance(row, dict) else "no object"
                raise ValueError(
                    f"{where}: {key!r} must be there and hold a string (found: {found or 'nothing'}); other "
                    "columns are named with --task file, --prompt_column and --answer_column"
                )


def _read(source: str | Path) -> dict[str, Rows]:
    """Read JSON lines, as a train split, or the splits of a folder or of a dataset on the Hub."""
    if Path(source).is_file() or Path(source).suffix in (".json", ".jsonl"):
        return {"train": _read_lines(Path(source))}
    name, _, config = str(source).partition(":")
    try:
        found = datasets.load_dataset(name, config or None)
    except Exception as error:  # offline, unknown, gated, a broken cache
        raise RuntimeError(
            f"could not load the dataset {source}: {type(error).__name__}: {error}\nWithout access to the Hub, name "
            "JSON lines as dataset and eval_dataset."
        ) from error
    return {
        split: [(f"{source}, {split} row {index}", row) for index, row in enumerate(rows)]
        for split, rows in found.items()
    }


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
        source.rows("gsm8k"),
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
        source.rows("math500"),
        ("problem", "solution", "answer"),
        read_row,
        ("Problem: {question}\n" + _MATH + "\nSolution:", "{question}\n\n" + _MATH),
        reward_funcs=[math_reward],
        scores=_MATHEMATICS,
        max_completion_length=2048,
    )


#: Usual names of the column of prompts, the first of which is taken that is there.
_PROMPTS = ("prompt", "question", "problem")


def own_problems(
    source: Source, *, prompt_column: str | None = None, answer_column: str = "answer", score: str = "exact_match"
) -> Task:
    """Problems of your own; the prompt column alone is the prompt by default.

    ``score`` is one of `SCORES`, or ``FILE.py:function``. Raises `ValueError` for an unknown score, or an answer that
    the score cannot read.
    """
    own = None
    if ".py:" in score:
        own = load_function(score, "score", SCORE_FORM)
        check = str
        scores = {own.__name__: own}
        reward = reward_of(own)
    elif score in SCORES:
        check, scores, reward = SCORES[score]
    else:
        raise ValueError(f"unknown score {score!r}: the scores are {', '.join(SCORES)} and FILE.py:function")

    splits = source.rows("file")
    if prompt_column is None:
        _, first = splits["test"][0]
        found = [name for name in _PROMPTS if isinstance(first, dict) and name in first]
        prompt_column = _PROMPTS[0]
        if found:
            prompt_column = found[0]

    def read_row(row: dict[str, Any]) -> tuple[str, str, str]:
        check(row[answer_column])
        return row[prompt_column], row[answer_column], row[answer_column]

    task = source.read(
        "file",
        splits,
        (prompt_column, answer_column),
        read_row,
        ("{question}", "{question}"),
        keep_others=True,
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
    groups = [[(f"{a}+{b}=", str(a + b), str(a + b))] for a in range(_LIMIT) for b in range(_LIMIT)]
    return Task(
        "arithmetic",
        **subsets.split("arithmetic", groups, len(groups) // 5),
        reward_funcs=[exact_match_reward],
        scores={"exact_match": is_exact_match},
        max_completion_length=4,  # two digits, the end, and one to get wrong
    )


SHOTS = "12-5=7\n8+9=17\n"
_LARGEST = 25
_HELD_OUT = 600


def is_first_line_correct(completion: str, answer: str) -> bool:
    """Return whether the first line of `completion` is `answer`: models that continue text go on with another sum."""
    return is_exact_match(completion.split("\n", 1)[0], answer)


def few_shot(subsets: Subsets) -> Task:
    r"""Prompts ``"12-5=7\n8+9=17\n14+9="``: sums and differences of numbers from 1 to 25, none negative, after two
    solved ones, which a small language model half knows. Of 950, 600 are held out as the test: enough to tell two
    points of accuracy apart within a seed. No sum of the test has its twin, ``9+14``, in training."""

    def problem(a: int, sign: str, b: int) -> tuple[str, str, str]:
        gold = a + b if sign == "+" else a - b
        return f"{SHOTS}{a}{sign}{b}=", f"{gold}\n", str(gold)

    numbers = range(1, _LARGEST + 1)
    groups = [[problem(a, "+", a)] for a in numbers]
    groups += [[problem(a, "+", b), problem(b, "+", a)] for a in numbers for b in range(1, a)]
    groups += [[problem(a, "-", b)] for a in numbers for b in range(1, a + 1)]
    return Task(
        "few_shot",
        **subsets.split("few_shot", groups, _HELD_OUT),
        reward_funcs=[reward_of(is_first_line_correct)],
        scores={"first_line": is_first_line_correct},
        max_completion_length=3,  # two digits and the end of the line
    )


#: The sum that is solved before each problem of `few_shot_steps`.
STEPS_SHOT = (7, 2, 6, 4)
_LARGEST_TERM = 9
_STEPS_HELD_OUT = 300


def is_last_word_correct(completion: str, answer: str) -> bool:
    """Return whether the first line of `completion` ends with the last word of `answer`: the sum and the full stop,
    which tells it from a line that was cut off."""
    line = completion.split("\n", 1)[0]
    return line.split()[-1:] == answer.split()[-1:]


def right_steps(completion: str, answer: str) -> float:
    """Return the share of the steps of `answer` that `completion` has before its first other step."""
    steps = answer.split(". ")
    given = completion.split("\n", 1)[0].split(". ")
    right = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(given, steps, strict=False))
    return len(list(right)) / len(steps)


def few_shot_steps(subsets: Subsets) -> Task:
    r"""Ask for sums of four numbers from 1 to 9, step by step, so that a wrong token spoils those after it.

    Prompts are ``"Start with 3, add 5, add 2, add 4.\n"`` after a solved sum. Completions are one line, of about
    30 tokens: ``"3 plus 5 is 8. 8 plus 2 is 10. 10 plus 4 is 14."`` The reward is the share of right steps. The score
    `last_word` asks for the sum, `all_steps` for the whole line. Of 6,560 sums at most 300 are held out as the test.
    The same numbers in another order are never in the other split.
    """

    def problem(terms: tuple[int, ...]) -> tuple[str, str, str]:
        question = ", add ".join(map(str, terms))
        steps = []
        total = terms[0]
        for term in terms[1:]:
            steps.append(f"{total} plus {term} is {total + term}.")
            total += term
        line = " ".join(steps)
        return f"Start with {question}.\n", f"{line}\n", line

    question, solution, _ = problem(STEPS_SHOT)
    shot = question + solution
    groups: dict[tuple[int, ...], list[tuple[str, str, str]]] = {}
    for terms in itertools.product(range(1, _LARGEST_TERM + 1), repeat=len(STEPS_SHOT)):
        if terms != STEPS_SHOT:
            question, solution, line = problem(terms)
            groups.setdefault(tuple(sorted(terms)), []).append((shot + question, solution, line))
    return Task(
        "few_shot_steps",
        **subsets.split("few_shot_steps", list(groups.values()), _STEPS_HELD_OUT),
        reward_funcs=[reward_of(right_steps)],
        scores={"last_word": is_last_word_correct, "all_steps": is_first_line_correct},
        max_completion_length=48,
        is_one_line=True,
    )
