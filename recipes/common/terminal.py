# SPDX-License-Identifier: Apache-2.0
"""What the recipes print, and how they end: with a message instead of a traceback, and all processes together."""

import atexit
import contextlib
import os
import sys
import threading
from collections.abc import Iterator

import torch
from accelerate import PartialState
from rich.console import Console
from rich.text import Text
from transformers import PrinterCallback, ProgressCallback, Trainer


console = Console()
#: Errors of inputs, which a user can fix.
INPUT_ERRORS = (ImportError, OSError, RuntimeError, ValueError)


def tell(subject: str, message: str) -> None:
    """Print a line once per job."""
    if os.environ.get("RANK", "0") == "0":
        console.print(Text.assemble((subject, "bold"), " ", message), highlight=False, soft_wrap=True)


@contextlib.contextmanager
def errors_as_messages(*errors: type[Exception], where: str = "") -> Iterator[None]:
    """End the process with the message of one of these ``errors``, after ``where``, and no traceback."""
    try:
        yield
    except errors as error:
        raise SystemExit(f"error: {where}{error}") from error


class TrainingBar(ProgressCallback):
    """Transformers' bar over optimizer steps with some logged values in it, instead of printed dictionaries.

    Args:
        title: of the bar.
        shown: the keys of logged values and what to call them.
    """

    def __init__(self, title: str, shown: dict[str, str]):
        super().__init__()
        self.title, self.shown = title, shown

    @classmethod
    def install(cls, trainer: Trainer, title: str, **shown: str) -> None:
        """Replace the trainer's own progress output. ``shown``: what to call logged values, and their keys."""
        for callback in (ProgressCallback, PrinterCallback):
            trainer.remove_callback(callback)
        trainer.add_callback(cls(title, {key: name for name, key in shown.items()}))

    def on_train_begin(self, args, state, control, **kwargs):
        super().on_train_begin(args, state, control, **kwargs)
        if self.training_bar is not None:
            self.training_bar.set_description(self.title)

    def on_log(self, args, state, control, logs=None, **kwargs):
        found = {name: f"{logs[key]:.3g}" for key, name in self.shown.items() if (logs or {}).get(key) is not None}
        if self.training_bar is not None and found:
            self.training_bar.set_postfix(found)


def shutdown() -> None:
    """Wait for the other processes, end the process group, and end this process; without a group, do nothing.

    To be called as the last thing of a run that succeeded. Exit handlers are run and output is written, but the
    interpreter is not taken apart: while it is, a process can be aborted ("terminate called without an active
    exception": a thread of the process group may still hold a tensor). The launcher takes that for a failure of the
    job, and kills the process that writes the results.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    state = PartialState()
    state.wait_for_everyone()
    state.destroy_process_group()
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
