# SPDX-License-Identifier: Apache-2.0
"""How far a step moves the quantized weights, against how far it moves their masters."""

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from accelerate.utils.deepspeed import DeepSpeedOptimizerWrapper  # accelerate.utils has it with DeepSpeed alone
from torch import nn
from transformers import TrainerCallback

from ..._logging import get_logger
from ...backends import fake_quantize
from ...layers import WeightMatrix, gathered, trainable_matrices
from ...run_log import MOVEMENT_ALARM, movement_advice
from .entropy import add_to_log
from .errors import evenly_spread


#: Matrices that are watched, at most, and weights of each: 64 MiB of float32.
_MATRICES, _WEIGHTS = 256, 2**16


@dataclass(frozen=True)
class Movement:
    """The movement of quantized weights along a step, over what the straight-through estimator assumes.

    Attributes:
        ratio: ``<Q(w') - Q(w), w' - w> / <w' - w, w' - w>`` of a step from masters ``w`` to ``w'``, which the estimator
            takes for 1. In a small step few quantized values change, each by a whole spacing of the grid: 1 on average
            for masters in general position. Those exactly between two values (ties) all change, however small the step.
        standard_error: of the ratio, from the scatter between rows (between groups of rows that share scales), and at
            least what chance does to that many changes where the estimator holds.
        n_changed, n_weights: how many quantized values changed, and of how many.
    """

    ratio: float
    standard_error: float
    n_changed: int
    n_weights: int

    @property
    def changed_share(self) -> float:
        """Share of the quantized values that changed."""
        return self.n_changed / self.n_weights


@dataclass(frozen=True)
class WeightSample:
    """Evenly spaced units of one matrix: single rows, or the groups of rows that share scales, so that their quantized
    values are those that they have in the whole matrix."""

    matrix: WeightMatrix

    @torch.no_grad()
    def take(self) -> torch.Tensor:
        """Return the units as they are now ``[units, rows, K]``, a copy. Under FSDP2 and ZeRO-3 all processes must call
        this."""
        with gathered(getattr(self.matrix.layer, self.matrix.parameter)) as value:
            weight = self.matrix.of(value)
            size = min(self.matrix.fprop.right.block_rows, len(weight))
            units = weight[: len(weight) // size * size].unflatten(0, (-1, size))
            return units[:: max(1, weight.numel() // _WEIGHTS)].clone()

    @torch.no_grad()
    def sums(self, before: torch.Tensor) -> torch.Tensor:
        """Return what a [`Movement`] is made of, float64 ``[9]``, for the step since ``before`` was taken."""
        after, scheme, backend = self.take(), self.matrix.fprop.right, self.matrix.layer.config.backend
        counts = [float(len(before)), float(before.numel())]
        if torch.equal(before, after):
            return torch.tensor([0.0] * 7 + counts, dtype=torch.float64)
        # Differences in float32 and sums in float64, which not all accelerators have.
        wide = torch.promote_types(before.dtype, torch.float32)
        exact = torch.float64 if before.device.type in ("cpu", "cuda") else wide
        old, new = (fake_quantize(weights, scheme, backend).to(wide) for weights in (before, after))
        step = (after.to(wide) - before.to(wide)).to(exact).flatten(1)
        moved, error = (new - old).to(exact).flatten(1), (old - before.to(wide)).to(exact).flatten(1)
        along, length = (moved * step).sum(dim=1), step.square().sum(dim=1)
        # An error that is uniform over a spacing of the grid has a twelfth of its square as its energy. A weight that
        # moves by d changes with probability |d| / spacing, and adds spacing * |d| to the projection if it does.
        by_chance = (12 * error.square().mean(dim=1)).sqrt() * step.abs().pow(3).sum(dim=1)
        products = (along, length, along.square(), along * length, length.square(), by_chance, (moved != 0).to(exact))
        return torch.tensor([*(float(product.sum()) for product in products), *counts], dtype=torch.float64)


def sample_weights(model: nn.Module) -> list[WeightSample]:
    """Return at most 256 trained quantized matrices, evenly spread over the model's.

    Empty where nothing is trained. Layers whose weights have no values of their own between two steps (rotated, rounded
    at random, or in full precision; see `weights_alone_unsupported_reason` of the config) are left out.
    """
    matrices = [
        (matrix.name, WeightSample(matrix))
        for matrix in trainable_matrices(model)
        if getattr(matrix.layer, matrix.parameter).requires_grad
        and not matrix.layer.config.weights_alone_unsupported_reason
    ]
    return list(evenly_spread(matrices, _MATRICES).values())


def layer_type(matrix: WeightMatrix) -> str:
    """Return ``"q_proj"`` of ``model.layers.3.self_attn.q_proj``; of experts ``"experts.down_proj"``."""
    name = matrix.name.removesuffix(".base_layer").rpartition(".")[2]  # PEFT's name for what it wraps
    return name if matrix.expert is None else f"experts.{name}"


def step_movement(samples: list[WeightSample], before: list[torch.Tensor]) -> dict[str, Movement]:
    """Return the movement since ``before`` was taken of ``samples``, one each: ``"total"``, and by layer type those of
    which a master moved. Empty where none did. Under FSDP2 and ZeRO-3 all processes must call this."""
    sums: dict[str, torch.Tensor] = defaultdict(lambda: torch.zeros(9, dtype=torch.float64))
    for sample, old in zip(samples, before, strict=True):
        found = sample.sums(old)
        sums["total"] += found
        sums[layer_type(sample.matrix)] += found
    movements = {name: _movement(values) for name, values in sums.items()}
    return {name: movement for name, movement in movements.items() if movement is not None}


def _movement(sums: torch.Tensor) -> Movement | None:
    """What was counted; `None` where no master moved, or one is not finite."""
    along, length, squares, mixed, lengths, by_chance, n_changed, n_units, n_weights = sums.tolist()
    if not length > 0 or not math.isfinite(along) or not math.isfinite(length):
        return None
    ratio = along / length
    # The variance of a ratio of sums over units, as in sampling by clusters.
    scatter = max(0.0, squares - 2 * ratio * mixed + ratio * ratio * lengths) * n_units / max(1, n_units - 1)
    return Movement(ratio, math.sqrt(max(scatter, by_chance)) / length, int(n_changed), int(n_weights))


class StepMovementCallback(TrainerCallback):
    """Measures how far a step moves quantized weights over how far it moves their masters, which the straight-through
    estimator takes for 1: see [`Movement`]. For any [`transformers.Trainer`].

    Measured in the first step that moves a master, every ``every`` steps and in the last. Metrics: `movement/total` and
    one for each layer type (`movement/q_proj`, `movement/experts.down_proj`), `movement_se/...` of the same names
    (standard errors), and `movement/flipped_share`, the share of quantized values that changed. A total above 3 beyond
    two standard errors is a warning as well.

    Cost: evenly spaced rows of at most 256 trained matrices, 65,536 weights of each, are copied before the step and
    compared after it. Under FSDP2 and ZeRO-3 each weight is gathered twice, one at a time.

    Args:
        every: steps between measurements.
        record: called with a metric's name and value; by default they are added to the next line of the log history and
            reach the callbacks after this one.

    Attributes:
        history: one dictionary per measurement: `step`, and by `total` and layer type the fields of a [`Movement`].

    Raises `ValueError` when ``every`` is not positive, and at the start of training when no weight is trained whose
    quantized values could move.
    """

    def __init__(self, every: int = 50, record: Callable[[str, float], None] | None = None):
        if every < 1:
            raise ValueError(f"every={every} must be at least 1")
        self.every, self.record = every, record
        self.history: list[dict] = []
        self._samples: list[WeightSample] = []
        self._due = True
        self._before: list[torch.Tensor] | None = None
        self._unlogged: dict[str, float] = {}

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self._samples = sample_weights(model)
        if not self._samples:
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
        found = step_movement(self._samples, before) if before is not None else {}
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
        if self._unlogged and logs is not None:
            add_to_log(state, logs, self._unlogged)
            self._unlogged = {}

    def _look(self) -> None:
        if self._due:
            self._before = [sample.take() for sample in self._samples]

    def _report(self, found: dict[str, Movement]) -> None:
        values = {"movement/flipped_share": found["total"].changed_share}
        for name, movement in found.items():
            values |= {f"movement/{name}": movement.ratio, f"movement_se/{name}": movement.standard_error}
        if self.record is None:
            self._unlogged = values
            return
        for name, value in values.items():
            self.record(name, value)
