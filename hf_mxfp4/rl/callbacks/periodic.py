# SPDX-License-Identifier: Apache-2.0
"""The base of callbacks that measure something every few steps."""

from collections.abc import Callable
from typing import Any, ClassVar

from transformers import TrainerCallback, TrainerState


#: Called with a metric's name and value.
Record = Callable[[str, float], None]


class PeriodicCallback(TrainerCallback):
    """Measures something every few steps of a run.

    Attributes:
        option: the option of `MXFP4GRPOConfig` that says how many steps are between two measurements, 0 for never.
        metrics: some of the names that it logs.
        history: a dictionary per measurement, or per measurement and layer.
    """

    option: ClassVar[str] = "error_every"
    metrics: ClassVar[tuple[str, ...]]

    def __init__(self, every: int, record: Record | None):
        self.every = every
        self.record = record
        self.history: list[dict] = []

    @classmethod
    def for_trainer(cls, trainer: Any, every: int) -> "PeriodicCallback | None":
        """Return the callback of a [`MXFP4GRPOTrainer`]; `None` where its model has nothing to measure."""
        raise NotImplementedError

    def is_due(self, state: TrainerState, step: int) -> bool:
        """Return whether optimizer step ``step``, counted from 1, is measured: every few steps, and the last."""
        return step % self.every == 0 or step == state.max_steps
