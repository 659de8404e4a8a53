# SPDX-License-Identifier: Apache-2.0
"""GSM8K (grade-school maths, Cobbe et al., arXiv 2110.14168), from the Hub or from local JSON lines."""

from __future__ import annotations

import json
import os
import re
import string
from typing import Any

import datasets

from hf_mxfp4.rl.rewards import (
    gsm8k_gold,
    gsm8k_strict_reward,
    is_flexible_correct,
    is_strict_correct,
)

from .base import Task, as_prompt, choose_rows, make_dataset


DATASET_NAME, DATASET_CONFIG = "openai/gsm8k", "main"
_INSTRUCTION = 'Reason step by step, and finish with the final answer on a line of its own as "#### <number>".'
DEFAULT_TEMPLATE = "Question: {question}\n" + _INSTRUCTION + "\nAnswer:"
DEFAULT_CHAT_TEMPLATE = "{question}\n\n" + _INSTRUCTION
_ANNOTATION = re.compile(r"<<[^<>\n]*>>")


def strip_annotations(solution: str) -> str:
    """A reference solution without its calculator annotations: ``"48/2=<<48/2=24>>24" -> "48/2=24"``."""
    return _ANNOTATION.sub("", solution)


def read_json_lines(path: str | os.PathLike[str]) -> list[tuple[str, dict[str, Any]]]:
    """The rows of a JSON lines file as (``"path:line"``, row); blank lines are skipped.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file has no rows, or a line is not a JSON object with the strings ``question`` and ``answer``;
            the message names the file and the line.
    """
    rows = []
    with open(path, "rb") as file:  # bytes: only \n ends a line, and a bad encoding is blamed on its line
        for number, line in enumerate(file, start=1):
            where = f"{os.fspath(path)}:{number}"
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8-sig"))
            except ValueError as error:
                raise ValueError(f"{where}: not a line of JSON ({error})") from error
            if not isinstance(row, dict):
                raise ValueError(f"{where}: expected a JSON object, got {type(row).__name__}")
            rows.append((where, row))
    if not rows:
        raise ValueError(f"{os.fspath(path)} is empty: no JSON lines in it")
    for where, row in rows:
        for key in ("question", "answer"):
            if key not in row:
                raise ValueError(f"{where}: no key {key!r} (found: {', '.join(map(repr, row)) or 'none'})")
            if not isinstance(row[key], str):
                raise ValueError(f"{where}: {key!r} must be a string, got {type(row[key]).__name__}")
    return rows


def read_hub(name: str, config: str | None, split: str) -> list[tuple[str, dict[str, Any]]]:
    """The rows of a Hub dataset (or of the local cache), as `read_json_lines` gives them.

    Raises:
        RuntimeError: it cannot be loaded; the original error is chained.
        ValueError: the split is empty, or lacks the column ``question`` or ``answer``.
    """
    what = f"{name} ({config})" if config else name
    try:
        dataset = datasets.load_dataset(name, config, split=split)
    except Exception as error:  # offline, unknown, gated, a broken cache: the same way out for all of them
        raise RuntimeError(
            f"could not load the {split} split of {what}: {type(error).__name__}: {error}\n"
            "Without access to the Hub, pass train_file and test_file: local JSON lines files with the strings "
            "`question` and `answer` on each line."
        ) from error
    missing = [column for column in ("question", "answer") if column not in dataset.column_names]
    if missing:
        raise ValueError(f"the {split} split of {what} has no column {', '.join(missing)}")
    if len(dataset) == 0:
        raise ValueError(f"the {split} split of {what} is empty")
    return [(f"{what}, {split} row {index}", row) for index, row in enumerate(dataset)]


def _check_template(template: str) -> None:
    try:
        fields = [field for _, field, _, _ in string.Formatter().parse(template) if field is not None]
    except ValueError as error:
        raise ValueError(f"prompt_template {template!r} is not a format string: {error}") from error
    if set(fields) != {"question"}:
        raise ValueError(
            f"prompt_template must contain {{question}} and no other field (write {{{{ and }}}} for literal braces), "
            f"got {template!r}"
        )


def load(
    *,
    train_file: str | os.PathLike[str] | None = None,
    test_file: str | os.PathLike[str] | None = None,
    dataset_name: str | None = None,
    dataset_config: str | None = None,
    seed: int = 0,
    n_train: int | None = None,
    n_test: int | None = None,
    prompt_template: str | None = None,
    conversational: bool = False,
) -> Task:
    """GSM8K, or anything in its format. A split without a file comes from `dataset_name` on the Hub.

    Rows keep the order of their source; `n_train` and `n_test` draw a subset by `seed`.

    Args:
        dataset_name: default ``openai/gsm8k``, whose configuration is ``main``.
        prompt_template: a format string with the field ``{question}``.
        conversational: prompts are conversations of one user message, for chat models.

    Raises:
        FileNotFoundError, RuntimeError: a source cannot be read.
        ValueError: a malformed or empty source, a solution without ``#### <number>``, or a bad `prompt_template`.
    """
    template = prompt_template
    if template is None:
        template = DEFAULT_CHAT_TEMPLATE if conversational else DEFAULT_TEMPLATE
    _check_template(template)
    if dataset_name is None:
        dataset_name, dataset_config = DATASET_NAME, dataset_config or DATASET_CONFIG
    splits = {}
    for split, path, wanted in (("train", train_file, n_train), ("test", test_file, n_test)):
        source = read_hub(dataset_name, dataset_config, split) if path is None else read_json_lines(path)
        what = f"gsm8k: the {split} split" + (f" ({os.fspath(path)})" if path is not None else "")
        rows = []
        for index in choose_rows(len(source), wanted, what=what, seed=seed):
            where, row = source[index]
            try:
                answer = gsm8k_gold(row["answer"])
            except (TypeError, ValueError) as error:
                raise ValueError(f"{where}: {error}") from error
            prompt = as_prompt(template.format(question=row["question"]), conversational)
            rows.append({"prompt": prompt, "completion": strip_annotations(row["answer"]), "answer": answer})
        splits[split] = make_dataset(rows)
    return Task(
        name="gsm8k",
        train=splits["train"],
        test=splits["test"],
        reward_funcs=[gsm8k_strict_reward],
        scores={"strict": is_strict_correct, "flexible": is_flexible_correct},
        max_completion_length=512,
    )
