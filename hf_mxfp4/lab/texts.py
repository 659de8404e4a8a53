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

from .source import SourceError


#: Fields of a dataset's rows that are taken for the text, in this order, where none is named.
TEXT_FIELDS = ("text", "prompt", "question", "content")
#: The same for whole texts, with the answer where there is one.
WHOLE_FIELDS = ("text", "question,answer", "prompt,completion", *TEXT_FIELDS[1:])
#: Files of one running text.
_RUNNING = (".txt", ".md")
_HUB_DATASET = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+){0,2}")


@dataclass(frozen=True)
class TextOptions:
    """Which texts are run: the first ``samples`` of ``dataset``, each cut to ``max_length`` tokens; of a running text
    the first ``samples`` windows of so many. The rest is as of [`read_texts`]."""

    dataset: str
    field: str | None = None
    samples: int = 100
    max_length: int = 512
    guesses: Sequence[str] = WHOLE_FIELDS

    def read(self) -> list[str]:
        """The texts, without a tokenizer: what is wrong with them is known before a model is loaded."""
        return read_texts(self.dataset, self.field, self.samples, self.guesses)

    def tokens(self, tokenizer, texts: Sequence[str]) -> list[torch.Tensor]:
        """Token ids ``[1, tokens]`` of what [`read`] gave. Raises [`SourceError`] as [`tokenized`] does."""
        if is_running_text(self.dataset):
            return windows(tokenizer, texts[0], self.max_length, self.samples)
        return tokenized(tokenizer, texts, self.max_length)


def read_texts(dataset: str | Path, field: str | None, count: int, guesses: Sequence[str] = TEXT_FIELDS) -> list[str]:
    """The first ``count`` texts of a file of JSON lines, a folder that `datasets` saved, or a dataset on the Hub
    (``name:split`` or ``name:config:split``, the split ``test`` where none is named); of a ``.txt`` or ``.md`` file its
    one text.

    Args:
        field: name of the text's field, or names with commas between, whose texts are joined by a line break; by
            default the first of ``guesses`` that the first row has as strings.

    Raises [`SourceError`] for what cannot be read, a missing field, or no text at all.
    """
    if is_running_text(dataset):
        text = _file_text(Path(dataset))
        if not text.strip():
            raise SourceError(f"{dataset} has no text")
        return [text]
    texts = []
    for i, row in enumerate(itertools.islice(_rows(dataset), count), 1):
        if not isinstance(row, dict):
            raise SourceError(f"row {i} of {dataset} is not a JSON object; every line must be one")
        if field is None:
            field = next((names for names in guesses if _has_all(row, names)), None)
            if field is None:
                raise SourceError(
                    f"{dataset} has none of the fields {', '.join(guesses)} with a text; name one with "
                    f"--text-field (it has {', '.join(row) or 'no field'})"
                )
        if not _has_all(row, field):
            raise SourceError(f"row {i} of {dataset} has no text in {field!r} (it has {', '.join(row) or 'no field'})")
        texts.append("\n".join(row[name.strip()] for name in field.split(",")))
    if not texts:
        raise SourceError(f"{dataset} has no rows")
    return texts


def is_running_text(dataset: str | Path) -> bool:
    """Whether it is one text, and not rows of texts."""
    return Path(dataset).suffix.lower() in _RUNNING


def tokenized(tokenizer, texts: Sequence[str], max_length: int) -> list[torch.Tensor]:
    """Token ids ``[1, tokens]`` of every text that has any, cut to ``max_length``.

    Raises [`SourceError`] when no text has a token, or one has a character that the tokenizer lacks.
    """
    ids = [batch for batch in (_encoded(tokenizer, text, max_length) for text in texts) if batch.shape[-1]]
    if not ids:
        raise SourceError("the tokenizer finds no token in the texts of the dataset")
    return ids


def windows(tokenizer, text: str, length: int, count: int) -> list[torch.Tensor]:
    """The first ``count`` pieces ``[1, length]`` of a running text, the last one shorter, each with the token that the
    tokenizer begins texts with.

    Raises [`SourceError`] as [`tokenized`] does.
    """
    ids = _encoded(tokenizer, text)
    begin = getattr(tokenizer, "bos_token_id", None)
    first = ids[:, :1] if begin is not None and ids.shape[-1] and ids[0, 0] == begin else ids[:, :0]
    parts = ids[:, first.shape[-1] :].split(max(1, length - first.shape[-1]), dim=1)
    pieces = [torch.cat([first, part], 1) for part in parts[:count]]
    pieces = [piece for piece in pieces if piece.shape[-1]]
    if not pieces:
        raise SourceError("the tokenizer finds no token in the text")
    return pieces


def _encoded(tokenizer, text: str, max_length: int | None = None) -> torch.Tensor:
    cut = {} if max_length is None else {"truncation": True, "max_length": max_length}
    try:
        return tokenizer(text, **cut, return_tensors="pt").input_ids
    except Exception as error:  # fast tokenizers raise nothing narrower, for a character they lack
        raise SourceError(f"the tokenizer cannot encode the texts of the dataset: {error}") from error


def _has_all(row: dict, names: str) -> bool:
    return all(isinstance(row.get(name.strip()), str) for name in names.split(","))


def _rows(dataset: str | Path) -> Iterator[Any]:
    path = Path(dataset).expanduser()
    if path.is_dir() or not path.exists() and path.suffix not in (".json", ".jsonl") and _named(str(dataset)):
        yield from _dataset_rows(str(dataset), path)
        return
    try:
        with open(path, encoding="utf-8") as stream:
            for i, line in enumerate((line for line in stream if line.strip()), 1):
                try:
                    row = json.loads(line)
                except ValueError as error:
                    raise SourceError(f"row {i} of {dataset} is not JSON: {error}") from error
                yield row
    except (OSError, UnicodeError) as error:
        raise SourceError(f"{dataset} cannot be read: {error}") from error


def _named(dataset: str) -> bool:
    return not dataset.startswith((".", "~", "/")) and _HUB_DATASET.fullmatch(dataset) is not None


def _dataset_rows(name: str, path: Path) -> Iterator[dict]:
    """Rows of a folder of `Dataset.save_to_disk`, or of a dataset on the Hub."""
    from datasets import Dataset, load_dataset, load_from_disk
    from datasets.exceptions import DatasetsError

    try:
        if path.is_dir():
            rows = load_from_disk(str(path))
            if not isinstance(rows, Dataset):
                raise SourceError(f"{name} holds the splits {', '.join(rows)}; give the folder of one of them")
        else:
            repository, *rest = name.split(":")
            config, split = rest if len(rest) == 2 else (None, *(rest or ["test"]))
            rows = load_dataset(repository, config, split=split)
    except (OSError, ValueError, DatasetsError) as error:
        if isinstance(error, SourceError):
            raise
        raise SourceError(
            f"{name} cannot be read as texts: {error}; give a .jsonl or .txt file, a folder of Dataset.save_to_disk, "
            "or name:split of a dataset on the Hub"
        ) from error
    yield from rows


def _file_text(file: Path) -> str:
    try:
        return file.expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(f"{file} cannot be read: {error}") from error
