# SPDX-License-Identifier: Apache-2.0
"""Read what a training run left: `run_log.jsonl` (see [`hf_mxfp4.rl.run_log`]), or the log history of a checkpoint."""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...checkpoint import TRAINER_STATE, checkpoint_step, last_complete_checkpoint
from ...rl.run_log import RUN_LOG


def is_number(value: Any) -> bool:
    """Return whether ``value`` is a finite number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


class RunLogError(ValueError):
    """A folder holds no training run that could be reported on; the message says what was looked for."""


@dataclass
class RunRecord:
    """A training run as its files tell it.

    Attributes:
        folder, source: where it was read, and the file.
        logs: logged values, one dictionary with a `step` per logging step, in order; of steps that a resumed run did
            again, the later.
        starts: one entry for each time that training began or was resumed: `step`, `time`, `max_steps` and the facts.
        evaluations: entries with `when`, `step` and `scores`: by name, which problems are solved.
        end: `reason` and `error` of the last end, `None` when the run was killed or is still running.
        damaged: lines that could not be read.
    """

    folder: Path
    source: str
    logs: list[dict[str, Any]] = field(default_factory=list)
    starts: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    end: dict[str, Any] | None = None
    damaged: int = 0

    @property
    def facts(self) -> dict[str, Any]:
        """Model, scheme, options, versions and machine of the last start; empty when the run did not write them."""
        if not self.starts:
            return {}
        return self.starts[-1].get("facts", {})

    @property
    def step(self) -> int:
        """The last known step."""
        steps = [entry["step"] for entry in self.logs]
        if self.end:
            steps.append(self.end["step"])
        return max(steps, default=0)

    @property
    def max_steps(self) -> int | None:
        if not self.starts:
            return None
        return self.starts[-1].get("max_steps")

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """Return steps and values of one logged quantity, finite ones alone."""
        points = [(entry["step"], float(entry[key])) for entry in self.logs if is_number(entry.get(key))]
        return [step for step, _ in points], [value for _, value in points]

    def values(self, key: str) -> list[float]:
        """Return the values of [`series`], without their steps."""
        return self.series(key)[1]

    def movements(self) -> list[tuple[int, float, float]]:
        """Return step, ratio and two standard errors of each measured step movement."""
        movements = []
        for entry in self.logs:
            if is_number(entry.get("movement/total")):
                error = entry.get("movement_se/total")
                if not is_number(error):
                    error = 0.0
                movements.append((entry["step"], entry["movement/total"], 2 * error))
        return movements

    def add(self, entry: dict[str, Any]) -> None:
        """Take in one line of the file. Raises an error of `UNREADABLE` for a line of unknown form."""
        kind = entry.pop("kind")
        entry["step"] = step = int(entry["step"])
        if kind == "start":
            # What an earlier process did beyond the checkpoint that this one resumed from is done again.
            self.logs = [old for old in self.logs if old["step"] <= step]
            self.evaluations = [old for old in self.evaluations if old["step"] <= step]
            self.starts.append(entry)
            self.end = None
        elif kind == "log":
            self.logs.append(entry)
        elif kind == "evaluation":
            entry["scores"] = {name: _score(score) for name, score in entry["scores"].items()}
            # A resumed run evaluates its start again.
            self.evaluations = [old for old in self.evaluations if old["when"] != entry["when"]]
            self.evaluations.append(entry)
        elif kind == "end":
            self.end = entry
        else:
            raise ValueError(f"unknown kind of line: {kind}")


#: Errors of lines that are no lines of a log.
UNREADABLE = (ValueError, KeyError, TypeError, AttributeError)


def _score(solved: list[bool]) -> list[bool]:
    """Return which problems are solved. Raises `ValueError` for values that do not say so, and for none at all."""
    if not solved or any(value not in (False, True) for value in solved):
        raise ValueError(f"each problem is solved or not, and there is one: {solved}")
    return solved


def read_run(folder: str | Path) -> RunRecord:
    """Read the training run in an output folder, or in one of its checkpoints, whose history ends where it was saved.

    Raises [`RunLogError`] when there is nothing to read.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise RunLogError(f"there is no folder {folder}; give the output_dir of a training run, or a checkpoint in it")
    if checkpoint_step(folder) is not None or (folder / TRAINER_STATE).is_file():
        record = _read_state(folder)
    elif (folder / RUN_LOG).is_file():
        record = _read_lines(folder / RUN_LOG)
    else:
        checkpoint = last_complete_checkpoint(folder)
        if checkpoint is None:
            raise RunLogError(
                f"{folder} holds neither {RUN_LOG} (written by MXFP4GRPOTrainer unless report_every is 0) nor a whole "
                "checkpoint; give the output_dir of a training run, or a checkpoint in it"
            )
        record = _read_state(Path(checkpoint))
    record.folder = folder
    if not record.logs:
        raise RunLogError(f"{record.source} in {folder} has no logged value yet: nothing to report; see logging_steps")
    return record


def _read_lines(path: Path) -> RunRecord:
    record = RunRecord(path.parent, path.name)
    for line in path.read_bytes().splitlines():
        try:
            record.add(json.loads(line))
        except UNREADABLE:
            record.damaged += 1
    return record


def _read_state(checkpoint: Path) -> RunRecord:
    path = checkpoint / TRAINER_STATE
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        history = [{**entry, "step": int(entry["step"])} for entry in state["log_history"] if "step" in entry]
        step = int(state["global_step"])
        max_steps = int(state["max_steps"])
    except FileNotFoundError:
        raise RunLogError(f"{checkpoint} has no {TRAINER_STATE}: saving it was not finished") from None
    except (OSError, *UNREADABLE) as error:
        raise RunLogError(f"{path} cannot be read: {error}") from error
    record = RunRecord(checkpoint, f"{checkpoint.name}/{TRAINER_STATE}")
    # The log of the run, next to its checkpoints, has facts and evaluations that a Trainer's state lacks.
    whole = RunRecord(checkpoint, "")
    run_log = checkpoint.parent / RUN_LOG
    if run_log.is_file():
        whole = _read_lines(run_log)
    record.starts = whole.starts or [{"step": 0, "max_steps": max_steps, "facts": {}}]
    record.evaluations = [entry for entry in whole.evaluations if entry["step"] <= step]
    record.logs = history
    return record
