# SPDX-License-Identifier: Apache-2.0
"""Callbacks that measure what quantization does to a policy while it trains: the components of the error of weights and
of activations (arXiv 2605.20402, section 3), and how far a step moves quantized weights against their masters."""

import contextlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, TypeVar, cast

import numpy as np
import torch
from accelerate.utils.deepspeed import DeepSpeedOptimizerWrapper  # accelerate.utils has it with DeepSpeed alone
from torch import nn
from transformers import TrainerCallback

from .._logging import get_logger
from ..layers import QUANTIZED, WeightMatrix, gathered, trainable_matrices
from ..numerics import COMPONENTS, QuantScheme, decompose_scheme
from ..ops.quantization import fake_quantize
from .callbacks import add_to_log
from .run_log import MOVEMENT_ALARM, movement_advice


Layer = TypeVar("Layer")
Record = Callable[[str, float], None]

#: Layers that are decomposed, evenly spread over the model's.
LAYERS = 4
#: Tokens of a layer's input that are looked at, evenly spread over those of the batch.
_MAX_TOKENS = 1024
#: Matrices whose movement is measured, at most, and weights of each: 64 MiB of float32.
_MATRICES, _WEIGHTS = 256, 2**16


def evenly_spread(found: Iterable[tuple[str, Layer]], count: int) -> dict[str, Layer]:
    """Return at most ``count`` of the named layers, evenly spread from the first to the last."""
    found = list(found)
    places = np.linspace(0, len(found) - 1, min(count, len(found)))
    return dict(found[round(place)] for place in places)


class ErrorCallback(TrainerCallback):
    """Splits the weights' quantization error into its three components every few steps, for a few layers: means over
    them of `error/scale_bias`, `error/deadzone`, `error/grid` (energy over that of the whole error), `error/sqnr_db`.

    Args:
        every: steps between measurements; also measured before the first step and at the end.
        layers: number of layers, evenly spread over the model's; each projection of each expert counts as one.
        record: called with a metric's name and value; ``history`` has a dictionary per measurement and layer.

    Raises `ValueError` at the start of training when the model has no quantized layer.
    """

    def __init__(self, every: int = 50, layers: int = LAYERS, record: Record | None = None):
        self.every, self.layers, self.record = every, layers, record
        self.history: list[dict] = []
        self._chosen: dict[str, WeightMatrix] = {}

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self._chosen = evenly_spread(((matrix.name, matrix) for matrix in trainable_matrices(model)), self.layers)
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
        _keep(found, step, self.history, self.record)


class ActivationErrorCallback(TrainerCallback):
    """[`ErrorCallback`] of layer inputs, seen by hooks during a training forward pass that happens anyway: the same
    metrics below `error/activations/`, of at most 1024 tokens of each layer without padding; in the first step, every
    few steps and in the last.

    Raises `ValueError` when the model has no layer that quantizes activations in MXFP4, and `RuntimeError` in training
    when none of the chosen layers ran.
    """

    def __init__(self, model: nn.Module, every: int, layers: int, record: Record):
        self.every, self.record = every, record
        self.history: list[dict] = []
        self.chosen = evenly_spread(quantizing_inputs(model), layers)
        if not self.chosen:
            raise ValueError(f"{type(model).__name__} has no layer that quantizes its input in MXFP4")
        self._step: int | None = None

    def on_step_begin(self, args, state, control, **kwargs):
        step = state.global_step + 1
        self._step = step if step == 1 or step % self.every == 0 or step == state.max_steps else None

    @contextlib.contextmanager
    def observing(self, attention_mask: torch.Tensor) -> Iterator[None]:
        """Around a training forward pass: of the first one of a step that is due, the layers' inputs are measured.
        ``attention_mask`` is ``[batch, length]``, 0 for padding.
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
        _keep(found, step, self.history, self.record)


def quantizing_inputs(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the layers that quantize their input in MXFP4, with their names."""
    quantized = [(name, module) for name, module in model.named_modules() if isinstance(module, QUANTIZED)]
    return [(name, module) for name, module in quantized if isinstance(module.config.activation_scheme, QuantScheme)]


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
    """Return the metrics of one tensor ``[rows, K]``; NaN where there is nothing finite to measure."""
    ratios, sqnr_db = dict.fromkeys(COMPONENTS, math.nan), math.nan
    if len(x) and torch.isfinite(x).all():
        parts = decompose_scheme(x, scheme)
        ratios = parts.energy_ratio
        sqnr_db = parts.sqnr_db if math.isfinite(parts.sqnr_db) else math.nan
    return {**{f"{prefix}/{part}": ratios[part] for part in COMPONENTS}, f"{prefix}/sqnr_db": sqnr_db}


def _keep(found: dict[str, dict[str, float]], step: int, history: list[dict], record: Record | None) -> None:
    """Add what was found of each layer to a history, and record the means."""
    history += [{"step": step, "layer": name, **metrics} for name, metrics in found.items()]
    for key in next(iter(found.values())) if record else ():
        values = [metrics[key] for metrics in found.values() if not math.isnan(metrics[key])]
        record(key, sum(values) / len(values) if values else math.nan)


# ---- movement -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Movement:
    """The movement of quantized weights along a step, over what the straight-through estimator assumes.

    Attributes:
        ratio: ``<Q(w') - Q(w), w' - w> / <w' - w, w' - w>`` of a step from masters ``w`` to ``w'``: 1 on average for
            masters in general position. Those exactly between two values (ties) all change in any step.
        standard_error: of the ratio, from the scatter between rows (or groups of rows that share scales), and at least
            what chance does to that many changes where the estimator holds.
        n_changed, n_weights: how many quantized values changed, and of how many.
    """

    ratio: float
    standard_error: float
    n_changed: int
    n_weights: int


class StepMovementCallback(TrainerCallback):
    """Measures how far a step moves quantized weights over how far it moves their masters, which the straight-through
    estimator takes for 1: see [`Movement`]. For any [`transformers.Trainer`].

    Measured in the first step that moves a master, every ``every`` steps and in the last. Metrics: `movement/total` and
    one for each layer type (`movement/q_proj`, `movement/experts.down_proj`), `movement_se/...` of the same names
    (standard errors), and `movement/flipped_share`, the share of quantized values that changed. A total above 3 beyond
    two standard errors is a warning as well. ``history`` has a dictionary per measurement.

    Cost: evenly spaced rows of at most 256 trained matrices, 65,536 weights of each, are copied before the step and
    compared after it. Under FSDP2 and ZeRO-3 each weight is gathered twice, one at a time.

    Args:
        every: steps between measurements.
        record: called with a metric's name and value; by default they are added to the next line of the log.

    Raises `ValueError` when ``every`` is not positive, and at the start of training when no weight that is trained has
    quantized values that could move.
    """

    def __init__(self, every: int = 50, record: Record | None = None):
        if every < 1:
            raise ValueError(f"every={every} must be at least 1")
        self.every, self.record = every, record
        self.history: list[dict] = []
        self._matrices: list[WeightMatrix] = []
        self._before: list[torch.Tensor] | None = None
        self._due = True  # nothing was measured yet, or not since it was last due
        self._unlogged: dict[str, float] = {}

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self._matrices = movable(model)
        if not self._matrices:
            raise ValueError(
                f"no step of {type(model).__name__} can be measured: it has no quantized layer whose master weights "
                "are trained and have quantized values of their own; leave StepMovementCallback out"
            )

    def on_step_begin(self, args, state, control, optimizer=None, **kwargs):
        step = state.global_step + 1
        self._due = self._due or step % self.every == 0 or step == state.max_steps
        self._before = None
        if isinstance(optimizer, DeepSpeedOptimizerWrapper):  # its step is part of the backward pass
            self._look()

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if self._before is None:
            self._look()

    def on_step_end(self, args, state, control, **kwargs):
        before, self._before = self._before, None
        found = _movements(self._matrices, before) if before is not None else {}
        if not found:
            return
        self._due = False
        self.history.append({"step": state.global_step, **{name: asdict(value) for name, value in found.items()}})
        self._report(found)
        total = found["total"]
        if total.ratio - 2 * total.standard_error > MOVEMENT_ALARM:
            get_logger().warning(
                "step %d: quantized weights moved %.3g +- %.2g times as far as their masters, which training takes for "
                "1. %s",
                state.global_step, total.ratio, 2 * total.standard_error, movement_advice(len(self.history) == 1),
            )  # fmt: skip

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs is not None:
            add_to_log(state, logs, self._unlogged)
            self._unlogged = {}

    def _look(self) -> None:
        if self._due:
            self._before = [_sample(matrix) for matrix in self._matrices]

    def _report(self, found: dict[str, Movement]) -> None:
        total = found["total"]
        values = {"movement/flipped_share": total.n_changed / total.n_weights}
        for name, movement in found.items():
            values |= {f"movement/{name}": movement.ratio, f"movement_se/{name}": movement.standard_error}
        if self.record is None:
            self._unlogged = values
            return
        for name, value in values.items():
            self.record(name, value)


def movable(model: nn.Module) -> list[WeightMatrix]:
    """Return at most 256 trained quantized matrices, evenly spread over the model's, of layers whose weights have
    quantized values of their own (not rotated, rounded at random, or in full precision)."""
    found = [m for m in trainable_matrices(model) if not m.layer.config.weights_alone_unsupported_reason]
    trained = [(m.name, m) for m in found if getattr(m.layer, m.parameter).requires_grad]
    return list(evenly_spread(trained, _MATRICES).values())


@torch.no_grad()
def _sample(matrix: WeightMatrix) -> torch.Tensor:
    """Return a copy of evenly spaced units of a matrix ``[units, rows, K]``: rows, or groups that share scales."""
    with gathered(getattr(matrix.layer, matrix.parameter)) as value:
        weight = matrix.of(value)
        size = min(matrix.fprop.right.block_rows, len(weight))
        units = weight[: len(weight) // size * size].unflatten(0, (-1, size))
        return units[:: max(1, weight.numel() // _WEIGHTS)].clone()


@torch.no_grad()
def _sums(matrix: WeightMatrix, before: torch.Tensor) -> torch.Tensor:
    """Return what a [`Movement`] is made of, float64 ``[9]``, for the step since the sample ``before``."""
    after, scheme, backend = _sample(matrix), matrix.fprop.right, matrix.layer.config.backend
    counts = [float(len(before)), float(before.numel())]
    if torch.equal(before, after):
        return torch.tensor([0.0] * 7 + counts, dtype=torch.float64)
    # Differences in float32 and sums in float64, which not all accelerators have.
    wide = torch.promote_types(before.dtype, torch.float32)
    exact = torch.float64 if before.device.type in ("cpu", "cuda") else wide
    old, new = (fake_quantize(weights, cast(QuantScheme, scheme), backend).to(wide) for weights in (before, after))
    step = (after.to(wide) - before.to(wide)).to(exact).flatten(1)
    moved, error = (new - old).to(exact).flatten(1), (old - before.to(wide)).to(exact).flatten(1)
    along, length = (moved * step).sum(dim=1), step.square().sum(dim=1)
    # An error that is uniform over a spacing of the grid has a twelfth of its square as its energy. A weight that
    # moves by d changes with probability |d| / spacing, and adds spacing * |d| to the projection if it does.
    by_chance = (12 * error.square().mean(dim=1)).sqrt() * step.abs().pow(3).sum(dim=1)
    products = (along, length, along.square(), along * length, length.square(), by_chance, (moved != 0).to(exact))
    return torch.tensor([*(float(product.sum()) for product in products), *counts], dtype=torch.float64)


def _movements(matrices: list[WeightMatrix], before: list[torch.Tensor]) -> dict[str, Movement]:
    """Return the movement since the samples ``before``, of all and by layer type, where a master moved."""
    sums: dict[str, torch.Tensor] = defaultdict(lambda: torch.zeros(9, dtype=torch.float64))
    for matrix, old in zip(matrices, before, strict=True):
        name = matrix.name.removesuffix(".base_layer").rpartition(".")[2]  # PEFT's name for what it wraps
        found = _sums(matrix, old)
        sums["total"] += found
        sums[name if matrix.expert is None else f"experts.{name}"] += found
    movements = {name: _movement(values) for name, values in sums.items()}
    return {name: movement for name, movement in movements.items() if movement is not None}


def _movement(sums: torch.Tensor) -> Movement | None:
    """Return what was counted; `None` where no master moved, or one is not finite."""
    along, length, squares, mixed, lengths, by_chance, n_changed, n_units, n_weights = sums.tolist()
    if not (length > 0 and math.isfinite(along) and math.isfinite(length)):
        return None
    ratio = along / length
    # The variance of a ratio of sums over units, as in sampling by clusters.
    scatter = max(0.0, squares - 2 * ratio * mixed + ratio * ratio * lengths) * n_units / max(1, n_units - 1)
    return Movement(ratio, math.sqrt(max(scatter, by_chance)) / length, int(n_changed), int(n_weights))
