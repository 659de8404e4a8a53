# SPDX-License-Identifier: Apache-2.0
"""The callback that splits the quantization error of activations into its components while a policy trains."""

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback

from ...layers import QUANTIZED
from ...numerics import COMPONENTS, decompose_scheme
from .base import evenly_spread


#: Tokens of a layer's input that are looked at, evenly spread over those of the batch.
_MAX_TOKENS = 1024


class ActivationErrorCallback(TrainerCallback):
    """Splits the quantization error of layer inputs into its three components (arXiv 2605.20402, section 3), seen by
    hooks during a training forward pass that happens anyway.

    Metrics: `error/activations/scale_bias`, `error/activations/deadzone`, `error/activations/grid` (energy over that of
    the whole error) and `error/activations/sqnr_db`, means over the layers, at most 1024 tokens of each. Padding does
    not count. Of experts, what enters them is measured.

    Args:
        model: the policy.
        every: steps between measurements; also measured in the first step and in the last.
        layers: number of layers, evenly spread over the model's.
        record: called with a metric's name and value, normally the trainer's log.

    Attributes:
        history: one dictionary per measurement and layer: `step`, `layer` and the metrics of that layer.

    Raises `ValueError` when the model has no layer that quantizes activations, and `RuntimeError` in training when none
    of the chosen layers ran.
    """

    def __init__(self, model: nn.Module, every: int, layers: int, record: Callable[[str, float], None]):
        self.every, self.record = every, record
        self.history: list[dict] = []
        self.chosen = spread_modules(model, layers)
        if not self.chosen:
            raise ValueError(f"{type(model).__name__} has no MXFP4 layer that quantizes its input")
        self._step: int | None = None

    def on_step_begin(self, args, state, control, **kwargs):
        step = state.global_step + 1
        due = step == 1 or step % self.every == 0 or step == state.max_steps
        self._step = step if due else None

    @contextlib.contextmanager
    def observing(self, attention_mask: torch.Tensor) -> Iterator[None]:
        """Around a training forward pass: of the first one of a step that is due, the layers' inputs are measured.

        Args:
            attention_mask: ``[batch, length]`` of the tokens that go through the model; 0 for padding.
        """
        if self._step is None:
            yield
            return
        step, self._step = self._step, None
        found: dict[str, dict[str, float]] = {}
        handles = []
        for name, layer in self.chosen.items():
            hook = _observer(found, name, layer, attention_mask)
            handles.append(layer.register_forward_pre_hook(hook, with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        if not found:
            raise RuntimeError(
                f"no activation error was measured: none of {', '.join(self.chosen)} ran in the training forward pass"
            )
        self.history += [{"step": step, "layer": name, **metrics} for name, metrics in found.items()]
        for key in _metrics_of(math.nan, {}):
            values = [metrics[key] for metrics in found.values() if not math.isnan(metrics[key])]
            self.record(key, sum(values) / len(values) if values else math.nan)


def spread_modules(model: nn.Module, count: int) -> dict[str, nn.Module]:
    """At most ``count`` of the layers that quantize their input, by name, evenly spread from the first to the last."""
    found = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, QUANTIZED) and module.config.activation_scheme is not None
    ]
    return evenly_spread(found, count)


def _observer(found: dict[str, dict[str, float]], name: str, layer: nn.Module, mask: torch.Tensor):
    @torch.no_grad()
    def observe(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if name in found:  # gradient checkpointing runs layers twice
            return
        x = args[0] if args else next(iter(kwargs.values()))
        rows = x.detach().reshape(-1, x.shape[-1])
        if len(rows) == mask.numel():
            rows = rows[mask.flatten().bool()]
        rows = rows[:: max(1, -(-len(rows) // _MAX_TOKENS))]
        if len(rows) == 0 or not torch.isfinite(rows).all():
            found[name] = _metrics_of(math.nan, {})
            return
        parts = decompose_scheme(rows, layer.config.activation_scheme)
        found[name] = _metrics_of(parts.sqnr_db if math.isfinite(parts.sqnr_db) else math.nan, parts.energy_ratio)

    return observe


def _metrics_of(sqnr_db: float, energy_ratio: dict[str, float]) -> dict[str, float]:
    parts = {f"error/activations/{part}": energy_ratio.get(part, math.nan) for part in COMPONENTS}
    return {**parts, "error/activations/sqnr_db": sqnr_db}
