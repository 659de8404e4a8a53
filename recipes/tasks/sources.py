# SPDX-License-Identifier: Apache-2.0
"""Where problems come from: JSON lines and Hub datasets, and the templates that make prompts of them."""

from __future__ import annotations

import json
import os
import string
from collections.abc import Callable, Sequence
from typing import Any

import datasets

from .base import Task, as_prompt, choose_rows, make_dataset


#: Rows with where each is from, for error messages.
Source = list[tuple[str, dict[str, Any]]]


def read_json_lines(path: str | os.PathLike[str], columns: Sequence[str]) -> Source:
    """The rows of a JSON lines file as (``"path:line"``, row); blank lines are skipped.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file has no rows, or a line is not a JSON object in which ``columns`` are strings; the message
            names the file and the line.
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
        for key in columns:
            if key not in row:
                raise ValueError(f"{where}: no key {key!r} (found: {', '.join(map(repr, row)) or 'none'})")
            if not isinstance(row[key], str):
                raise ValueError(f"{where}: {key!r} must be a string, got {type(row[key]).__name__}")
    return rows


def read_hub(name: str, config: str | None, split: str, columns: Sequence[str]) -> Source:
    """The rows of a Hub dataset (or of the local cache), as `read_json_lines` gives them.

    Raises:
        RuntimeError: it cannot be loaded; the original error is chained.
        ValueError: the split is empty, or lacks one of ``columns``.
    """
    what = f"{name} ({config})" if config else name
    try:
        dataset = datasets.load_dataset(name, config, split=split)
    except Exception as error:  # offline, unknown, gated, a broken cache: the same way out for all of them
        raise RuntimeError(
            f"could not load the {split} split of {what}: {type(error).__name__}: {error}\n"
            "Without access to the Hub, pass train_file and test_file: local JSON lines files with the strings "
            f"{' and '.join(f'`{column}`' for column in columns)} on each line."
        ) from error
    missing = [column for column in columns if column not in dataset.column_names]
    if missing:
        raise ValueError(f"the {split} split of {what} has no column {', '.join(missing)}")
    if len(dataset) == 0:
        raise ValueError(f"the {split} split of {what} is empty")
    return [(f"{what}, {split} row {index}", row) for index, row in enumerate(dataset)]


def read_task(
    name: str,
    *,
    columns: Sequence[str],
    read_row: Callable[[dict[str, Any]], tuple[str, str, str]],
    template: str,
    chat_template: str,
    reward: Callable[..., list[float]],
    scores: dict[str, Callable[[str, str], bool]],
    metric: str | None,
    max_completion_length: int,
    dataset: tuple[str, str | None] | None = None,
    train_file: str | os.PathLike[str] | None = None,
    test_file: str | os.PathLike[str] | None = None,
    dataset_name: str | None = None,
    dataset_config: str | None = None,
    seed: int = 0,
    n_train: int | None = None,
    n_test: int | None = None,
    prompt_template: str | None = None,
    conversational: bool = False,
    test_only: bool = False,
) -> Task:
    """A task whose problems are read from JSON lines or a dataset of the Hub. Rows keep the order of their source.

    Args:
        columns: that are read; all hold text.
        read_row: the question, the reference completion and the answer of a row; what it raises is blamed on the row.
        template, chat_template: of prompts, format strings with the field ``{question}``.
        reward, scores, metric, max_completion_length: see [`Task`].
        dataset: on the Hub, with its configuration, for a split that has no file.
        train_file, test_file: JSON lines.
        dataset_name, dataset_config: on the Hub, in place of ``dataset``.
        seed, n_train, n_test: draw so many rows of a split; None: all.
        prompt_template: in place of ``template`` and ``chat_template``.
        conversational: prompts are conversations of one user message, for chat models.
        test_only: read no train split.

    Raises:
        FileNotFoundError, RuntimeError: a source cannot be read.
        ValueError: a source is missing, malformed or empty, more rows are asked for than there are, or the template has
            other fields.
    """
    if prompt_template is not None:
        template = prompt_template
    elif conversational:
        template = chat_template
    check_template(template)
    if dataset_name is None and dataset is not None:
        dataset_name, dataset_config = dataset[0], dataset_config or dataset[1]
    splits = {}
    for split, path, wanted in (("train", train_file, n_train), ("test", test_file, n_test)):
        if test_only and split == "train":
            continue
        if path is None and dataset_name is None:
            raise ValueError(
                f"the task {name!r} needs {split}_file, JSON lines with {' and '.join(map(repr, columns))}, "
                "or dataset_name"
            )
        if path is None:
            source = read_hub(dataset_name, dataset_config, split, columns)
        else:
            source = read_json_lines(path, columns)
        what = f"{name}: the {split} split" + (f" ({os.fspath(path)})" if path is not None else "")
        rows = []
        for index in choose_rows(len(source), wanted, what=what, seed=seed):
            where, row = source[index]
            try:
                question, completion, answer = read_row(row)
                prompt = as_prompt(template.format(question=question), conversational)
            except (TypeError, ValueError) as error:
                raise ValueError(f"{where}: {error}") from error
            rows.append({"prompt": prompt, "completion": completion, "answer": answer})
        splits[split] = make_dataset(rows)
    return Task(
        name=name,
        train=splits.get("train"),
        test=splits["test"],
        reward_funcs=[reward],
        scores=scores,
        max_completion_length=max_completion_length,
        metric=metric,
    )


def check_template(template: str) -> None:
    """Raise `ValueError` unless ``template`` is a format string whose only field is ``{question}``."""
    try:
        fields = [field for _, field, _, _ in string.Formatter().parse(template) if field is not None]
    except ValueError as error:
        raise ValueError(f"prompt_template {template!r} is not a format string: {error}") from error
    if set(fields) != {"question"}:
        raise ValueError(
            f"prompt_template must contain {{question}} and no other field (write {{{{ and }}}} for literal braces), "
            f"got {template!r}"
        )
