# SPDX-License-Identifier: Apache-2.0
"""What is left behind when training ends early: by an exception, Ctrl-C, or SIGTERM from a scheduler."""

import contextlib
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from ...checkpoint import last_complete_checkpoint
from .boundary import StepBoundary


class Terminated(SystemExit):
    """SIGTERM reached the process that trains. Its exit code is the one that shells give for it, 143."""

    def __init__(self):
        super().__init__(128 + signal.SIGTERM)

    def __str__(self) -> str:
        return "SIGTERM"


def why_unsaved(step: int, processes: int, boundary: StepBoundary, output_dir: str) -> str | None:
    """Return why a run that ends early after ``step`` optimizer steps leaves no checkpoint of its own, to continue a
    sentence with; `None` where it can. ``step`` is 0 for a resumed run that has not begun a step: its optimizer may not
    have been restored."""
    if step == 0:
        return "; nothing was trained yet, so nothing was saved"
    if processes > 1:
        # Sharded weights are gathered by all ranks together, and the others may not be here.
        return f"; not saved, since other processes may still be training; {newest_checkpoint(output_dir)}"
    if boundary.inside_update:
        newest = newest_checkpoint(output_dir)
        return f", in the middle of an update; not saved, since the weights are half-updated; {newest}"
    return None


def newest_checkpoint(output_dir: str) -> str:
    """Which checkpoint of a run can be resumed from, in words."""
    path = last_complete_checkpoint(output_dir)
    if path is None:
        return f"there is no whole checkpoint in {output_dir}"
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
