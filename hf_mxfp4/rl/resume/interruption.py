# SPDX-License-Identifier: Apache-2.0
"""What is left behind when training ends early: by an exception, Ctrl-C, or SIGTERM from a scheduler."""

import contextlib
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from ..._logging import get_logger
from ...checkpoint import last_complete_checkpoint, why_incomplete
from .boundary import StepBoundary
from .state import ExactResumeMixin
from .trackers import guard_direct_writes, guard_trackers


class Terminated(SystemExit):
    """SIGTERM reached the process that trains. Its exit code is the one that shells give for it, 143."""

    def __init__(self):
        super().__init__(128 + signal.SIGTERM)

    def __str__(self) -> str:
        return "SIGTERM"


class InterruptibleTraining(ExactResumeMixin):
    """Saves a checkpoint of the last finished step before it lets anything that ends training through, and keeps
    experiment trackers that fail from ending it.

    Expects a [`StepBoundary`] in ``_boundary``, and [`Telemetry`] beside it, which reports the error.
    """

    _boundary: StepBoundary

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any):
        """[`transformers.Trainer.train`]; an exception, Ctrl-C or SIGTERM leaves a checkpoint of the last finished step
        behind. A tracker that fails is named in a warning, and training goes on.

        Raises `ValueError` when the checkpoint to resume from is not whole, or there is none that is.
        """
        guard_trackers(self.callback_handler.callbacks)
        single = self.accelerator.num_processes == 1
        with guard_direct_writes():
            try:
                # Several processes could not save together, each somewhere else; signals end them as they always do.
                with signals_as_exceptions(self._boundary) if single else contextlib.nullcontext():
                    return super().train(resume_from_checkpoint, *args, **kwargs)
            except BaseException as error:
                self._save_before_leaving(error)
                self._report_error(error)
                raise

    def _save_before_leaving(self, error: BaseException) -> None:
        step = self.state.global_step
        what = f"training stopped at step {step} by {type(error).__name__}: {error}"
        if step == 0 or self.optimizer is None:
            get_logger().error("%s; nothing was trained yet, so nothing was saved", what)
        elif self.accelerator.num_processes > 1:
            # Sharded weights are gathered by all ranks together, and the others may not be here.
            get_logger().error(
                "%s; not saved, since other processes may still be training; %s", what, self._newest_checkpoint()
            )
        elif self._boundary.inside_update:
            get_logger().error(
                "%s, in the middle of an update; not saved, since the weights are half-updated; %s",
                what,
                self._newest_checkpoint(),
            )
        else:
            folder = Path(self._get_output_dir(trial=None)) / f"checkpoint-{step}"
            try:
                if why_incomplete(folder) is not None:
                    state = self._boundary.rewind(step)
                    if state is not None:
                        self._load_process_state(state, exact=True)
                    elif self.control.should_log:
                        self._log_what_there_is()
                    self._save_checkpoint(self.model, trial=None)
            except Exception as failure:
                get_logger().error(
                    "%s; saving failed too: %s: %s (%s GB are free there); %s",
                    what,
                    type(failure).__name__,
                    failure,
                    free_gigabytes(self.args.output_dir),
                    self._newest_checkpoint(),
                )
            else:
                get_logger().error("%s; saved as %s, resume with resume_from_checkpoint", what, folder)

    def _log_what_there_is(self) -> None:
        """A line for a step that ended before its log: what was measured must not be averaged into the next one's."""
        try:
            self.log({})
        except Exception as failure:
            get_logger().error("logging it failed too: %s: %s", type(failure).__name__, failure)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """[`transformers.Trainer.log`]. A callback that fails in it leaves nothing of this line for the next."""
        metrics, lines = self._metrics["train" if self.model.training else "eval"], len(self.state.log_history)
        try:
            super().log(logs, start_time)
        finally:
            if len(self.state.log_history) > lines:
                metrics.clear()

    def _newest_checkpoint(self) -> str:
        path = last_complete_checkpoint(self.args.output_dir)
        if path is None:
            return f"there is no whole checkpoint in {self.args.output_dir}"
        return f"the newest whole checkpoint is {path}, resume with resume_from_checkpoint"


def free_gigabytes(folder: str) -> str:
    """Free space where ``folder`` is, in words: it may be gone, and that is not the error to report."""
    try:
        return f"{shutil.disk_usage(folder).free / 1e9:.3g}"
    except OSError:
        return "an unknown number of"


@contextlib.contextmanager
def signals_as_exceptions(boundary: StepBoundary) -> Iterator[None]:
    """Within this context SIGTERM raises [`Terminated`], and neither it nor Ctrl-C interrupts an optimizer update or
    the callbacks at the end of its step: they are raised before the next step. A second one does not wait.

    Only in the main thread, and only in place of the handlers that Python starts with: those of others stay.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    owner, waiting = os.getpid(), []

    def handle(number: int, frame: FrameType | None) -> None:
        if os.getpid() != owner:  # a process that was forked from here, such as a worker of a reward function
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        error = Terminated() if number == signal.SIGTERM else KeyboardInterrupt()
        if boundary.finishes_step and not waiting:
            waiting.append(error)
            boundary.leave_with(error)
            return
        raise error

    usual = {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
    taken = [number for number, handler in usual.items() if signal.getsignal(number) is handler]
    for number in taken:
        signal.signal(number, handle)
    try:
        yield
        boundary.raise_what_waits()
    finally:
        for number in taken:
            signal.signal(number, usual[number])
