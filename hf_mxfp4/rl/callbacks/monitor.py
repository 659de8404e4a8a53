# SPDX-License-Identifier: Apache-2.0
"""What watches the policy while it trains: the callbacks that a config asks for, and the batch that they measure on."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback

from ..._logging import get_logger
from ...layers import QUANTIZED, TRAINABLE, random_layers
from ..config import MXFP4GRPOConfig
from .activation_errors import ActivationErrorCallback, spread_modules
from .base import EntropyCallback, ErrorCallback, QuantizationStepCallback
from .movement import StepMovementCallback, movement_unsupported_reason
from .report import RunReportCallback
from .routers import RouterCallback


#: Called with a metric's name and value.
Record = Callable[[str, float], None]


class PolicyMonitor:
    """Callbacks as the config asks for them; each is `None` where it is switched off or cannot measure anything.

    Args:
        model: the policy.
        args: of the trainer.
        n_quantized: how many of its weight matrices are in MXFP4.
        record: adds to the next training log.
        record_mean: the same, of the mean over all processes, which must all call it.
        facts: as of [`RunReportCallback`].

    Attributes:
        entropy, report, errors, activations, movement, routers: the callbacks.
        last_batch: token ids and attention mask ``[batch, length]`` that were trained on; `None` before, and where the
            model needs more than its tokens.
        first, last: all callbacks, those that go before the trainer's own and those that go after them.
    """

    def __init__(
        self,
        model: nn.Module,
        args: MXFP4GRPOConfig,
        n_quantized: int,
        record: Record,
        record_mean: Record,
        facts: Callable[[], dict[str, Any]],
    ):
        self._args, self._record, self._record_mean = args, record, record_mean
        self.errors: ErrorCallback | None = None
        self.activations: ActivationErrorCallback | None = None
        self.movement: StepMovementCallback | None = None
        self.report: RunReportCallback | None = None
        self.routers: RouterCallback | None = None
        self.last_batch: tuple[torch.Tensor, torch.Tensor] | None = None
        self.entropy = EntropyCallback(args.entropy_collapse, args.entropy_explosion)
        # First in line: what the one adds to the logs reaches the trackers, which are callbacks too, and the other has
        # written it down when a tracker fails.
        self.first: list[TrainerCallback] = [self.entropy]
        self.last: list[TrainerCallback] = []
        if args.report_every:
            self.report = RunReportCallback(args.report_every, facts)
            self.first.append(self.report)
        if args.error_every and args.error_layers:
            self._watch_errors(model, n_quantized)
        if args.movement_every:
            self._watch_movement(model)
        if random_layers(model):
            self.last.append(QuantizationStepCallback())
        if args.router_every:
            self.routers = RouterCallback(model, args.router_every, lambda: self.last_batch, record)
            self.last.append(self.routers)

    @contextlib.contextmanager
    def watching(self, inputs: dict[str, Any]) -> Iterator[None]:
        """Around the loss of a training batch, which the callbacks measure on later."""
        attention_mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        # A model of images needs more than the tokens, and is not measured on them.
        if inputs.get("pixel_values") is None:
            self.last_batch = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1), attention_mask
        with contextlib.nullcontext() if self.activations is None else self.activations.observing(attention_mask):
            yield

    def _watch_errors(self, model: nn.Module, n_quantized: int) -> None:
        every, layers = self._args.error_every, self._args.error_layers
        trainable, any_layer = _trainable_layer(model), _first(model, QUANTIZED)
        reason = any_layer.config.weights_alone_unsupported_reason if any_layer is not None else None
        if reason:
            get_logger().warning("no error components are measured: %s", reason)
        # Packed weights are frozen, and the weights that their error would be measured against are gone.
        elif trainable is not None:
            self.errors = ErrorCallback(every, layers, self._record)
            self.last.append(self.errors)
        if not reason and not self._args.torch_compile and spread_modules(model, layers):
            self.activations = ActivationErrorCallback(model, every, layers, self._record_mean)
            self.last.append(self.activations)
        get_logger().info(
            "errors every %d steps: weights %s, activations %s",
            every,
            f"of {min(layers, n_quantized)} layers" if self.errors else "no",
            f"of {len(self.activations.chosen)} layers" if self.activations else "no",
        )

    def _watch_movement(self, model: nn.Module) -> None:
        trainable = _trainable_layer(model)
        reason = trainable.config.weights_alone_unsupported_reason if trainable is not None else None
        if reason:
            get_logger().warning("no movement of quantized weights is measured: %s", reason)
        elif movement_unsupported_reason(model) is None:  # frozen and packed weights do not move
            self.movement = StepMovementCallback(self._args.movement_every, record=self._record)
            self.last.append(self.movement)


def _trainable_layer(model: nn.Module) -> nn.Module | None:
    return _first(model, TRAINABLE)


def _first(model: nn.Module, kinds: tuple[type[nn.Module], ...]) -> nn.Module | None:
    return next((module for module in model.modules() if isinstance(module, kinds)), None)
