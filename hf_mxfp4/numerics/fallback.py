# SPDX-License-Identifier: Apache-2.0
"""Selective outlier fallback: which blocks get the residual pass.

Blocks are chosen by the squared error of their first pass: those with the largest errors of a tensor, or those above a
threshold that follows a target rate with a delay (INT8 block fallback, arXiv 2503.08040).
"""

import math
from collections import defaultdict
from collections.abc import Iterable
from fractions import Fraction

import torch

from .errors import SQUARE_UNITS, inverse_power_of_two, sum_of_squares


#: The measured rate over its target beyond which the threshold moves, and the factor by which it does. The rule is that
#: of arXiv 2503.08040 (compare with the step before, multiply or divide); the numbers are ours, of the size used there.
RAISE_ABOVE = 1.25
LOWER_BELOW = 0.75
THRESHOLD_STEP = 1.3

#: Errors of a block that are not zero are at least and at most this.
SMALLEST_ERROR = torch.finfo(torch.float32).tiny
LARGEST_ERROR = torch.finfo(torch.float32).max


def block_errors(
    residual: torch.Tensor, amax: torch.Tensor, divisor: torch.Tensor | None, multiplier: torch.Tensor | None
) -> torch.Tensor:
    """Squared error of each block's first pass, in the domain of ``x``: float32 ``[..., blocks]``.

    The same number in whatever order it is added up: with ``2**E`` the power of two below the block's largest magnitude
    it is ``n * 2**-23 * 4**E / f**2``, where ``n`` is the integer sum of the squares of ``residual / 2**E``, each cut
    to a multiple of 2**-23. Zero only if ``n`` is; otherwise it saturates at the smallest normal and at the largest
    finite float32 number, so that blocks outside of about 1e-19..1e19 in magnitude are told apart no longer.

    Args:
        residual: ``z - Q(z)``, ``[..., blocks, elements]``; 0 where the block is NaN.
        amax: largest magnitude of ``z`` per block.
        divisor: the macro factor ``f`` per block by which results are divided, or `None`.
        multiplier: the blockwise factor by which they are multiplied, or `None`.
    """
    unit = inverse_power_of_two(amax)
    count = sum_of_squares(residual * unit.unsqueeze(-1))
    error = count.to(torch.float32).mul_(1.0 / SQUARE_UNITS)
    # The factors have at most nine bits, hence exact squares.
    if divisor is not None:
        error.div_(divisor.square())
    if multiplier is not None:
        error.mul_(multiplier.square())
    # Twice a power of two, since 4**E may leave float32 where the result does not; subnormal ones end as the smallest.
    power = ((254 << 23) - unit.view(torch.int32)).clamp_(min=1 << 23).view(torch.float32)
    error.mul_(power).mul_(power).clamp_(SMALLEST_ERROR, LARGEST_ERROR)
    return error.masked_fill_(count == 0, 0.0)


def blocks_at_rate(rate: float, total: int) -> int:
    """``ceil(rate * total)`` for the decimal number that ``rate`` is written as: 3 for 0.1 of 30, not 4."""
    return math.ceil(Fraction(repr(float(rate))) * total)


def select_share(errors: torch.Tensor, rate: float) -> torch.Tensor:
    """Mask of the ``ceil(rate * blocks)`` blocks with the largest errors. Of equal ones the first are taken; blocks
    without error never are."""
    order = torch.sort(errors.flatten(), descending=True, stable=True).indices
    chosen = torch.zeros(errors.numel(), dtype=torch.bool, device=errors.device)
    chosen[order[: blocks_at_rate(rate, errors.numel())]] = True
    return chosen.view(errors.shape) & (errors > 0)


def share_threshold(errors: torch.Tensor, rate: float) -> float | None:
    """The threshold above which lie the blocks of [`select_share`] (fewer where errors are equal); always positive.
    `None` when no block has an error."""
    positive = errors[errors > 0]
    if positive.numel() == 0:
        return None
    count = blocks_at_rate(rate, errors.numel())
    if count >= positive.numel():
        return positive.min().item() / 2
    return positive.topk(count + 1).values[-1].item()


class FallbackThreshold:
    """A threshold on block errors that holds the share of blocks above it near ``target``, one step behind.

    It starts where the first tensor has exactly that share, and then only [`update`] moves it: by the factor 1.3, when
    the rate measured since the last update is more than a quarter off. Within a step it stands still, so that an
    activation that is computed twice (gradient checkpointing) is quantized alike.

    Attributes:
        target: share of blocks in (0, 1).
        value: the threshold, in units of ``x**2``; `None` until a tensor with an error was seen.
    """

    def __init__(self, target: float):
        self.target = target
        self.value: float | None = None
        self._selected: int | torch.Tensor = 0
        self._total = 0

    def select(self, errors: torch.Tensor) -> torch.Tensor:
        """Mask of the blocks above the threshold, which starts here if it has not yet."""
        if self.value is None:
            self.value = share_threshold(errors, self.target)
        return select_above(errors, self.value or 0.0)

    def observe(self, selected: int | torch.Tensor, total: int) -> None:
        """Count ``selected`` (a number, or a tensor that need not be waited for) of ``total`` blocks."""
        self._selected = self._selected + selected
        self._total += total

    def update(self) -> float:
        """Move the threshold by what was counted, count from zero again, and return the measured rate (NaN when
        nothing was counted)."""
        if self._total == 0:
            return math.nan
        rate = int(self._selected) / self._total
        self._selected, self._total = 0, 0
        if self.value is not None and rate > RAISE_ABOVE * self.target:
            self.value = min(self.value * THRESHOLD_STEP, LARGEST_ERROR)
        elif self.value is not None and rate < LOWER_BELOW * self.target:
            self.value = max(self.value / THRESHOLD_STEP, SMALLEST_ERROR)
        return rate

    def state_dict(self) -> dict[str, float | int | None]:
        """The threshold and what was counted since the last update, as plain numbers."""
        return {"value": self.value, "selected": int(self._selected), "total": self._total}

    def load_state_dict(self, state: dict[str, float | int | None]) -> None:
        """Continue from what [`state_dict`] returned."""
        self.value, self._selected, self._total = state["value"], state["selected"], state["total"]


def fetch_counts(thresholds: Iterable[FallbackThreshold]) -> None:
    """Wait once per device, not once per threshold, for what these have counted there."""
    waiting = defaultdict(list)
    for threshold in thresholds:
        if isinstance(threshold._selected, torch.Tensor):
            waiting[threshold._selected.device].append(threshold)
    for group in waiting.values():
        counts = torch.stack([threshold._selected.reshape(()) for threshold in group]).tolist()
        for threshold, count in zip(group, counts, strict=True):
            threshold._selected = count


def select_above(errors: torch.Tensor, threshold: float) -> torch.Tensor:
    """Mask of the blocks with errors above ``threshold``, taken in float32."""
    return errors > threshold
