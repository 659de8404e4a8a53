# SPDX-License-Identifier: Apache-2.0
"""Completions on disk: appended as they come, so that an evaluation that was stopped continues."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class ScoredCompletion:
    """One line of the file.

    Attributes:
        problem: row of the test split.
        sample: number of the sample; `None`: the greedy completion.
        completion: the text.
        n_tokens, truncated: its length in tokens, and whether it ran into the limit.
        correct: by each score.
    """

    problem: int
    sample: int | None
    completion: str
    n_tokens: int
    truncated: bool
    correct: dict[str, bool]

    @property
    def key(self) -> tuple[int | None, int]:
        return self.sample, self.problem


class CompletionFile:
    """A JSON-lines file: first what the completions depend on (the fingerprint), then one completion per line.

    Args:
        path: need not exist.
        fingerprint: JSON-clean, of the completions that will be added.
        overwrite: forget what the file holds.

    Raises:
        ValueError: the file was made under another fingerprint, or a line is damaged. The last one may be cut short, by
            a process that was killed as it wrote.
    """

    def __init__(self, path: Path, fingerprint: Mapping[str, Any], overwrite: bool = False):
        self.path = path
        #: What the file holds, by sample and problem.
        self.found: dict[tuple[int | None, int], ScoredCompletion] = {}
        self._fingerprint = json.loads(json.dumps(fingerprint))
        self._end = 0
        if path.is_file() and not overwrite:
            self._read()

    def _read(self) -> None:
        content = self.path.read_bytes()
        self._end = content.rfind(b"\n") + 1
        stored: dict[str, Any] = self._fingerprint
        for number, line in enumerate(content[: self._end].splitlines(), start=1):
            try:
                record = json.loads(line)
                if number == 1:
                    stored = record["fingerprint"]
                    continue
                completion = ScoredCompletion(**record)
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(
                    f"{self.path}:{number} is not a line of an evaluation ({error}); take another --output_dir, or "
                    "start again with --overwrite"
                ) from error
            self.found[completion.key] = completion
        names = [key for key in {**stored, **self._fingerprint} if stored.get(key) != self._fingerprint.get(key)]
        if names:
            differences = "; ".join(f"{key}: {stored.get(key)!r}, now {self._fingerprint.get(key)!r}" for key in names)
            raise ValueError(
                f"{self.path} holds completions made in another way ({differences}); give the options that they were "
                "made with to go on, another --output_dir to keep both, or --overwrite to start again"
            )

    def open(self) -> None:
        """Make the file ready to append to: write the first line of a new one, remove a line that was cut short. For
        one process."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as file:
            file.truncate(self._end)
        if self._end == 0:
            self._write([{"fingerprint": self._fingerprint}])

    def append(self, completions: Iterable[ScoredCompletion]) -> None:
        """Add completions to the file and to `found`. For one process."""
        completions = list(completions)
        self._write(asdict(completion) for completion in completions)
        self.found |= {completion.key: completion for completion in completions}

    def _write(self, records: Iterable[Mapping[str, Any]]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
