# SPDX-License-Identifier: Apache-2.0
"""Where the time of a GRPO step goes: seconds of each phase, by methods of a trainer that are wrapped from outside."""

import functools
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback


#: What a step that is being measured consists of, beside ``"rest"``: what lies between them.
PHASES = ("generation", "scoring", "log-probabilities", "forward", "backward", "optimizer", "callbacks", "logging")
REST = "rest"

Seconds = tuple[float, float]


def _now() -> Seconds:
    return time.perf_counter(), time.process_time()


class PhaseClock(TrainerCallback):
    """Seconds of the phases of each step, by the clock and of processors, as pairs.

    A step lasts from one `on_step_begin` to the next, or to the end of training. What runs within a phase and is itself
    one, as generation within scoring, counts for itself alone.

    Attributes:
        steps: by phase, one dictionary for each step; ``"rest"`` is what is in none.
    """

    def __init__(self):
        self.steps: list[dict[str, Seconds]] = []
        self._open: list[str] = []
        self._found: dict[str, list[float]] = {}
        self._since: Seconds = (0.0, 0.0)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._end_step()
        self._found = defaultdict(lambda: [0.0, 0.0])

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._end_step()
        self._found = {}

    def wrap(self, owner: Any, name: str, phase: str) -> None:
        """Count calls of a method of an object for ``phase``."""
        method = getattr(owner, name)

        @functools.wraps(method)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self._pass()
            self._open.append(phase)
            try:
                return method(*args, **kwargs)
            finally:
                self._pass()
                self._open.pop()

        setattr(owner, name, wrapped)

    def _pass(self) -> None:
        """Count the time since the last change of phases for the one that was open."""
        now = _now()
        if isinstance(self._found, defaultdict):
            seconds = self._found[self._open[-1] if self._open else REST]
            for clock in range(2):
                seconds[clock] += now[clock] - self._since[clock]
        self._since = now

    def _end_step(self) -> None:
        self._pass()
        if self._found:
            self.steps.append({phase: tuple(seconds) for phase, seconds in self._found.items()})


def watch(trainer: Any) -> PhaseClock:
    """A clock of the steps of a TRL trainer, or of one that is derived from it."""
    clock = PhaseClock()
    # Innermost, where ours and TRL's have the same name: what ours does around TRL's belongs to the phase.
    for name, phase in (
        ("_generate", "generation"),
        ("_generate_and_score_completions", "scoring"),
        ("compute_loss", "forward"),
        ("log", "logging"),
    ):
        clock.wrap(trainer, name, phase)
    _wrap_log_probs(trainer, clock)
    clock.wrap(trainer.accelerator, "backward", "backward")
    clock.wrap(trainer.accelerator, "clip_grad_norm_", "optimizer")
    _wrap_optimizer(trainer, clock)
    clock.wrap(trainer.callback_handler, "call_event", "callbacks")
    trainer.callback_handler.callbacks.append(clock)
    return clock


def _wrap_log_probs(trainer: Any, clock: PhaseClock) -> None:
    """Log-probabilities that are computed while completions are scored are a phase; those of the loss are forward."""
    method = trainer._get_per_token_logps_and_entropies
    clock.wrap(trainer, "_get_per_token_logps_and_entropies", "log-probabilities")
    counted = trainer._get_per_token_logps_and_entropies

    def chosen(*args: Any, **kwargs: Any) -> Any:
        return (method if "forward" in clock._open else counted)(*args, **kwargs)

    trainer._get_per_token_logps_and_entropies = chosen


def _wrap_optimizer(trainer: Any, clock: PhaseClock) -> None:
    """A trainer makes its optimizer anew in each training."""
    create: Callable[..., Any] = trainer.create_optimizer

    def created(*args: Any, **kwargs: Any) -> Any:
        optimizer = create(*args, **kwargs)
        clock.wrap(optimizer, "step", "optimizer")
        return optimizer

    trainer.create_optimizer = created
