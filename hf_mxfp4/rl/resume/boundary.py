# SPDX-License-Identifier: Apache-2.0
"""Where the last finished optimizer step left off, for a checkpoint that is written after the next one has failed."""

from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerState

from .state import not_finite, random_states, restore_random_states


class StepBoundary(TrainerCallback):
    """Remembers random states and the state of the process before each step, and stops an update that is not finite.

    Args:
        process_state: returns the state to remember; what it refers to is kept, not copied.
        skips_overflow: whether the optimizer itself leaves out updates that are not finite, as in float16.
    """

    def __init__(self, process_state: Callable[[], dict[str, Any]], skips_overflow: bool = False):
        self.process_state, self.skips_overflow = process_state, skips_overflow
        self._update: tuple[TrainerState, int] | None = None
        self._waiting: BaseException | None = None
        #: Whether a step of this run has begun: before, its state may not have been restored.
        self.has_begun = False
        self._step: int | None = None
        self._random: dict[str, Any] = {}
        self._state: dict[str, Any] = {}

    def on_train_begin(self, args, state, control, **kwargs):
        self._step = self._update = self._waiting = None
        self.has_begun = False

    def on_epoch_begin(self, args, state, control, **kwargs):
        self.remember(state.global_step)

    def on_step_begin(self, args, state, control, **kwargs):
        # An epoch's data loader draws a number before its first step: there, the state before it counts.
        if self._step != state.global_step:
            self.remember(state.global_step)
        self.has_begun = True
        self.raise_what_waits()

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.check_gradients(state.global_step, model)
        self._update = state, state.global_step

    def on_step_end(self, args, state, control, **kwargs):
        self._update = None

    @property
    def finishes_step(self) -> bool:
        """Whether the optimizer began to change the weights and callbacks have not all seen the end of the step."""
        return self._update is not None

    @property
    def inside_update(self) -> bool:
        """Whether the optimizer began to change the weights and the step has not been counted yet."""
        return self._update is not None and self._update[0].global_step == self._update[1]

    def leave_with(self, error: BaseException) -> None:
        """Raise this before the next step begins."""
        self._waiting = error

    def raise_what_waits(self) -> None:
        """Raise what [`leave_with`] was given, if anything."""
        error, self._waiting = self._waiting, None
        if error is not None:
            raise error

    def rewind(self, step: int) -> dict[str, Any] | None:
        """Put the random generators back to the end of optimizer step ``step``, and return the process state of then;
        `None`, and nothing is done, when the next step has not begun."""
        if self._step != step:
            return None
        restore_random_states(self._random)
        return self._state

    def check_gradients(self, step: int, model: nn.Module) -> None:
        """Raise `FloatingPointError` before an update that would make weights NaN or infinite."""
        if self.skips_overflow or (name := not_finite(model, gradients=True)) is None:
            return
        raise FloatingPointError(
            f"the gradient of step {step + 1} holds NaN or infinity, among others that of {name}; the weights were not "
            "changed. Look for such values in the rewards and logs of this step; a run that is resumed repeats it "
            "unless learning_rate, the scheme, seed or data change"
        )

    def remember(self, step: int) -> None:
        """Take the states of now for those of the end of optimizer step ``step``."""
        self._step, self._random, self._state = step, random_states(), self.process_state()
