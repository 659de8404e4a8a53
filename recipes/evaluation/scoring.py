# SPDX-License-Identifier: Apache-2.0
"""Scores of completions, by the `evaluate` metric of a task where it has one."""

import hashlib
import inspect
from collections.abc import Sequence
from pathlib import Path

import evaluate

from recipes.tasks import Task


METRICS = Path(__file__).resolve().parents[1] / "metrics"


class Scorer:
    """Scores of a task.

    Attributes:
        names: of the scores; the first is the headline.
        digest: of the source of the scores: another means that verdicts on disk may be out of date.
    """

    def __init__(self, task: Task):
        self.names = list(task.scores)
        self._scores = task.scores
        self._metric = None
        if task.metric is None:
            sources = {Path(inspect.getsourcefile(score)) for score in task.scores.values()}
        else:
            folder = METRICS / task.metric
            self._metric = evaluate.load(str(folder), keep_in_memory=True)
            sources = set(folder.glob("*.py"))
        self.digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(sources))).hexdigest()[:12]

    def __call__(self, completions: Sequence[str], answers: Sequence[str]) -> list[dict[str, bool]]:
        """Verdicts for each completion, by name of the score."""
        if not completions:
            return []
        if self._metric is None:
            verdicts = {
                name: [score(text, gold) for text, gold in zip(completions, answers, strict=True)]
                for name, score in self._scores.items()
            }
        else:
            found = self._metric.compute(predictions=list(completions), references=list(answers), verdicts=True)
            verdicts = found["verdicts"]
        return [{name: verdicts[name][i] for name in self.names} for i in range(len(completions))]
