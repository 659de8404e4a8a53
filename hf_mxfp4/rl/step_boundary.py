# SPDX-License-Identifier: Apache-2.0
"""Where the last finished optimizer step left off, for a checkpoint that is written after the next one has failed."""

from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback

from .resume import random_states, restore_random_states


class StepBoundary(TrainerCallback):
    """Remembers random states and the state of the process as they are before a step begins.

    Args:
        process_state: returns the state to remember; what it refers to is kept, not copied.

    Attributes:
        inside_update: the optimizer began to change the weights and has not finished.
    """

    def __init__(self, process_state: Callable[[], dict[str, Any]]):
        self.process_state = process_state
        self.inside_update = False
        self._step: int | None = None
        self._random: dict[str, Any] = {}
        self._state: dict[str, Any] = {}

    def on_train_begin(self, args, state, control, **kwargs):
        self._step, self.inside_update = None, False

    def on_epoch_begin(self, args, state, control, **kwargs):
        self._remember(state.global_step)

    def on_step_begin(self, args, state, control, **kwargs):
        # An epoch's data loader draws a number before its first step: there, the state before it counts.
        if self._step != state.global_step:
            self._remember(state.global_step)

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.inside_update = True

    def on_step_end(self, args, state, control, **kwargs):
        self.inside_update = False

    def rewind(self, step: int) -> dict[str, Any] | None:
        """Put the random generators back to the end of optimizer step ``step``, and return the process state of then;
        `None`, and nothing is done, when the next step has not begun."""
        if self._step != step:
            return None
        restore_random_states(self._random)
        return self._state

    def _remember(self, step: int) -> None:
        self._step, self._random, self._state = step, random_states(), self.process_state()
