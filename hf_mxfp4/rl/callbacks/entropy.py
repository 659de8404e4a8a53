# SPDX-License-Identifier: Apache-2.0
"""Policy entropy: its slope, and alarms when it collapses or explodes."""

import torch
from transformers import TrainerCallback

from ..._logging import get_logger
from .logs import add_to_log


#: An alarm is raised below this entropy, in nats per token, and above this multiple of the entropy at the start.
_COLLAPSE = 0.05
_EXPLOSION = 2.0
#: Logged values that the entropy at the start is averaged over.
_START_VALUES = 3
#: Logged values that the slope is fitted to.
_SLOPE_VALUES = 20
_CODES = {"": 0, "collapse": -1, "explosion": 1}
_ADVICE = {
    "collapse": "the policy stopped exploring; lower the learning rate, or raise entropy_coef",
    "explosion": "the policy is losing its shape; lower the learning rate, and aqn_sigma_start if aqn is on",
}


class EntropyCallback(TrainerCallback):
    """Follows the policy entropy that the trainer logs, and raises an alarm when it collapses or explodes.

    Adds `entropy/slope` (nats per step, least squares over the last 20 logged values) and `entropy/alarm` (-1 collapse,
    1 explosion, 0 neither) to the log history.

    Attributes:
        history: `(step, entropy)` pairs.
        alarms: `(step, "collapse" or "explosion", entropy)`, one entry for each time an alarm begins.
    """

    def __init__(self):
        self.history: list[tuple[int, float]] = []
        self.alarms: list[tuple[int, str, float]] = []
        self._state = ""

    def on_train_begin(self, args, state, control, **kwargs):
        self.history = [(log["step"], log["entropy"]) for log in state.log_history if log.get("entropy") is not None]

    def on_log(self, args, state, control, logs=None, **kwargs):
        entropy = (logs or {}).get("entropy")
        if entropy is None:
            return
        self.history.append((state.global_step, float(entropy)))
        alarm = self._alarm(float(entropy))
        if alarm and alarm != self._state:
            self.alarms.append((state.global_step, alarm, float(entropy)))
            get_logger().warning("step %d: entropy %s (%.4f): %s", state.global_step, alarm, entropy, _ADVICE[alarm])
        self._state = alarm
        add_to_log(state, logs, {"entropy/slope": self.slope(), "entropy/alarm": _CODES[alarm]})

    def slope(self) -> float:
        """Return nats per step over the last 20 logged values; 0 for fewer than two."""
        recent = torch.tensor(self.history[-_SLOPE_VALUES:], dtype=torch.float64)
        if len(recent) < 2:
            return 0.0
        # The line of least squares.
        step, entropy = (recent - recent.mean(dim=0)).unbind(dim=1)
        spread = step.square().sum()
        if spread == 0:
            return 0.0
        return float((step * entropy).sum() / spread)

    def _alarm(self, entropy: float) -> str:
        if entropy < _COLLAPSE:
            return "collapse"
        start = [value for _, value in self.history[:_START_VALUES]]
        if len(self.history) > _START_VALUES and entropy > _EXPLOSION * sum(start) / len(start):
            return "explosion"
        return ""
