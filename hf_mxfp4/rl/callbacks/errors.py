# SPDX-License-Identifier: Apache-2.0
"""Callbacks that split the quantization error of weights and of activations into its three components while a policy
trains (arXiv 2605.20402, section 3)."""

import contextlib
import math
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from ..._logging import get_logger
from ...layers import QUANTIZED, TRAINABLE, WeightMatrix, gathered, trainable_matrices
from ...numerics import COMPONENTS, QuantScheme, decompose_scheme
from .periodic import PeriodicCallback, Record


Layer = TypeVar("Layer")

#: Layers that are decomposed, evenly spread over the model's.
LAYERS = 4
#: Tokens of a layer's input that are decomposed, evenly spread over those of the batch.
_MAX_TOKENS = 1024


def evenly_spread(layers: Iterable[tuple[str, Layer]], count: int) -> dict[str, Layer]:
    """Return at most ``count`` of the named layers, evenly spread from the first to the last."""
    layers = list(layers)
    places = np.linspace(0, len(layers) - 1, min(count, len(layers)))
    return dict(layers[round(place)] for place in places)


class _ComponentsCallback(PeriodicCallback):
    """Records the means over layers of error components."""

    def _keep(self, components: dict[str, dict[str, float]], step: int) -> None:
        """Add the components of each layer to the history, and record their means; NaN does not count."""
        for name, metrics in components.items():
            self.history.append({"step": step, "layer": name, **metrics})
        if self.record is None:
            return
        for key in next(iter(components.values())):
            values = [metrics[key] for metrics in components.values() if not math.isnan(metrics[key])]
            mean = math.nan
            if values:
                mean = sum(values) / len(values)
            self.record(key, mean)


class ErrorCallback(_ComponentsCallback):
    """Splits the weights' quantization error into its three components every few steps, for a few layers: means over
    them of `error/scale_bias`, `error/deadzone`, `error/grid` (energy over that of the whole error), `error/sqnr_db`.

    Args:
        every: steps between measurements; also measured before the first step and at the end.
        layers: number of layers, evenly spread over the model's; each projection of each expert counts as one.
        record: called with a metric's name and value; ``history`` has a dictionary per measurement and layer.

    Raises `ValueError` at the start of training when the model has no quantized layer.
    """

    metrics = ("error/scale_bias", "error/deadzone", "error/grid", "error/sqnr_db")

    def __init__(self, every: int = 50, layers: int = LAYERS, record: Record | None = None):
        super().__init__(every, record)
        self.layers = layers
        self._chosen: dict[str, WeightMatrix] = {}

    @classmethod
    def for_trainer(cls, trainer, every):
        reason = _unmeasurable_reason(trainer.model)
        if reason is not None:
            get_logger().warning("no error components are measured: %s", reason)
            return None
        # Packed weights have no full precision to compare with.
        if not any(isinstance(module, TRAINABLE) for module in trainer.model.modules()):
            return None
        return cls(every, record=trainer._record)

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self._chosen = evenly_spread(((matrix.name, matrix) for matrix in trainable_matrices(model)), self.layers)
        if not self._chosen:
            raise ValueError(f"{type(model).__name__} has no MXFP4 layer whose error could be measured")
        if state.global_step == 0:
            self._measure(state.global_step)

    def on_step_end(self, args, state, control, **kwargs):
        if self.is_due(state, state.global_step):
            self._measure(state.global_step)

    def _measure(self, step: int) -> None:
        components = {}
        for name, matrix in self._chosen.items():
            with gathered(matrix.master) as weight:
                components[name] = _components("error", matrix.of(weight), matrix.layer.config.weight_scheme)
        self._keep(components, step)


class ActivationErrorCallback(_ComponentsCallback):
    """[`ErrorCallback`] of layer inputs, seen by hooks during a training forward pass that happens anyway: the same
    metrics below `error/activations/`, of at most 1024 tokens of each layer without padding; in the first step, every
    few steps and in the last.

    Raises `ValueError` when the model has no layer that quantizes activations in MXFP4, and `RuntimeError` in training
    when none of the chosen layers ran.
    """

    metrics = ("error/activations/grid", "error/activations/sqnr_db")

    def __init__(self, model: nn.Module, every: int, layers: int, record: Record):
        super().__init__(every, record)
        self.chosen = evenly_spread(_quantizing_inputs(model), layers)
        if not self.chosen:
            raise ValueError(f"{type(model).__name__} has no layer that quantizes its input in MXFP4")
        self._step: int | None = None  # the step that is to be measured

    @classmethod
    def for_trainer(cls, trainer, every):
        model = trainer.model
        has_hooks = not trainer.args.torch_compile
        if has_hooks and _quantizing_inputs(model) and _unmeasurable_reason(model) is None:
            return cls(model, every, LAYERS, trainer._record_mean)
        return None

    def on_step_begin(self, args, state, control, **kwargs):
        step = state.global_step + 1
        self._step = None
        if step == 1 or self.is_due(state, step):
            self._step = step

    @contextlib.contextmanager
    def observing(self, attention_mask: torch.Tensor) -> Iterator[None]:
        """Measure the inputs of layers in the first training forward pass of a step that is due, within this context.

        ``attention_mask`` is ``[batch, length]``, 0 for padding.
        """
        if self._step is None:
            yield
            return
        step = self._step
        self._step = None
        components: dict[str, dict[str, float]] = {}
        with contextlib.ExitStack() as stack:
            for name, layer in self.chosen.items():
                hook = _observer(components, name, layer, attention_mask)
                stack.callback(layer.register_forward_pre_hook(hook, with_kwargs=True).remove)
            yield
        if not components:
            raise RuntimeError(
                f"no activation error was measured: none of {', '.join(self.chosen)} ran in the training forward pass"
            )
        self._keep(components, step)


def _unmeasurable_reason(model: nn.Module) -> str | None:
    """Return why the errors of the layers cannot be decomposed: their operands are rotated, say."""
    for module in model.modules():
        if isinstance(module, QUANTIZED):
            return module.config.weights_alone_unsupported_reason
    return None


def _quantizing_inputs(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the layers that quantize their input in MXFP4, with their names."""
    quantized = [(name, module) for name, module in model.named_modules() if isinstance(module, QUANTIZED)]
    return [(name, module) for name, module in quantized if isinstance(module.config.activation_scheme, QuantScheme)]


def _observer(components: dict[str, dict[str, float]], name: str, layer: nn.Module, mask: torch.Tensor):
    """Return a forward pre-hook of a layer that stores the error components of its input under ``name``."""

    @torch.no_grad()
    def observe(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if name in components:  # gradient checkpointing runs layers twice
            return
        # Models may give the input by name.
        x = args[0] if args else next(iter(kwargs.values()))
        rows = x.detach().reshape(-1, x.shape[-1])
        # Where a layer sees every token of the batch, padding is left out.
        if len(rows) == mask.numel():
            rows = rows[mask.flatten().bool()]
        stride = math.ceil(len(rows) / _MAX_TOKENS)
        rows = rows[:: max(1, stride)]
        components[name] = _components("error/activations", rows, layer.config.activation_scheme)

    return observe


def _components(prefix: str, x: torch.Tensor, scheme: QuantScheme) -> dict[str, float]:
    """Return the metrics of one tensor ``[rows, K]``; NaN where there is nothing finite to measure."""
    ratios = dict.fromkeys(COMPONENTS, math.nan)
    sqnr_db = math.nan
    if len(x) and torch.isfinite(x).all():
        parts = decompose_scheme(x, scheme)
        ratios = parts.energy_ratio
        if math.isfinite(parts.sqnr_db):
            sqnr_db = parts.sqnr_db
    metrics = {f"{prefix}/{part}": ratios[part] for part in COMPONENTS}
    metrics[f"{prefix}/sqnr_db"] = sqnr_db
    return metrics
