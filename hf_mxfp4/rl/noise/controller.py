# SPDX-License-Identifier: Apache-2.0
"""Adaptive quantization noise in a closed loop: as strong as it takes to keep the policy's entropy at a target."""

import math
from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback

from ..._logging import get_logger
from .schedule import check_bounds


#: Steps that the entropy at the start is averaged over, where it decides the target.
_START_STEPS = 3
#: The target as a share of the entropy at the start: a policy that learns loses some, and noise that kept all of it
#: would keep it from learning.
_SHARE_KEPT = 0.5
#: Change of ln(sigma) in a step for each unit of ln(target / entropy). The entropy answers to noise through training,
#: steps later; a quarter keeps the loop from swinging.
_GAIN = 0.25


class EntropyNoiseController(TrainerCallback):
    """Moves the standard deviation of rollout noise so that the policy entropy stays at a target.

    After each optimizer step, with the mean entropy ``H`` (nats per token) of its micro-batches::

        ln(sigma) += clip(0.25 ln(target / H), -rate_limit, rate_limit),   low <= sigma <= high

    ``H`` is what the trainer logs as `entropy`: of the clean policy, in the forward pass that trains it, never of the
    noisy one that samples; and of the completions of all processes together, so that all move alike. Noise raises it
    through what is learned from more varied rollouts.

    Rollouts are noise-free until there is a target and an entropy to compare with it: at step 0, or, where the target
    is taken from the entropy at the start, in the first 3 steps. Then sigma starts at ``low``.

    Metrics: `aqn/target_entropy`, and `aqn/saturated`: 1 while sigma is at ``high`` and the entropy below the target,
    -1 while it is at ``low`` and the entropy above, else 0. The first time that ``high`` is not enough, that is warned
    of.

    Args:
        low, high: bounds of sigma.
        target: entropy in nats per token; `None` for half of that in the first 3 steps.
        rate_limit: largest change of ``ln(sigma)`` in a step.
        record: called with a metric's name and value, normally the trainer's log.

    Attributes:
        sigma: for the rollouts of the next step.
        target: the one in force; `None` until it is known.
        saturated: as in the metric.

    Raises `ValueError` for bounds, a target or a rate that mean nothing.
    """

    def __init__(
        self,
        low: float,
        high: float,
        target: float | None = None,
        rate_limit: float = 0.05,
        record: Callable[[str, float], None] | None = None,
    ):
        check_bounds(high, low)
        if target is not None and not (math.isfinite(target) and target > 0):
            raise ValueError(f"aqn_target_entropy={target} must be a positive number of nats per token")
        if not (math.isfinite(rate_limit) and rate_limit > 0):
            raise ValueError(f"aqn_rate_limit={rate_limit} must be a positive number")
        self.low, self.high, self.rate_limit, self.record = low, high, rate_limit, record
        self.target = self._given = target
        self.sigma = 0.0
        self.saturated = 0
        self._observed: list[float] = []
        self._start: list[float] = []
        self._warned = False

    def observe(self, entropy: float) -> None:
        """The entropy of a micro-batch of the step that is being taken; the same on all processes."""
        self._observed.append(float(entropy))

    def on_step_end(self, args, state, control, **kwargs):
        self.update()

    def update(self) -> None:
        """Move sigma by what was observed since the last call.

        Raises:
            RuntimeError: nothing was observed, or the entropy that the target is to be taken from is 0.
        """
        if not self._observed:
            raise RuntimeError(
                "aqn_schedule='entropy' needs the policy entropy, which this trainer's loss does not log; choose "
                "another aqn_schedule"
            )
        finite = [value for value in self._observed if math.isfinite(value)]
        self._observed = []
        if finite:  # a step whose completions are all masked has no entropy, and changes nothing
            self._move(sum(finite) / len(finite))
        if self.record is not None and self.target is not None:
            self.record("aqn/target_entropy", self.target)
            self.record("aqn/saturated", self.saturated)

    def _move(self, entropy: float) -> None:
        if self.target is None:
            self._start.append(entropy)
            if len(self._start) < _START_STEPS:
                return
            self.target = _SHARE_KEPT * sum(self._start) / _START_STEPS
            if not self.target > 0:
                raise RuntimeError("the policy has no entropy at the start of training; give aqn_target_entropy")
        if self.sigma == 0:
            self.sigma = self.low
        else:
            # A collapsed policy has entropy 0, of which there is no logarithm.
            change = _GAIN * math.log(self.target / max(entropy, 1e-9 * self.target))
            change = min(max(change, -self.rate_limit), self.rate_limit)
            self.sigma = min(max(self.sigma * math.exp(change), self.low), self.high)
        below, above = entropy < self.target, entropy > self.target
        self.saturated = int(below and self.sigma == self.high) - int(above and self.sigma == self.low)
        if self.saturated == 1 and not self._warned:
            self._warned = True
            get_logger().warning(
                "the policy entropy is %.4f, and noise of aqn_sigma_start=%g is not enough to raise it to its target "
                "of %.4f; raise aqn_sigma_start or entropy_coef, lower aqn_target_entropy, or lower the learning rate",
                entropy,
                self.high,
                self.target,
            )

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run continues from."""
        return {
            "sigma": self.sigma,
            "target": self.target,
            "saturated": self.saturated,
            "start": list(self._start),
            "warned": self._warned,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what [`state_dict`] returned; towards another target where one was given since."""
        self.sigma, self.saturated = state["sigma"], state["saturated"]
        self.target = state["target"] if self._given is None else self._given
        self._start, self._warned, self._observed = list(state["start"]), state["warned"], []
