# SPDX-License-Identifier: Apache-2.0
"""The part of [`MXFP4GRPOTrainer`] that watches the policy: callbacks, what they measure on, and the run report."""

import contextlib
from typing import Any

import torch
from torch import nn
from trl import GRPOTrainer

from ..._logging import get_logger
from ...layers import TRAINABLE, fallback_thresholds, random_layers
from .activation_errors import ActivationErrorCallback, spread_modules
from .base import EntropyCallback, ErrorCallback, FallbackCallback, QuantizationStepCallback
from .movement import StepMovementCallback, movement_obstacle
from .policy import GradientGainCallback, TemperatureCallback, TrainingBatch, can_compare
from .report import RunReportCallback
from .run_facts import run_facts


class Telemetry(GRPOTrainer):
    """Callbacks as the config asks for them; each is `None` where it is switched off or cannot measure anything.

    Attributes:
        entropy_callback, error_callback, activation_callback, temperature_callback, gradient_gain_callback,
        movement_callback, report_callback: what watches.
    """

    error_callback: ErrorCallback | None = None
    activation_callback: ActivationErrorCallback | None = None
    temperature_callback: TemperatureCallback | None = None
    gradient_gain_callback: GradientGainCallback | None = None
    movement_callback: StepMovementCallback | None = None
    report_callback: RunReportCallback | None = None

    def _watch_policy(self) -> None:
        args = self.args
        self._last_batch: TrainingBatch | None = None
        self.entropy_callback = EntropyCallback(args.entropy_collapse, args.entropy_explosion)
        first = [self.entropy_callback]
        if args.report_every:
            self.report_callback = RunReportCallback(
                args.report_every, facts=lambda: run_facts(self), profiles=self._gradient_profiles
            )
            first.append(self.report_callback)
        # First in line: what the one adds to the logs reaches the trackers, which are callbacks too, and the other has
        # written it down when a tracker fails.
        self.callback_handler.callbacks[:0] = first
        if args.error_every and args.error_layers:
            self._watch_errors()
        if args.gradient_gain_every:
            self._watch_gradients()
        if args.movement_every:
            self._watch_movement()
        if fallback_thresholds(self.model):
            # Ahead of all callbacks that may fail: a step that is counted has moved the thresholds.
            self.callback_handler.callbacks.insert(0, FallbackCallback(record=self._record))
        if random_layers(self.model):
            self.add_callback(QuantizationStepCallback())

    def _watch_errors(self) -> None:
        every, layers = self.args.error_every, self.args.error_layers
        trainable = self._trainable_layer()
        obstacle = trainable.config.packing_obstacle if trainable is not None else None
        if obstacle:
            get_logger().warning("no error components are measured: %s", obstacle)
        # Packed weights are frozen, and the weights that their error would be measured against are gone.
        elif trainable is not None:
            self.error_callback = ErrorCallback(every, layers, record=self._record)
            self.add_callback(self.error_callback)
        if not obstacle and not self.args.torch_compile and spread_modules(self.model, layers):
            self.activation_callback = ActivationErrorCallback(self.model, every, layers, self._record_mean)
            self.add_callback(self.activation_callback)
        if trainable is not None and can_compare(self.model):
            self.temperature_callback = TemperatureCallback(
                self.model, every, batch=lambda: self._last_batch, record=self._record_mean
            )
            self.add_callback(self.temperature_callback)
        get_logger().info(
            "errors every %d steps: weights %s, activations %s, effective temperature %s",
            every,
            f"of {min(layers, self.n_quantized)} layers" if self.error_callback else "no",
            f"of {len(self.activation_callback.chosen)} layers" if self.activation_callback else "no",
            "yes" if self.temperature_callback else "no",
        )

    def _watch_gradients(self) -> None:
        plugin = self.accelerator.state.deepspeed_plugin if self.is_deepspeed_enabled else None
        if self.is_fsdp_enabled or plugin is not None and plugin.zero_stage == 3:
            reason = "weights are sharded, and its backward passes go past the engine that gathers them"
        elif self._trainable_layer() is None:
            reason = "the model has no quantized layer with master weights to compare with"
        elif not can_compare(self.model):
            reason = "some weights are packed, and exist in 4 bits only"
        else:
            self.gradient_gain_callback = GradientGainCallback(
                self.model, self.args.gradient_gain_every, batch=lambda: self._last_batch, record=self._record_mean
            )
            self.add_callback(self.gradient_gain_callback)
            get_logger().info(
                "gradient gain every %d steps, on at most %d tokens of the last training batch",
                self.args.gradient_gain_every,
                self.gradient_gain_callback.max_tokens,
            )
            return
        get_logger().info("gradient gain is not measured: %s", reason)

    def _watch_movement(self) -> None:
        trainable = self._trainable_layer()
        obstacle = trainable.config.packing_obstacle if trainable is not None else None
        if obstacle:
            get_logger().warning("no movement of quantized weights is measured: %s", obstacle)
        elif movement_obstacle(self.model) is None:  # frozen and packed weights do not move
            self.movement_callback = StepMovementCallback(self.args.movement_every, record=self._record)
            self.add_callback(self.movement_callback)

    def _trainable_layer(self) -> nn.Module | None:
        return next((module for module in self.model.modules() if isinstance(module, TRAINABLE)), None)

    def _gradient_profiles(self) -> list[dict]:
        return self.gradient_gain_callback.history if self.gradient_gain_callback is not None else []

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any):
        if not self.model.training:
            return super().compute_loss(model, inputs, *args, **kwargs)
        attention_mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        # A model of images needs more than the tokens, and is not measured on them.
        if inputs.get("pixel_values") is None:
            self._last_batch = TrainingBatch(
                torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
                attention_mask,
                torch.cat([torch.zeros_like(inputs["prompt_mask"]), inputs["completion_mask"]], dim=1),
            )
        observer = self.activation_callback
        with contextlib.nullcontext() if observer is None else observer.observing(attention_mask):
            return super().compute_loss(model, inputs, *args, **kwargs)

    def _report_error(self, error: BaseException) -> None:
        """Put into the run report what ended training. After what was trained is saved: a scheduler may not wait."""
        if self.report_callback is not None:
            self.report_callback.stopped_by(error, self.state)

    def _record(self, name: str, value: float) -> None:
        """Add to the next training log, where values of one name are averaged."""
        self._metrics["train"][name].append(value)

    def _record_mean(self, name: str, value: float) -> None:
        """[`_record`] the mean over all processes, which must all call this; NaN does not count."""
        values = self.accelerator.gather(torch.tensor([value], dtype=torch.float32, device=self.accelerator.device))
        self._record(name, values.nanmean().item())
