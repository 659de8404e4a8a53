# SPDX-License-Identifier: Apache-2.0
"""The callback that makes a report of a run while it trains."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from transformers import Trainer, TrainerCallback

from ..._logging import get_logger
from .page import write_run_report


class RunReportCallback(TrainerCallback):
    """Writes `run_report.html` into the output folder every few steps and when training ends, of the `run_log.jsonl`
    that [`hf_mxfp4.MXFP4GRPOTrainer`] writes there. Done by the main process. Whatever fails in it is a warning, and
    training goes on.

    Args:
        every: steps between reports; each takes about a second of one core.

    Attributes:
        path: of the report last written, `None` before.
    """

    def __init__(self, every: int = 100):
        self.every = every
        self.path: Path | None = None
        self._warned = False

    def on_step_end(self, args, state, control, **kwargs):
        # The last step's report comes with the end of training.
        if state.global_step % self.every == 0 and state.global_step < state.max_steps:
            self._write(args, state)

    def on_train_end(self, args, state, control, **kwargs):
        self._write(args, state)

    @contextlib.contextmanager
    def on_exit(self, trainer: Trainer) -> Iterator[None]:
        """Write the report of a training within this context that ends by an exception, too."""
        try:
            yield
        except BaseException:
            if self in trainer.callback_handler.callbacks:
                self._write(trainer.args, trainer.state)
            raise

    def _write(self, args, state) -> None:
        if state.is_world_process_zero and state.log_history:
            self.write(args.output_dir)

    def write(self, folder: str | Path) -> None:
        """Write the report of the run in ``folder``."""
        try:
            self.path = write_run_report(folder)
        except Exception as error:
            if not self._warned:
                get_logger().warning("no run report in %s: %s: %s", folder, type(error).__name__, error)
            self._warned = True
