# SPDX-License-Identifier: Apache-2.0
"""The checkpoint that a GRPO run leaves when it ends early: by an exception, Ctrl-C, or SIGTERM from a scheduler."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from torch import nn
from transformers import TrainerCallback
from trl import GRPOTrainer

from .._logging import get_logger
from ..checkpoint import last_complete_checkpoint, why_incomplete
from .resume import not_finite, random_states, restore_random_states


class Terminated(SystemExit):
    """SIGTERM reached the process that trains. Its exit code is the one that shells give for it, 143."""

    def __init__(self):
        super().__init__(128 + signal.SIGTERM)

    def __str__(self) -> str:
        return "SIGTERM"


class CheckpointOnExit(TrainerCallback):
    """Saves the last finished optimizer step when training ends early, with the random states and rollouts of its end,
    and stops an update that is not finite.

    To this end it remembers these before each step, and holds back SIGTERM and Ctrl-C while the optimizer updates
    weights and the callbacks of the end of its step run.
    """

    def __init__(self, trainer: GRPOTrainer):
        self.trainer = trainer
        self._update: int | None = None
        self._waiting: BaseException | None = None
        self._has_begun = False  # before its first step the state of a resumed run may not have been restored
        self._step: int | None = None
        self._random: dict[str, Any] = {}
        self._state: dict[str, Any] = {}

    # ---- where the last finished step ended -----------------------------------------------------------------------

    def on_train_begin(self, args, state, control, **kwargs):
        self._step = self._update = self._waiting = None
        self._has_begun = False

    def on_epoch_begin(self, args, state, control, **kwargs):
        self.remember(state.global_step)

    def on_step_begin(self, args, state, control, **kwargs):
        # An epoch's data loader draws a number before its first step: there, the state before it counts.
        if self._step != state.global_step:
            self.remember(state.global_step)
        self._has_begun = True
        self._raise_what_waits()

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self._check_gradients(state.global_step, model)
        self._update = state.global_step

    def on_step_end(self, args, state, control, **kwargs):
        self._update = None

    def remember(self, step: int) -> None:
        """Take the states of now for those of the end of optimizer step ``step``."""
        self._step, self._random, self._state = step, random_states(), self.trainer._process_state()

    def _check_gradients(self, step: int, model: nn.Module) -> None:
        # In float16 the optimizer itself leaves out updates that are not finite.
        if self.trainer.accelerator.scaler is not None or (name := not_finite(model, gradients=True)) is None:
            return
        raise FloatingPointError(
            f"the gradient of step {step + 1} holds NaN or infinity, among others that of {name}; the weights were not "
            "changed. Look for such values in the rewards and logs of this step; a run that is resumed repeats it "
            "unless learning_rate, the scheme, seed or data change"
        )

    # ---- signals --------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _signals_as_exceptions(self) -> Iterator[None]:
        """Have SIGTERM raise [`Terminated`], and neither it nor Ctrl-C interrupt an update: they are raised before the
        next step. A second one does not wait.

        Only in the main thread, and only in place of the handlers that Python starts with: those of others stay.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        usual = {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
        taken = [number for number, handler in usual.items() if signal.getsignal(number) is handler]
        for number in taken:
            signal.signal(number, self._handle)
        try:
            yield
            self._raise_what_waits()
        finally:
            for number in taken:
                signal.signal(number, usual[number])

    def _handle(self, number: int, frame: FrameType | None) -> None:
        error = Terminated() if number == signal.SIGTERM else KeyboardInterrupt()
        if self._update is None or self._waiting is not None:
            raise error
        self._waiting = error

    def _raise_what_waits(self) -> None:
        error, self._waiting = self._waiting, None
        if error is not None:
            raise error

    # ---- saving ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def checkpoint_on_exit(self) -> Iterator[None]:
        """Save the last finished step whenever this context ends by an exception."""
        # Several processes could not save together, each somewhere else; signals end them as they always do.
        single = self.trainer.accelerator.num_processes == 1
        try:
            with self._signals_as_exceptions() if single else contextlib.nullcontext():
                yield
        except BaseException as error:
            self._save(f"training stopped at step {self.trainer.state.global_step} by {type(error).__name__}: {error}")
            # After what was trained is saved: a scheduler may not wait.
            if self.trainer.run_log is not None:
                self.trainer.run_log.stopped_by(error, self.trainer.state)
            raise

    def _save(self, what: str) -> None:
        trainer, logger = self.trainer, get_logger()
        reason = self._why_unsaved()
        if reason is not None:
            logger.error("%s%s", what, reason)
            return
        step, output_dir = trainer.state.global_step, trainer.args.output_dir
        folder = Path(trainer._get_output_dir(trial=None)) / f"checkpoint-{step}"
        try:
            if why_incomplete(folder) is not None:
                self._rewind(step)
                trainer._save_checkpoint(trainer.model, trial=None)
        except Exception as failure:
            newest = _newest_checkpoint(output_dir)
            logger.error("%s; saving failed too: %s: %s; %s", what, type(failure).__name__, failure, newest)
        else:
            logger.error("%s; saved as %s, resume with resume_from_checkpoint", what, folder)

    def _why_unsaved(self) -> str | None:
        step, output_dir = self.trainer.state.global_step, self.trainer.args.output_dir
        if not self._has_begun or step == 0:
            return "; nothing was trained yet, so nothing was saved"
        if self.trainer.accelerator.num_processes > 1:
            # Sharded weights are gathered by all ranks together, and the others may not be here.
            return f"; not saved, since other processes may still be training; {_newest_checkpoint(output_dir)}"
        if self._update == step:  # a step is counted after its update
            newest = _newest_checkpoint(output_dir)
            return f", in the middle of an update; not saved, since the weights are half-updated; {newest}"
        return None

    def _rewind(self, step: int) -> None:
        """Put random states, rollouts and logs back to the end of step ``step``, if the next one has begun."""
        trainer = self.trainer
        if self._step == step:
            restore_random_states(self._random)
            trainer._load_process_state(self._state)
            trainer._metrics["train"].clear()  # of what the step that failed had added
        elif trainer.control.should_log and not any(line["step"] == step for line in trainer.state.log_history[-1:]):
            # What was measured in a step that ended before its log must not be averaged into the next one's.
            try:
                trainer.log({})
            except Exception as failure:
                get_logger().error("logging it failed too: %s: %s", type(failure).__name__, failure)


def _newest_checkpoint(output_dir: str) -> str:
    """Which checkpoint of a run can be resumed from, in words."""
    path = last_complete_checkpoint(output_dir)
    if path is None:
        return f"there is no whole checkpoint in {output_dir}"
    return f"the newest whole checkpoint is {path}, resume with resume_from_checkpoint"
