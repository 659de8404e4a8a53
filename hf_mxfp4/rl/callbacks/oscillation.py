# SPDX-License-Identifier: Apache-2.0
"""Resets weights that oscillate between two grid points (OsciReset of TetraJet-v2, arXiv 2510.27527)."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import nn
from transformers import TrainerCallback

from ..._logging import get_logger
from ...layers import MXFP4Experts, MXFP4Linear
from ...numerics import QuantScheme
from .entropy import add_to_log


#: A master weight, what the forward product takes for it, and its name.
Target = tuple[str, nn.Parameter, Callable[[torch.Tensor], torch.Tensor]]


class OscillationResetCallback(TrainerCallback):
    """Detects master weights that stay near a rounding threshold, so that small updates move the quantized value from
    one grid point to the next and back, and sets them to the grid point they are at (OsciReset, arXiv 2510.27527).

    Over a window of optimizer steps it sums, for every element, how far the master travelled, ``d_w = sum |dw|``, and
    how far its quantized value did, ``d_Q = sum |dQ(w)|``. Elements with ``d_Q >= ratio * d_w`` and ``d_w > 0`` become
    ``Q(w)`` at the end of the window. A window takes 16 bytes per float32 element; a run that is resumed within one
    skips it.

    Args:
        start: optimizer steps before the first window; the source begins at 0.6 to 0.7 of training.
        period: steps from the beginning of one window to that of the next.
        window: steps in a window.
        ratio: from which on an element oscillates; the source has 8 in its configurations, 16 as default.

    Attributes:
        history: one dictionary per window: ``step`` (at its end), ``n_reset``, ``n_weights``. Logged as
            `oscillation/n_reset` and `oscillation/share`.

    Raises `ValueError` when an argument is outside its range, when no weight of the model is quantized by rounding to
    nearest, when the weights are sharded, and when training ends before the first window does.
    """

    def __init__(self, start: int = 0, period: int = 200, window: int = 50, ratio: float = 8.0):
        if start < 0 or window < 1 or period < window + 1 or not ratio > 0:
            raise ValueError(
                f"start={start}, period={period}, window={window}, ratio={ratio}: start must not be negative, window "
                "must be at least 1, period larger than window, and ratio positive"
            )
        self.start, self.period, self.window, self.ratio = start, period, window, ratio
        self.history: list[dict] = []
        self._targets: list[Target] = []
        self._travels: list[_Travel] = []
        self._logged = 0

    @property
    def n_reset(self) -> int:
        """Elements reset so far; one that was reset twice counts twice."""
        return sum(entry["n_reset"] for entry in self.history)

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self._targets = list(quantized_weights(model))
        if not self._targets:
            raise ValueError(
                f"{type(model).__name__} has no layer whose weight is quantized by rounding to nearest, so none can "
                "oscillate; leave OscillationResetCallback out"
            )
        for name, weight, _ in self._targets:
            if hasattr(weight, "full_tensor") or weight.numel() == 0:
                raise ValueError(f"{name} is sharded, and blocks can span shards; OscillationResetCallback needs DDP")
        if self.start + self.window > state.max_steps:
            raise ValueError(
                f"the first window ends at step {self.start + self.window}, after the last step {state.max_steps}; "
                "lower start or window"
            )

    def on_step_begin(self, args, state, control, **kwargs):
        since = state.global_step - self.start
        if since >= 0 and since % self.period == 0:
            self._travels = [_Travel(weight, quantize) for _, weight, quantize in self._targets]

    def on_optimizer_step(self, args, state, control, **kwargs):
        if not self._travels:
            return
        for travel in self._travels:
            travel.add()
        step = state.global_step + 1  # the trainer counts the step later
        if (step - self.start) % self.period == self.window:
            self._reset(step)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if len(self.history) == self._logged or logs is None:
            return
        self._logged, last = len(self.history), self.history[-1]
        share = last["n_reset"] / last["n_weights"]
        add_to_log(state, logs, {"oscillation/n_reset": last["n_reset"], "oscillation/share": share})

    def _reset(self, step: int) -> None:
        n_reset = sum(travel.reset(self.ratio) for travel in self._travels)
        n_weights = sum(weight.numel() for _, weight, _ in self._targets)
        self._travels = []
        self.history.append({"step": step, "n_reset": n_reset, "n_weights": n_weights})
        get_logger().info("step %d: %d of %d weights oscillated and were reset", step, n_reset, n_weights)


def quantized_weights(model: nn.Module) -> Iterator[Target]:
    """The trainable master weights whose quantized values do not depend on random numbers."""
    for name, module in model.named_modules():
        if isinstance(module, MXFP4Linear) and module.weight.requires_grad:
            fprop = module.gemms.fprop
            if isinstance(fprop.right, QuantScheme) and not fprop.is_random:
                yield f"{name}.weight", module.weight, module.effective_weight
        elif isinstance(module, MXFP4Experts):
            for projection, gemms in module.gemms.items():
                weight = getattr(module, projection)
                usable = isinstance(gemms.fprop.right, QuantScheme) and not gemms.fprop.is_random
                if weight.requires_grad and usable:
                    yield f"{name}.{projection}", weight, partial(module.effective_weight, projection)


class _Travel:
    """How far a weight and its quantized value have gone since the window began."""

    def __init__(self, weight: nn.Parameter, quantize: Callable[[torch.Tensor], torch.Tensor]):
        self.weight, self.quantize = weight, quantize
        self.master, self.quantized = weight.detach().clone(), quantize(weight)
        self.of_master, self.of_quantized = torch.zeros_like(self.master), torch.zeros_like(self.master)

    @torch.no_grad()
    def add(self) -> None:
        """Count the last step."""
        quantized = self.quantize(self.weight)
        self.of_master += (self.weight - self.master).abs()
        self.of_quantized += (quantized - self.quantized).abs()
        self.master.copy_(self.weight)
        self.quantized = quantized

    @torch.no_grad()
    def reset(self, ratio: float) -> int:
        """Set the oscillating elements to their quantized values; return how many there were."""
        oscillates = (self.of_quantized >= ratio * self.of_master) & (self.of_master > 0)
        self.weight.copy_(torch.where(oscillates, self.quantized, self.weight))
        return int(oscillates.sum())
