# SPDX-License-Identifier: Apache-2.0
"""Where problems come from: JSON lines and Hub datasets, and the templates that make prompts of them."""

from __future__ import annotations

import json
import os
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import datasets

from .base import choose_rows, make_dataset


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


def read_split(
    name: str, config: str | None, split: str, path: str | os.PathLike[str] | None, columns: Sequence[str]
) -> Source:
    """`read_json_lines` of ``path`` or, without one, `read_hub` of a split."""
    return read_hub(name, config, split, columns) if path is None else read_json_lines(path, columns)


def make_splits(
    task: str,
    read: Callable[[str, str | os.PathLike[str] | None], Source],
    make_row: Callable[[dict[str, Any]], dict[str, Any]],
    *,
    files: Mapping[str, str | os.PathLike[str] | None],
    sizes: Mapping[str, int | None],
    seed: int,
) -> dict[str, datasets.Dataset]:
    """A dataset for each split.

    Args:
        task: its name, for error messages.
        read: the rows of a split, from the file given for it.
        make_row: the prompt, the completion and the answer of a row; what it raises is blamed on the row.
        files: the splits that there shall be, with the file of each.
        sizes: how many rows to draw for each split by `seed`, or `None` for all.

    Raises:
        ValueError: what `make_row` raised, or more rows are asked for than there are.
    """
    splits = {}
    for split, path in files.items():
        source = read(split, path)
        what = f"{task}: the {split} split" + (f" ({os.fspath(path)})" if path is not None else "")
        rows = []
        for index in choose_rows(len(source), sizes[split], what=what, seed=seed):
            where, row = source[index]
            try:
                rows.append(make_row(row))
            except (TypeError, ValueError) as error:
                raise ValueError(f"{where}: {error}") from error
        splits[split] = make_dataset(rows)
    return splits


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
