# SPDX-License-Identifier: Apache-2.0
"""Experiment trackers (`report_to`) that become unreachable do not end a run that is under way."""

import contextlib
import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from transformers import TrainerCallback, TrainerControl
from transformers.trainer_callback import CallbackHandler
from trl.extras import profiling
from trl.trainer import grpo_trainer

from ..._logging import get_logger


#: Where TRL writes to trackers itself, past the callbacks: the modules' names of them, and what it calls.
_WRITERS, _TRACKERS, _CALLED = (profiling, grpo_trainer), ("wandb", "mlflow", "trackio"), ("log", "log_metrics")


class TolerantHandler(CallbackHandler):
    """Calls callbacks as [`transformers.trainer_callback.CallbackHandler`] does; the trackers among them (those of
    transformers' `report_to` and classes derived from them) have their exceptions reported instead of raised. Other
    callbacks are left alone: their failing is an error.

    A tracker that cannot start still ends training, before the first step. Later on the first failure is a warning, all
    further events are tried, and the end of training says how many failed.

    Args:
        handler: whose callbacks and objects this one goes on with.
    """

    def __init__(self, handler: CallbackHandler):
        vars(self).update(vars(handler))
        self._failures: defaultdict[int, Counter[str]] = defaultdict(Counter)

    def call_event(self, event: str, args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> TrainerControl:
        """Call all callbacks, those that are trackers guarded."""
        for callback in self.callbacks:
            alone = CallbackHandler.__new__(CallbackHandler)
            vars(alone).update({**vars(self), "callbacks": [callback]})
            call = functools.partial(alone.call_event, event, args, state, **kwargs)
            control = self._attempt(callback, event, call, control) if is_tracker(callback) else call(control=control)
        return control

    def _attempt(
        self, tracker: TrainerCallback, event: str, call: Callable[..., TrainerControl], control: TrainerControl
    ) -> TrainerControl:
        name, failures = type(tracker).__name__, self._failures[id(tracker)]
        if event == "on_train_begin":
            failures.clear()
        try:
            return call(control=control)
        except Exception as error:
            if event in ("on_init_end", "on_train_begin"):
                get_logger().error("the tracker %s could not start; report_to='none' trains without it", name)
                raise
            failures[event] += 1
            if failures.total() == 1:
                get_logger().warning(
                    "the tracker %s failed in %s (%s: %s): training goes on. What it misses is in the log history of "
                    "the trainer and of its checkpoints (trainer_state.json)",
                    name,
                    event,
                    type(error).__name__,
                    error,
                )
            return control
        finally:
            if event == "on_train_end" and failures:
                counts = ", ".join(f"{each} {number}" for each, number in failures.items())
                get_logger().warning("the tracker %s failed %d times: %s", name, failures.total(), counts)


@contextlib.contextmanager
def guard_direct_writes() -> Iterator[None]:
    """Within this context a tracker that fails where TRL writes to it without a callback (the times of its methods, and
    the table of `log_completions`) is a warning, the first time; the end of the context says how often it failed.

    TRL calls the trackers' modules by name in the middle of its methods, where no override reaches: the names that it
    calls are replaced for as long as the context lasts.
    """
    replaced = [(module, name, vars(module)[name]) for module in _WRITERS for name in _TRACKERS if name in vars(module)]
    failures: Counter[str] = Counter()
    for module, name, tracker in replaced:
        setattr(module, name, _DirectWrites(tracker, name, failures))
    try:
        yield
    finally:
        for module, name, tracker in replaced:
            setattr(module, name, tracker)
        for name, number in failures.items():
            get_logger().warning("%s failed %d times where TRL writes to it without a callback", name, number)


class _DirectWrites:
    """The module of a tracker, of which what TRL calls reports exceptions instead of raising them."""

    def __init__(self, tracker: Any, name: str, failures: Counter):
        self._tracker, self._name, self._failures = tracker, name, failures

    def __getattr__(self, attribute: str) -> Any:
        value = getattr(self._tracker, attribute)  # now: wandb puts others in their place when a run begins
        return functools.partial(self._attempt, value) if attribute in _CALLED else value

    def _attempt(self, write: Callable, *args: Any, **kwargs: Any) -> Any:
        try:
            return write(*args, **kwargs)
        except Exception as error:
            self._failures[self._name] += 1
            if self._failures[self._name] == 1:
                get_logger().warning(
                    "%s failed (%s: %s): training goes on. TRL writes the times of its methods there, and the table of "
                    "log_completions, which is in the output folder too",
                    self._name,
                    type(error).__name__,
                    error,
                )
            return None


def is_tracker(callback: TrainerCallback) -> bool:
    """Whether this is one of transformers' integrations with experiment trackers."""
    return any(base.__module__.startswith("transformers.integrations.") for base in type(callback).__mro__)
