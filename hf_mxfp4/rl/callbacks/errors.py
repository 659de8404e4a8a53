# SPDX-License-Identifier: Apache-2.0
"""Callbacks that split the quantization error of weights and of activations into its components, while a policy
trains (arXiv 2605.20402, section 3)."""

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import TrainerCallback

from ...layers import QUANTIZED, WeightMatrix, gathered, trainable_matrices
from ...numerics import COMPONENTS, QuantScheme, decompose_scheme


Layer = TypeVar("Layer")

#: Layers that are decomposed, evenly spread over the model's.
LAYERS = 4
#: Tokens of a layer's input that are looked at, evenly spread over those of the batch.
_MAX_TOKENS = 1024


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

    def __init__(self, every: int = 50, layers: int = LAYERS, record: Callable[[str, float], None] | None = None):
        self.every, self.layers, self.record = every, layers, record
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
        found = {}
        for name, matrix in self._chosen.items():
            with gathered(getattr(matrix.layer, matrix.parameter)) as weight:
                found[name] = _components("error", matrix.of(weight), matrix.layer.config.weight_scheme)
        self.history += [{"step": step, "layer": name, **metrics} for name, metrics in found.items()]
        if self.record is not None:
            _record_means(list(found.values()), self.record)


class ActivationErrorCallback(TrainerCallback):
    """Splits the quantization error of layer inputs into its components, seen by hooks during a training forward pass
    that happens anyway.

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
        with contextlib.ExitStack() as stack:
            for name, layer in self.chosen.items():
                hook = _observer(found, name, layer, attention_mask)
                stack.callback(layer.register_forward_pre_hook(hook, with_kwargs=True).remove)
            yield
        if not found:
            raise RuntimeError(
                f"no activation error was measured: none of {', '.join(self.chosen)} ran in the training forward pass"
            )
        self.history += [{"step": step, "layer": name, **metrics} for name, metrics in found.items()]
        _record_means(list(found.values()), self.record)


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
        found[name] = _components("error/activations", rows, layer.config.activation_scheme)

    return observe


def _components(prefix: str, x: torch.Tensor, scheme: QuantScheme) -> dict[str, float]:
    """The metrics of one tensor ``[rows, K]``; NaN where there is nothing finite to measure."""
    ratios, sqnr_db = dict.fromkeys(COMPONENTS, math.nan), math.nan
    if len(x) and torch.isfinite(x).all():
        parts = decompose_scheme(x, scheme)
        ratios = parts.energy_ratio
        sqnr_db = parts.sqnr_db if math.isfinite(parts.sqnr_db) else math.nan
    return {**{f"{prefix}/{part}": ratios[part] for part in COMPONENTS}, f"{prefix}/sqnr_db": sqnr_db}


def _record_means(measured: list[dict[str, float]], record: Callable[[str, float], None]) -> None:
    for key in measured[0]:
        values = [metrics[key] for metrics in measured if not math.isnan(metrics[key])]
        record(key, sum(values) / len(values) if values else math.nan)


def spread_layers(model: nn.Module, count: int) -> dict[str, WeightMatrix]:
    """Return the weights of at most ``count`` quantized layers, evenly spread from the first to the last; each
    projection of each expert counts as a layer."""
    return evenly_spread([(matrix.name, matrix) for matrix in trainable_matrices(model)], count)


def spread_modules(model: nn.Module, count: int) -> dict[str, nn.Module]:
    """Return at most ``count`` of the layers that quantize their input, by name, evenly spread from the first to the
    last."""
    found = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, QUANTIZED) and module.config.activation_scheme is not None
    ]
    return evenly_spread(found, count)


def evenly_spread(found: list[tuple[str, Layer]], count: int) -> dict[str, Layer]:
    """Return at most ``count`` of the named layers, evenly spread from the first to the last."""
    count = min(count, len(found))
    if count <= 1:
        return dict(found[:count])
    return dict(found[round(i * (len(found) - 1) / (count - 1))] for i in range(count))
