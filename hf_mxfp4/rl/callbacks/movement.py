# SPDX-License-Identifier: Apache-2.0
"""How far a step moves quantized weights over how far it moves their FP32 master weights."""

import math
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from typing import cast

import torch
from accelerate.utils.deepspeed import DeepSpeedOptimizerWrapper  # accelerate.utils has it with DeepSpeed alone
from torch import nn

from ..._logging import get_logger
from ...layers import WeightMatrix, gathered, trainable_matrices
from ...numerics import QuantScheme
from ...ops import widest_float
from ...ops.quantization import fake_quantize
from ..run_log import MOVEMENT_ALARM, movement_advice
from .errors import evenly_spread
from .logs import add_to_log
from .periodic import PeriodicCallback, Record


#: Matrices that are measured at most, and weights of each: 64 MiB of float32.
_MATRICES = 256
_WEIGHTS = 2**16


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


class StepMovementCallback(PeriodicCallback):
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

    metrics = ("movement/total", "movement_se/total", "movement/flipped_share")

    def __init__(self, every: int = 50, record: Record | None = None):
        if every < 1:
            raise ValueError(f"every={every} must be at least 1")
        super().__init__(every, record)
        self._matrices: list[WeightMatrix] = []
        self._before: list[torch.Tensor] | None = None
        self._is_waiting = True  # nothing was measured yet, or not since it was last due
        self._unlogged: dict[str, float] = {}

    @classmethod
    def for_trainer(cls, trainer, every):
        # Frozen and packed weights do not move.
        if not _movable(trainer.model):
            return None
        return cls(every, record=trainer._record)

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self._matrices = _movable(model)
        if not self._matrices:
            raise ValueError(
                f"no step of {type(model).__name__} can be measured: it has no quantized layer whose master weights "
                "are trained and have quantized values of their own; leave StepMovementCallback out"
            )

    def on_step_begin(self, args, state, control, optimizer=None, **kwargs):
        self._is_waiting = self._is_waiting or self.is_due(state, state.global_step + 1)
        self._before = None
        if isinstance(optimizer, DeepSpeedOptimizerWrapper):  # its step is part of the backward pass
            self._copy_weights()

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if self._before is None:
            self._copy_weights()

    def on_step_end(self, args, state, control, **kwargs):
        if self._before is None:
            return
        movements = _movements(self._matrices, self._before)
        self._before = None
        if not movements:
            return
        self._is_waiting = False
        self.history.append({"step": state.global_step})
        self.history[-1] |= {name: asdict(movement) for name, movement in movements.items()}
        self._report(movements)
        total = movements["total"]
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

    def _copy_weights(self) -> None:
        if self._is_waiting:
            self._before = [_sample(matrix) for matrix in self._matrices]

    def _report(self, movements: dict[str, Movement]) -> None:
        total = movements["total"]
        values = {"movement/flipped_share": total.n_changed / total.n_weights}
        for name, movement in movements.items():
            values[f"movement/{name}"] = movement.ratio
            values[f"movement_se/{name}"] = movement.standard_error
        if self.record is None:
            self._unlogged = values
            return
        for name, value in values.items():
            self.record(name, value)


def _movable(model: nn.Module) -> list[WeightMatrix]:
    """Return at most 256 trained quantized matrices, evenly spread over the model's, of layers whose weights have
    quantized values of their own (not rotated, rounded at random, or in full precision)."""
    trained = []
    for matrix in trainable_matrices(model):
        has_values = not matrix.layer.config.weights_alone_unsupported_reason
        if has_values and matrix.master.requires_grad:
            trained.append((matrix.name, matrix))
    return list(evenly_spread(trained, _MATRICES).values())


@torch.no_grad()
def _sample(matrix: WeightMatrix) -> torch.Tensor:
    """Return a copy of evenly spaced units of a matrix ``[units, rows, K]``: rows, or groups that share scales."""
    with gathered(matrix.master) as value:
        weight = matrix.of(value)
        size = min(matrix.fprop.right.block_rows, len(weight))
        units = weight[: len(weight) // size * size].unflatten(0, (-1, size))
        return units[:: max(1, weight.numel() // _WEIGHTS)].clone()


@torch.no_grad()
def _sums(matrix: WeightMatrix, before: torch.Tensor) -> dict[str, float]:
    """Return the sums over units that a [`Movement`] is made of, for the step since the sample ``before``."""
    sums = {"units": float(len(before)), "weights": float(before.numel())}
    after = _sample(matrix)
    if torch.equal(before, after):
        return sums
    scheme = cast(QuantScheme, matrix.fprop.right)
    backend = matrix.layer.config.backend
    # Differences in float32, and sums in more digits where the device has them.
    wide = torch.promote_types(before.dtype, torch.float32)
    exact = widest_float(before.device)
    old = fake_quantize(before, scheme, backend).to(wide)
    new = fake_quantize(after, scheme, backend).to(wide)
    step = (after.to(wide) - before.to(wide)).to(exact).flatten(1)
    moved = (new - old).to(exact).flatten(1)
    error = (old - before.to(wide)).to(exact).flatten(1)
    along = (moved * step).sum(dim=1)
    length = step.square().sum(dim=1)
    # An error that is uniform over a spacing of the grid has a twelfth of its square as its energy. A weight that
    # moves by d changes with probability |d| / spacing, and adds spacing * |d| to the projection if it does.
    by_chance = (12 * error.square().mean(dim=1)).sqrt() * step.abs().pow(3).sum(dim=1)
    products = {
        "along": along,
        "length": length,
        "along * along": along.square(),
        "along * length": along * length,
        "length * length": length.square(),
        "by chance": by_chance,
        "changed": (moved != 0).to(exact),
    }
    return sums | {name: float(product.sum()) for name, product in products.items()}


def _movements(matrices: list[WeightMatrix], before: list[torch.Tensor]) -> dict[str, Movement]:
    """Return the movement since the samples ``before``, of all and by layer type, where a master moved."""
    sums: dict[str, Counter[str]] = defaultdict(Counter)
    for matrix, old in zip(matrices, before, strict=True):
        kind = matrix.name.removesuffix(".base_layer").rpartition(".")[2]  # PEFT's name for what it wraps
        if matrix.expert is not None:
            kind = f"experts.{kind}"
        step = _sums(matrix, old)
        sums["total"].update(step)
        sums[kind].update(step)
    movements = {kind: _movement(of_kind) for kind, of_kind in sums.items()}
    return {kind: movement for kind, movement in movements.items() if movement is not None}


def _movement(sums: Counter[str]) -> Movement | None:
    """Return the movement that sums over units say; `None` where no master moved, or one is not finite."""
    along = sums["along"]
    length = sums["length"]
    if not (length > 0 and math.isfinite(along) and math.isfinite(length)):
        return None
    ratio = along / length
    # The variance of a ratio of sums over units, as in sampling by clusters.
    squares = sums["along * along"] - 2 * ratio * sums["along * length"] + ratio * ratio * sums["length * length"]
    n_units = sums["units"]
    scatter = max(0.0, squares) * n_units / max(1, n_units - 1)
    standard_error = math.sqrt(max(scatter, sums["by chance"])) / length
    return Movement(ratio, standard_error, int(sums["changed"]), int(sums["weights"]))
