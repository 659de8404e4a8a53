# SPDX-License-Identifier: Apache-2.0
"""The part of [`MXFP4GRPOTrainer`] that has to do with the routers of a mixture of experts."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from ..._logging import get_logger
from ..callbacks.routers import RouterCallback
from ..callbacks.telemetry import Telemetry
from .routing import RolloutRouting


class RouterTraining(Telemetry):
    """Router replay around the training step, and the callback of `router_every`. Does nothing unless asked to.

    Attributes:
        routing: what records and replays, under `router_replay`; else `None`.
        router_callback: under `router_every`; else `None`.
    """

    routing: RolloutRouting | None = None
    router_callback: RouterCallback | None = None

    def _watch_routers(self) -> None:
        """Set up what the config asks for; raises `ValueError` for a model without routers."""
        self._in_step = contextlib.ExitStack()
        if self.args.router_replay:
            if self.tools or self.rollout_func is not None or self.environment_factories is not None:
                raise ValueError(
                    "router_replay=True records rollouts of one generation each; it does not work with tools, "
                    "environment_factory or rollout_func"
                )
            self.routing = RolloutRouting(self.model)
            get_logger().info("router replay: %d routers", len(self.routing.routers))
        if self.args.router_every:
            self.router_callback = RouterCallback(
                self.model,
                self.args.router_every,
                batch=lambda: (self._last_batch.input_ids, self._last_batch.attention_mask),
                record=self._record,
            )
            self.add_callback(self.router_callback)

    @property
    def _replays(self) -> bool:
        """Whether rollouts are recorded and replayed: not in evaluation."""
        return self.routing is not None and self.model.training

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        # Gradient checkpointing runs forward passes in the backward pass: what they depend on must last until then.
        with contextlib.ExitStack() as self._in_step:
            return super().training_step(*args, **kwargs)

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any):
        if self._replays:
            self._in_step.enter_context(self._replayed(inputs))
        return super().compute_loss(model, inputs, *args, **kwargs)

    @contextlib.contextmanager
    def _replayed(self, inputs: dict[str, Any]) -> Iterator[None]:
        with self.routing.training(inputs) as report:
            yield
        values = torch.tensor([[report.coverage, report.changed]], device=self.accelerator.device)
        coverage, changed = self.accelerator.gather(values).mean(dim=0).tolist()
        self._record("router_replay/coverage", coverage)
        self._record("router_replay/changed", changed)
