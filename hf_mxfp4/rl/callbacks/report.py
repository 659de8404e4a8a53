# SPDX-License-Identifier: Apache-2.0
"""The callback that writes the log and the report of a run."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from transformers import TrainerCallback, TrainerState

from ..._logging import get_logger
from ...lab.run_report.page import write_run_report
from ...run_log import RunLog


class RunReportCallback(TrainerCallback):
    """Appends what is logged to `run_log.jsonl` in the output folder, and makes `run_report.html` of it every few steps
    and when training ends, by an exception too. A killed run leaves both as they were last written;
    `hf-mxfp4 report` makes the report of the log again. Done by the main process. Whatever fails in it (a full disk, a
    plot) is a warning, and training goes on.

    Cost: a line per logging step, and about a second of one core for each report.

    Args:
        every: steps between reports.
        facts: gives what the report says about the run besides its numbers, once it begins.

    Attributes:
        path: of the report last written, `None` before.
    """

    def __init__(self, every: int, facts: Callable[[], dict[str, Any]]):
        self.every, self.facts = every, facts
        self.path = None
        self._log: RunLog | None = None
        self._pending: list[dict[str, Any]] = []
        self._has_values = self._warned = False

    def on_train_begin(self, args, state, control, **kwargs):
        # The facts are gathered here, where all processes are.
        with self._harmless(args.output_dir):
            facts = self.facts()
            if not state.is_world_process_zero:
                return
            self._log = RunLog(args.output_dir)
            self._log.start(state.global_step, state.max_steps, facts, state.log_history)
            self._has_values = bool(state.log_history)
            for evaluation in self._pending:
                self._log.write("evaluation", **evaluation)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if self._log is None or not state.log_history:
            return
        with self._harmless(args.output_dir):
            self._has_values = True
            self._log.write("log", **{**state.log_history[-1], "step": state.global_step})

    def on_step_end(self, args, state, control, **kwargs):
        # The last step's report comes with the end of training.
        if state.global_step % self.every == 0 and state.global_step < state.max_steps:
            self._write_report()

    def on_train_end(self, args, state, control, **kwargs):
        early = state.global_step < state.max_steps
        self._end(state.global_step, "stopped early by a callback" if early else "finished")

    def stopped_by(self, error: BaseException, state: TrainerState) -> None:
        """Note that training ended by an exception."""
        self._end(state.global_step, "stopped by an error", f"{type(error).__name__}: {error}")

    def add_evaluation(self, when: str, step: int, scores: dict[str, dict[str, float]]) -> None:
        """Put an evaluation into the report, of any time before or after training; one of the same ``when`` replaces
        it.

        Args:
            scores: by name, ``accuracy`` and ``standard_error`` (0 to 1) and ``n``, the number of problems.
        """
        evaluation = {"when": when, "step": step, "scores": scores}
        if self._log is None:
            self._pending.append(evaluation)
            return
        with self._harmless(str(self._log.path.parent)):
            self._log.write("evaluation", **evaluation)
        self._write_report()

    def _end(self, step: int, reason: str, error: str | None = None) -> None:
        if self._log is None:
            return
        with self._harmless(str(self._log.path.parent)):
            self._log.write("end", step=step, reason=reason, error=error)
        self._write_report()

    def _write_report(self) -> None:
        if self._has_values:
            with self._harmless(str(self._log.path.parent)):
                self.path = write_run_report(self._log.path.parent)

    @contextlib.contextmanager
    def _harmless(self, folder: str) -> Iterator[None]:
        """Nothing that a report is made of is worth a training run."""
        try:
            yield
        except Exception as error:
            if not self._warned:
                get_logger().warning(
                    "the run report in %s is not complete: %s: %s; training goes on",
                    folder,
                    type(error).__name__,
                    error,
                )
            self._warned = True
