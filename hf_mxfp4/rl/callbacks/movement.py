# SPDX-License-Identifier: Apache-2.0
"""How far a step moves the quantized weights, against how far it moves their masters."""

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass

import torch
from accelerate.utils.deepspeed import DeepSpeedOptimizerWrapper  # accelerate.utils has it with DeepSpeed alone
from torch import nn
from transformers import TrainerCallback

from ..._logging import get_logger
from ...backends import fake_quantize
from ...layers import trainable_matrices
from ...numerics import QuantScheme
from ...run_log import MOVEMENT_ALARM, movement_advice
from .weight_samples import WeightSample, sample_weights


#: Weights that are watched, at most: 64 MiB of float32.
_MAX_WEIGHTS = 2**24
#: Weights that are quantized and summed at a time.
_AT_A_TIME = 2**20


@dataclass(frozen=True)
class Movement:
    """The movement of quantized weights along a step, over what the straight-through estimator assumes.

    A step takes masters from ``w`` to ``w'`` and their quantized values from ``Q(w)`` to ``Q(w')``. The estimator lets
    gradients through as if both moved alike, so that it takes the projection
    ``<Q(w') - Q(w), w' - w> / <w' - w, w' - w>`` for 1. In a small step few quantized values change, each by a whole
    spacing of the grid, and where masters lie anywhere between two values that gives 1 on average. Masters that lie
    exactly between two values (ties) all change at once, however small the step: half as long a step, twice the ratio.

    Attributes:
        ratio: 1 on average for masters in general position.
        standard_error: of the ratio, from the scatter between rows (between groups of rows that share scales), and at
            least what chance does to that many changes where the estimator holds: with hardly any change to count, the
            scatter alone would be zero.
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


class MovementSums:
    """What a [`Movement`] is made of, summed over weights."""

    def __init__(self):
        self._sums = torch.zeros(7, dtype=torch.float64)
        self._n_units = self._n_weights = 0

    def add(self, before: torch.Tensor, after: torch.Tensor, scheme: QuantScheme, backend: str, n_weights: int) -> None:
        """Count masters before and after a step ``[units, rows, K]``, of which ``n_weights`` are no padding. Units are
        quantized independently of each other."""
        units = max(1, _AT_A_TIME // before[0].numel())
        for old, new in zip(before.split(units), after.split(units), strict=True):
            if not torch.equal(old, new):  # NaN differs from itself
                self._sums += self._of(old, new, scheme, backend)
        self._n_units += len(before)
        self._n_weights += n_weights

    @staticmethod
    @torch.no_grad()
    def _of(before: torch.Tensor, after: torch.Tensor, scheme: QuantScheme, backend: str) -> torch.Tensor:
        quantized = [fake_quantize(weights, scheme, backend) for weights in (before, after)]
        # Differences in float32 and sums in float64, which not all accelerators have.
        wide = torch.promote_types(before.dtype, torch.float32)
        exact = torch.float64 if before.device.type in ("cpu", "cuda") else wide
        step = (after.to(wide) - before.to(wide)).to(exact).flatten(1)
        moved = (quantized[1].to(wide) - quantized[0].to(wide)).to(exact).flatten(1)
        error = (quantized[0].to(wide) - before.to(wide)).to(exact).flatten(1)
        along, length = (moved * step).sum(dim=1), step.square().sum(dim=1)
        # An error that is uniform over a spacing of the grid has a twelfth of its square as its energy. A weight that
        # moves by d changes with probability |d| / spacing, and adds spacing * |d| to the projection if it does.
        spacing = (12 * error.square().mean(dim=1)).sqrt()
        by_chance = spacing * step.abs().pow(3).sum(dim=1)
        products = (along, length, along.square(), along * length, length.square(), by_chance)
        sums = [product.to("cpu", torch.float64).sum() for product in products]
        return torch.stack([*sums, (moved != 0).sum().cpu().double()])

    def __add__(self, other: "MovementSums") -> "MovementSums":
        total = MovementSums()
        total._sums = self._sums + other._sums
        total._n_units, total._n_weights = self._n_units + other._n_units, self._n_weights + other._n_weights
        return total

    @property
    def movement(self) -> Movement | None:
        """What was counted; `None` where no master moved, or one is not finite."""
        along, length, squares, mixed, lengths, by_chance, n_changed = self._sums.tolist()
        if not length > 0 or not math.isfinite(along) or not math.isfinite(length):
            return None
        ratio = along / length
        # The variance of a ratio of sums over units, as in sampling by clusters.
        scatter = max(0.0, squares - 2 * ratio * mixed + ratio * ratio * lengths)
        scatter *= self._n_units / max(1, self._n_units - 1)
        error = math.sqrt(max(scatter, by_chance)) / length
        return Movement(ratio, error, int(n_changed), self._n_weights)


def step_movement(samples: Iterable[WeightSample], before: Iterable[torch.Tensor]) -> dict[str, Movement]:
    """The movement since ``before`` was taken of ``samples``, one each: ``"total"``, and by layer type those of which a
    master moved. Empty where none did. Under FSDP2 and ZeRO-3 all processes must call this."""
    sums: dict[str, MovementSums] = {}
    for sample, old in zip(samples, before, strict=True):
        of_kind = sums.setdefault(sample.kind, MovementSums())
        of_kind.add(old, sample.take(), sample.scheme, sample.backend, sample.n_weights)
    found = {"total": sum(sums.values(), MovementSums()).movement}
    found |= {kind: of_kind.movement for kind, of_kind in sums.items()}
    return {name: movement for name, movement in found.items() if movement is not None}


class StepMovementCallback(TrainerCallback):
    """Measures how far a step moves quantized weights over how far it moves their masters, which the straight-through
    estimator takes for 1: see [`Movement`]. For any [`transformers.Trainer`].

    Measured in the first step that moves a master, every ``every`` steps and in the last; a step without movement (a
    warm-up that begins at a learning rate of 0, a step that was skipped) is passed over for the next that has some.

    Metrics: `movement/total` and one for each layer type (`movement/q_proj`, `movement/experts.down_proj`),
    `movement_se/...` of the same names (standard errors), and `movement/flipped_share`, the share of quantized values
    that changed. A total above 3 beyond two standard errors is a warning as well.

    Cost: evenly spaced rows of all trained matrices are copied before the step and compared after it, about
    ``max_weights`` elements (in float32 4 bytes each; under DeepSpeed, which steps in the backward pass, they are held
    during the forward pass too), and quantized twice, a million at a time. Under FSDP2 and ZeRO-3 each weight is
    gathered twice, one at a time. Every process measures, on the same numbers.

    Args:
        every: steps between measurements.
        record: called with a metric's name and value; by default they are added to the next line of the log history and
            reach the callbacks after this one (trackers come before those that a Trainer was given: put it first in
            `trainer.callback_handler.callbacks`).
        max_weights: how many weights are watched.

    Attributes:
        history: one dictionary per measurement: `step`, and by `total` and layer type the fields of a [`Movement`].
        samples: what is watched.

    Raises:
        ValueError: ``every`` or ``max_weights`` is not positive; at the start of training, no weight is trained whose
            quantized values could move.
    """

    def __init__(
        self, every: int = 50, record: Callable[[str, float], None] | None = None, max_weights: int = _MAX_WEIGHTS
    ):
        if every < 1 or max_weights < 1:
            raise ValueError(f"every={every} and max_weights={max_weights} must be at least 1")
        self.every, self.record, self.max_weights = every, record, max_weights
        self.history: list[dict] = []
        self.samples: list[WeightSample] = []
        self._due = True
        self._before: list[torch.Tensor] | None = None
        self._unlogged: dict[str, float] = {}

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.samples = sample_weights(model, self.max_weights)
        if not self.samples:
            reason = movement_unsupported_reason(model) or "it has no weight"
            raise ValueError(
                f"no step of {type(model).__name__} can be measured: {reason}; leave StepMovementCallback out"
            )
        get_logger().info(
            "movement of quantized weights in a step, first and every %d: %d rows of %d matrices, %.3g M weights",
            self.every,
            sum(sample.n_rows for sample in self.samples),
            sum(len(sample.matrices) for sample in self.samples),
            sum(sample.n_weights for sample in self.samples) / 1e6,
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
        if before is None:
            return
        found = step_movement(self.samples, before)
        if not found:
            return
        self._due = False
        entry = {name: asdict(movement) for name, movement in found.items()}
        self.history.append({"step": state.global_step, **entry})
        self._report(found)
        self._warn(state.global_step, found["total"])

    def on_log(self, args, state, control, logs=None, **kwargs):
        if not self._unlogged or logs is None:
            return
        values, self._unlogged = self._unlogged, {}
        if state.log_history:
            state.log_history[-1].update(values)
        logs.update(values)

    def _look(self) -> None:
        if self._due:
            self._before = [sample.take() for sample in self.samples]

    def _report(self, found: dict[str, Movement]) -> None:
        values = {"movement/flipped_share": found["total"].changed_share}
        for name, movement in found.items():
            values |= {f"movement/{name}": movement.ratio, f"movement_se/{name}": movement.standard_error}
        if self.record is None:
            self._unlogged = values
            return
        for name, value in values.items():
            self.record(name, value)

    def _warn(self, step: int, total: Movement) -> None:
        if total.ratio - 2 * total.standard_error > MOVEMENT_ALARM:
            get_logger().warning(
                "step %d: quantized weights moved %.3g +- %.2g times as far as their masters, which training takes for "
                "1. %s",
                step,
                total.ratio,
                2 * total.standard_error,
                movement_advice(is_first=len(self.history) == 1),
            )


def movement_unsupported_reason(model: nn.Module) -> str | None:
    """Why no movement can be measured for a model; `None` where it can."""
    matrices = list(trainable_matrices(model))
    if not matrices:
        return "it has no quantized layer with master weights"
    if not any(getattr(matrix.layer, matrix.parameter).requires_grad for matrix in matrices):
        return "the master weights of its quantized layers are frozen"
    return matrices[0].layer.config.weights_alone_unsupported_reason
