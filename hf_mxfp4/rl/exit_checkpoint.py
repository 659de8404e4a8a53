# SPDX-License-Identifier: Apache-2.0
"""A checkpoint of a run that ends early: by an exception, Ctrl-C, or SIGTERM from a scheduler."""

import contextlib
import random
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from transformers import Trainer, TrainerCallback

from .._logging import get_logger
from ..checkpoint import last_complete_checkpoint, why_incomplete
from .exact_resume import first_not_finite


class Terminated(SystemExit):
    """SIGTERM reached the process that trains. Its exit code is the one that shells give for it, 143."""

    def __init__(self):
        super().__init__(128 + signal.SIGTERM)

    def __str__(self) -> str:
        return "SIGTERM"


class CheckpointOnExit(TrainerCallback):
    """Saves the last finished optimizer step when training ends early, with the random states and rollouts of its end,
    and stops an update that is not finite. SIGTERM and Ctrl-C are held back while the optimizer updates weights, until
    the step is logged."""

    def __init__(self, trainer: Trainer):
        self.trainer = trainer
        self._update: int | None = None  # steps before the update that is under way, or not logged yet
        self._is_logging = False
        self._learning_rate = 0.0
        self._waiting: BaseException | None = None  # what a signal raises once it is not held back
        self._has_begun = False  # before its first step the state of a resumed run may not have been restored
        #: The last finished step, and the states at its end.
        self._step: int | None = None
        self._restore_random: Callable[[], None] = lambda: None
        self._state: dict[str, Any] = {}

    def on_train_begin(self, args, state, control, **kwargs):
        self._step = None
        self._update = None
        self._waiting = None
        self._has_begun = False
        if self.trainer.is_deepspeed_enabled:
            # It updates weights inside of the backward pass, unless a gradient is not finite.
            engine = self.trainer.accelerator.deepspeed_engine_wrapped.engine
            engine.basic_optimizer.register_step_pre_hook(self._on_update)

    def _on_update(self, *args: Any) -> None:
        self._update = self.trainer.state.global_step

    def on_epoch_begin(self, args, state, control, **kwargs):
        self.remember(state.global_step)

    def on_step_begin(self, args, state, control, **kwargs):
        # An epoch's data loader draws a number before its first step: there, the state before it counts.
        if self._step != state.global_step:
            self.remember(state.global_step)
        self._has_begun = True
        self._raise_what_waits()

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        # In float16 the optimizer itself leaves out updates that are not finite.
        name = None
        if self.trainer.accelerator.scaler is None:
            name = first_not_finite(model, gradients=True)
        if name is not None:
            raise FloatingPointError(
                f"the gradient of step {state.global_step + 1} holds NaN or infinity, among others that of {name}; the "
                "weights were not changed. Look for such values in the rewards and logs of this step; a run that is "
                "resumed repeats it unless learning_rate, the scheme, seed or data change"
            )
        self._update = state.global_step

    def on_optimizer_step(self, args, state, control, **kwargs):
        self._learning_rate = self.trainer._get_learning_rate()  # which is logged, before the schedule moves on

    def on_step_end(self, args, state, control, **kwargs):
        if not control.should_log:
            self._update = None

    @contextlib.contextmanager
    def logging(self) -> Iterator[None]:
        """Hold signals back during a log; that of a finished step ends its update."""
        self._is_logging = True
        try:
            yield
        finally:
            self._is_logging = False
            if self._update != self.trainer.state.global_step:
                self._update = None

    def remember(self, step: int) -> None:
        """Keep the states of now as those at the end of optimizer step ``step``."""
        self._step = step
        self._restore_random = keep_random_states()
        self._state = self.trainer._process_state()

    @contextlib.contextmanager
    def at_step_end(self) -> Iterator[None]:
        """Put random states, rollouts and logs back to the end of the last step, if the next one has begun, while a
        checkpoint is saved."""
        trainer = self.trainer
        if self._step != trainer.state.global_step:
            yield
            return
        restore_random = keep_random_states()
        state = trainer._process_state()
        self._restore_random()
        trainer._load_process_state(self._state)
        try:
            yield
        finally:
            restore_random()
            trainer._load_process_state(state)

    @contextlib.contextmanager
    def checkpoint_on_exit(self) -> Iterator[None]:
        """Save the last finished step whenever this context ends by an exception."""
        signals: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        # Several processes could not save together, each somewhere else; signals end them as they always do.
        if self.trainer.accelerator.num_processes == 1:
            signals = self._signals_as_exceptions()
        try:
            with signals:
                yield
        except BaseException as error:
            self._save(f"training stopped at step {self.trainer.state.global_step} by {type(error).__name__}: {error}")
            # After what was trained is saved: a scheduler may not wait.
            if self.trainer.run_log is not None:
                self.trainer.run_log.stopped_by(error, self.trainer.state)
            raise

    @contextlib.contextmanager
    def _signals_as_exceptions(self) -> Iterator[None]:
        """Have SIGTERM raise [`Terminated`], and neither it nor Ctrl-C interrupt an update; a second one does not wait.
        Only in the main thread, and only in place of the handlers that Python starts with."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        usual: dict[int, Any] = {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
        replaced = {number: handler for number, handler in usual.items() if signal.getsignal(number) is handler}
        for number in replaced:
            signal.signal(number, self._handle)
        try:
            yield
            self._raise_what_waits()
        finally:
            for number, handler in replaced.items():
                signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        error = Terminated() if number == signal.SIGTERM else KeyboardInterrupt()
        is_held = self._is_logging or self._update is not None
        if not is_held or self._waiting is not None:
            raise error
        self._waiting = error

    def _raise_what_waits(self) -> None:
        error = self._waiting
        self._waiting = None
        if error is not None:
            raise error

    def _save(self, what: str) -> None:
        """Save the last finished step, and log ``what`` ended training and what became of the checkpoint."""
        trainer = self.trainer
        logger = get_logger()
        reason = self._why_unsaved()
        if reason is not None:
            logger.error("%s%s", what, reason)
            return
        step = trainer.state.global_step
        folder = Path(trainer._get_output_dir(trial=None)) / f"checkpoint-{step}"
        try:
            if why_incomplete(folder) is not None:
                self._finish_log(step)
                trainer._save_checkpoint(trainer.model, trial=None)
        except Exception as failure:
            kind = type(failure).__name__
            logger.error("%s; saving failed too: %s: %s; %s", what, kind, failure, self._newest_checkpoint())
        else:
            logger.error("%s; saved as %s, resume with resume_from_checkpoint", what, folder)

    def _why_unsaved(self) -> str | None:
        """Return why the last finished step is not saved; `None` where it can be."""
        step = self.trainer.state.global_step
        if not self._has_begun or step == 0:
            return "; nothing was trained yet, so nothing was saved"
        if self.trainer.accelerator.num_processes > 1:
            # Sharded weights are gathered by all ranks together, and the others may not be here.
            return f"; not saved, since other processes may still be training; {self._newest_checkpoint()}"
        if self._update == step:  # a step is counted after its update
            reason = "in the middle of an update; not saved, since the weights are half-updated"
            return f", {reason}; {self._newest_checkpoint()}"
        return None

    def _newest_checkpoint(self) -> str:
        path = last_complete_checkpoint(self.trainer.args.output_dir)
        if path is None:
            return f"there is no whole checkpoint in {self.trainer.args.output_dir}"
        return f"the newest whole checkpoint is {path}, resume with resume_from_checkpoint"

    def _finish_log(self, step: int) -> None:
        """Log step ``step`` if it ended before its log, so that the next one's does not average what it measured."""
        trainer = self.trainer
        if self._step == step:
            return
        if trainer.control.should_log:
            trainer.control.should_evaluate = trainer.control.should_save = False
            try:
                trainer._maybe_log_save_evaluate(
                    trainer._tr_loss, trainer._grad_norm, trainer.model,
                    trial=None, epoch=0.0, ignore_keys_for_eval=None, start_time=None,
                    learning_rate=self._learning_rate,
                )  # fmt: skip
            except Exception as failure:
                get_logger().error("logging it failed too: %s: %s", type(failure).__name__, failure)
        if trainer._globalstep_last_logged == step:  # if a callback failed, they are left
            trainer._metrics["train"].clear()


def keep_random_states() -> Callable[[], None]:
    """Return a function that puts the global random generators of this process back to what they are now."""
    python = random.getstate()
    numpy = np.random.get_state()
    cpu = torch.get_rng_state()
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None

    def restore() -> None:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda)

    return restore
