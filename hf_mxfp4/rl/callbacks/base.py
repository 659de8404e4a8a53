# SPDX-License-Identifier: Apache-2.0
"""Callbacks that watch a quantized policy while it trains."""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn
from transformers import TrainerCallback

from ..._logging import get_logger
from ...layers import WeightMatrix, gathered, set_quantization_step, trainable_matrices
from ...numerics import decompose_scheme


Layer = TypeVar("Layer")

#: Logged values that the entropy at the start is averaged over.
_START_VALUES = 3
#: Logged values that the slope is fitted to.
_SLOPE_VALUES = 20


class EntropyCallback(TrainerCallback):
    """Follows the policy entropy that the trainer logs, and raises an alarm when it collapses or explodes.

    Adds `entropy/slope` (nats per step, least squares over the last 20 logged values) and `entropy/alarm` (-1 collapse,
    1 explosion, 0 neither) to the log history.

    Args:
        collapse: alarm below this entropy, in nats per token; 0 switches it off.
        explosion: alarm above this multiple of the entropy at the start; 0 switches it off.

    Attributes:
        history: `(step, entropy)` pairs.
        alarms: `(step, "collapse" or "explosion", entropy)`, one entry for each time an alarm begins.
    """

    def __init__(self, collapse: float = 0.05, explosion: float = 2.0):
        self.collapse = collapse
        self.explosion = explosion
        self.history: list[tuple[int, float]] = []
        self.alarms: list[tuple[int, str, float]] = []
        self._state = ""

    def on_train_begin(self, args, state, control, **kwargs):
        self.history = [(entry["step"], entry["entropy"]) for entry in state.log_history if "entropy" in entry]

    def on_log(self, args, state, control, logs=None, **kwargs):
        entropy = (logs or {}).get("entropy")
        if entropy is None:
            return
        self.history.append((state.global_step, float(entropy)))
        alarm = self._alarm(float(entropy))
        if alarm and alarm != self._state:
            self.alarms.append((state.global_step, alarm, float(entropy)))
            advice = {
                "collapse": "the policy stopped exploring; raise aqn_sigma_start or entropy_coef, or lower the rate",
                "explosion": "the policy is losing its shape; lower aqn_sigma_start or the learning rate",
            }[alarm]
            get_logger().warning("step %d: entropy %s (%.4f): %s", state.global_step, alarm, entropy, advice)
        self._state = alarm
        values = {"entropy/slope": self.slope(), "entropy/alarm": {"": 0, "collapse": -1, "explosion": 1}[alarm]}
        if state.log_history:
            state.log_history[-1].update(values)
        logs.update(values)

    def slope(self) -> float:
        """Nats per step over the last 20 logged values; 0 for fewer than two."""
        recent = torch.tensor(self.history[-_SLOPE_VALUES:], dtype=torch.float64)
        if len(recent) < 2:
            return 0.0
        step, entropy = (recent - recent.mean(dim=0)).unbind(dim=1)
        spread = step.square().sum()
        return float((step * entropy).sum() / spread) if spread > 0 else 0.0

    def _alarm(self, entropy: float) -> str:
        if self.collapse and entropy < self.collapse:
            return "collapse"
        if self.explosion and len(self.history) > _START_VALUES:
            start = sum(value for _, value in self.history[:_START_VALUES]) / _START_VALUES
            if entropy > self.explosion * start:
                return "explosion"
        return ""


class ErrorCallback(TrainerCallback):
    """Splits the weights' quantization error into its three components every few steps, for a few layers.

    Metrics: `error/scale_bias`, `error/deadzone`, `error/grid` (energy over that of the whole error), `error/sqnr_db`,
    means over the layers.

    Args:
        every: steps between measurements; also measured before the first step and at the end.
        layers: number of layers, evenly spread over the model's.
        record: called with a metric's name and value, normally the trainer's log.

    Attributes:
        history: one dictionary per measurement: `step`, `layer` and the metrics of that layer.

    Raises `ValueError` at the start of training when the model has no quantized layer.
    """

    def __init__(self, every: int = 50, layers: int = 4, record: Callable[[str, float], None] | None = None):
        self.every = every
        self.layers = layers
        self.record = record
        self.history: list[dict] = []
        self._chosen: dict[str, WeightMatrix] = {}

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self._chosen = spread_layers(model, self.layers)
        if not self._chosen:
            raise ValueError(f"{type(model).__name__} has no MXFP4 layer whose error could be measured")
        if state.global_step == 0:
            self._measure(state.global_step)

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % self.every == 0 or state.global_step == state.max_steps:
            self._measure(state.global_step)

    def _measure(self, step: int) -> None:
        measured = []
        for name, matrix in self._chosen.items():
            with gathered(getattr(matrix.layer, matrix.parameter)) as weight:
                parts = decompose_scheme(matrix.of(weight), matrix.layer.config.weight_scheme)
            metrics = {f"error/{part}": value for part, value in parts.energy_ratio.items()}
            metrics["error/sqnr_db"] = parts.sqnr_db
            measured.append(metrics)
            self.history.append({"step": step, "layer": name, **metrics})
        if self.record is not None:
            for key in measured[0]:
                self.record(key, sum(metrics[key] for metrics in measured) / len(measured))


class QuantizationStepCallback(TrainerCallback):
    """Tells the layers that draw random numbers which step they are in, so that a resumed run repeats them.

    Raises `ValueError` at the first step of a model without such a layer.
    """

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        set_quantization_step(model, state.global_step)


def spread_layers(model: nn.Module, count: int) -> dict[str, WeightMatrix]:
    """The weights of at most ``count`` quantized layers, evenly spread from the first to the last; each projection of
    each expert counts as a layer."""
    return evenly_spread([(matrix.name, matrix) for matrix in trainable_matrices(model)], count)


def evenly_spread(found: list[tuple[str, Layer]], count: int) -> dict[str, Layer]:
    """At most ``count`` of the named layers, evenly spread from the first to the last."""
    count = min(count, len(found))
    if count <= 1:
        return dict(found[:count])
    return dict(found[round(i * (len(found) - 1) / (count - 1))] for i in range(count))
