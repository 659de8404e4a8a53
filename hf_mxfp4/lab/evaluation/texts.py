# SPDX-License-Identifier: Apache-2.0
"""Texts of the user's own, from files or `datasets`, and their tokens."""

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...given import given_column, given_tokens
from ..errors.source import SourceError


#: Fields of a dataset's rows that are taken for the text, in this order, where none is named.
TEXT_FIELDS = ("text", "question,answer", "prompt", "question", "content")
#: Files of one running text.
_RUNNING = (".txt", ".md")
_HUB_DATASET = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+){0,2}")


@dataclass(frozen=True)
class TextOptions:
    """Which texts are run.

    Attributes:
        dataset: a file of JSON lines, a folder that `datasets` saved, or a dataset on the Hub (``name:split`` or
            ``name:config:split``, the split ``test`` where none is named); or a ``.txt`` or ``.md`` file.
        field: name of the text's field, or names with commas between, whose texts are joined by a line break; by
            default the first of [`TEXT_FIELDS`] that the first row has as strings. Rows with ``messages``, or with
            ``prompt`` and ``completion``, have the tokens of supervised training.
        samples: how many texts; of a running text, windows of ``max_length`` tokens.
        max_length: tokens that a text is cut to.
    """

    dataset: str
    field: str | None = None
    samples: int = 100
    max_length: int = 512

    def read(self) -> Sequence[str | dict]:
        """Read the texts, or rows with a conversation or a completion, without a tokenizer: what is wrong with them is
        known before a model is loaded.

        Raises [`SourceError`] for what cannot be read, a missing field, or no text at all.
        """
        if self.is_running_text:
            text = self._file_text()
            if not text.strip():
                raise SourceError(f"{self.dataset} has no text")
            return [text]
        rows = list(itertools.islice(self._rows(), self.samples))
        if not rows:
            raise SourceError(f"{self.dataset} has no rows")
        for number, row in enumerate(rows, 1):
            if not isinstance(row, dict):
                raise SourceError(f"row {number} of {self.dataset} is not a JSON object; every line must be one")
        if self._is_given(rows[0]):
            return self._given(rows)
        return self._joined(rows)

    def _is_given(self, row: dict) -> bool:
        """Return whether rows have conversations or completions, and are no plain texts."""
        if self.field is not None or any(_has_all(row, names) for names in TEXT_FIELDS[:2]):
            return False
        return given_column(row) in ("completion", "messages", "conversations")

    def _given(self, rows: list[dict]) -> list[dict]:
        for number, row in enumerate(rows, 1):
            if given_column(row) is None:
                raise SourceError(f"row {number} of {self.dataset} has no completion (it has {', '.join(row)})")
        return rows

    def _joined(self, rows: list[dict]) -> list[str]:
        """Return the text of each row, of the field or the fields joined."""
        field = self.field or next((names for names in TEXT_FIELDS if _has_all(rows[0], names)), None)
        texts = []
        for number, row in enumerate(rows, 1):
            has = ", ".join(row) or "no field"
            if field is None:
                raise SourceError(
                    f"{self.dataset} has none of the fields {', '.join(TEXT_FIELDS)} with a text; name one with "
                    f"--text-field (it has {has})"
                )
            if not _has_all(row, field):
                raise SourceError(f"row {number} of {self.dataset} has no text in {field!r} (it has {has})")
            texts.append("\n".join(row[name.strip()] for name in field.split(",")))
        return texts

    def tokens(self, tokenizer, texts: Sequence[str | dict]) -> list[torch.Tensor]:
        """Return token ids ``[1, tokens]`` of what [`read`] gave: of each text that has any, or of the windows of a
        running text, each with the token that the tokenizer begins texts with.

        Raises [`SourceError`] when no text has a token, or one has a character that the tokenizer lacks.
        """
        if self.is_running_text:
            batches = self._windows(tokenizer, texts[0])
        else:
            options = {"truncation": True, "max_length": self.max_length}
            batches = [_encoded(tokenizer, text, **options) for text in texts]
        batches = [ids for ids in batches if ids.shape[-1]]
        if not batches:
            raise SourceError("the tokenizer finds no token in the texts of the dataset")
        return batches

    @property
    def is_running_text(self) -> bool:
        """Whether it is one text, and not rows of texts."""
        return Path(self.dataset).suffix.lower() in _RUNNING

    def _windows(self, tokenizer, text: str | dict) -> list[torch.Tensor]:
        """Cut a running text into windows, each behind the token that the tokenizer begins texts with, if it does."""
        ids = _encoded(tokenizer, text)
        begin = getattr(tokenizer, "bos_token_id", None)
        first = ids[:, :0]
        if begin is not None and ids.shape[-1] and ids[0, 0] == begin:
            first = ids[:, :1]
        size = max(1, self.max_length - first.shape[-1])
        windows = ids[:, first.shape[-1] :].split(size, dim=1)
        return [torch.cat([first, window], 1) for window in windows[: self.samples]]

    def _rows(self) -> Iterator[Any]:
        path = Path(self.dataset).expanduser()
        is_on_hub = not path.exists() and path.suffix not in (".json", ".jsonl") and _can_be_on_hub(self.dataset)
        if path.is_dir() or is_on_hub:
            yield from _dataset_rows(self.dataset, path)
        else:
            yield from (row for _, row in json_lines(path))

    def _file_text(self) -> str:
        try:
            return Path(self.dataset).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeError) as error:
            raise SourceError(f"{self.dataset} cannot be read: {error}") from error


def json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the value of every line of JSON in a file, after its place (``"path:line"``); blank lines are skipped.
    Raises [`SourceError`]."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            yield f"{path}:{number}", json.loads(line.decode("utf-8-sig"))
        except ValueError as error:
            raise SourceError(f"{path}:{number}: not a line of JSON ({error})") from error


def _encoded(tokenizer, text: str | dict, **options: Any) -> torch.Tensor:
    try:
        if isinstance(text, dict):
            ids = given_tokens(text, tokenizer)[0]
            return torch.tensor([ids[: options["max_length"]]])
        return tokenizer(text, **options, return_tensors="pt").input_ids
    except Exception as error:  # fast tokenizers raise nothing narrower, for a character they lack
        raise SourceError(f"the tokenizer cannot encode the texts of the dataset: {error}") from error


def _has_all(row: dict, names: str) -> bool:
    return all(isinstance(row.get(name.strip()), str) for name in names.split(","))


def _can_be_on_hub(dataset: str) -> bool:
    return not dataset.startswith((".", "~", "/")) and _HUB_DATASET.fullmatch(dataset) is not None


def _dataset_rows(name: str, path: Path) -> Iterator[dict]:
    """Yield the rows of a folder of `Dataset.save_to_disk`, or of a dataset on the Hub."""
    from datasets import Dataset, load_dataset, load_from_disk
    from datasets.exceptions import DatasetsError

    try:
        if path.is_dir():
            rows = load_from_disk(str(path))
        else:
            repository, *rest = name.split(":")
            config = rest[0] if len(rest) == 2 else None
            split = rest[-1] if rest else "test"
            rows = load_dataset(repository, config, split=split)
    except (OSError, ValueError, DatasetsError) as error:
        raise SourceError(
            f"{name} cannot be read as texts: {error}; give a .jsonl or .txt file, a folder of Dataset.save_to_disk, "
            "or name:split of a dataset on the Hub"
        ) from error
    if not isinstance(rows, Dataset):
        raise SourceError(f"{name} holds the splits {', '.join(rows)}; give the folder of one of them")
    yield from rows
