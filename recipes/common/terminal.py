# SPDX-License-Identifier: Apache-2.0
"""What the recipes print: lines, one progress bar for training, and messages instead of tracebacks."""

import contextlib
import os
from collections.abc import Iterator

from rich.console import Console
from rich.text import Text
from tqdm.auto import tqdm
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback


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


class TrainingBar(TrainerCallback):
    """A bar over optimizer steps that shows logged values, by default reward, entropy and noise.

    Args:
        title: of the bar.
        shown: the keys of logged values and what to call them.
    """

    def __init__(self, title: str = "GRPO", shown: dict[str, str] | None = None):
        self.title = title
        self.shown = shown or {"reward": "reward", "entropy": "entropy", "aqn/sigma": "sigma"}
        self.bar: tqdm | None = None

    @classmethod
    def install(cls, trainer: Trainer, **options) -> None:
        """Replace the trainer's own progress output. ``options`` are those of the bar."""
        for callback in (ProgressCallback, PrinterCallback):
            trainer.remove_callback(callback)
        trainer.add_callback(cls(**options))

    def on_train_begin(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            self.bar = tqdm(total=state.max_steps, initial=state.global_step, desc=self.title, unit="step")

    def on_step_end(self, args, state, control, **kwargs):
        if self.bar is not None:
            self.bar.update(state.global_step - self.bar.n)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if self.bar is not None and logs and next(iter(self.shown)) in logs:
            self.bar.set_postfix(
                {short: f"{logs[key]:.3g}" for key, short in self.shown.items() if logs.get(key) is not None}
            )

    def on_train_end(self, args, state, control, **kwargs):
        if self.bar is not None:
            self.bar.close()
