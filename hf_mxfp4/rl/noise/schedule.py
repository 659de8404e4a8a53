# SPDX-License-Identifier: Apache-2.0
"""How strong adaptive quantization noise is at each step of training, as a closed form of step and total steps.

Exponential stages are those of QeRL (arXiv 2510.11696, section 3.3), used for MXFP4 in arXiv 2605.20402.
"""

import math
from dataclasses import dataclass


#: Closed forms of [`NoiseSchedule`].
SHAPES = ("exponential", "linear", "cosine", "constant")


def check_bounds(start: float, end: float) -> None:
    """Raise `ValueError` unless ``start >= end > 0``, both finite."""
    if not (math.isfinite(start) and start >= end > 0):
        raise ValueError(
            f"aqn_sigma_start={start} must be finite and at least aqn_sigma_end={end}, which must be positive"
        )


@dataclass(frozen=True)
class NoiseSchedule:
    """Standard deviation over training, of which the first of ``stages`` equal parts is noise-free.

    After that part, in which ``t`` goes from 0 at the first noisy step to 1 at the last step of training:

    * ``"exponential"``: one value in each of the other stages, geometric from ``start`` to ``end``. With two stages the
      second has ``start``;
    * ``"linear"``: ``start + (end - start) t``, a value for each step;
    * ``"cosine"``: ``end + (start - end) (1 + cos(pi t)) / 2``;
    * ``"constant"``: ``start``; ``end`` has no effect.

    A single stage has no noise-free part: exponential and constant noise are ``start`` throughout, and the other two
    begin to fall with the first step. With fewer steps than stages step 0 alone is noise-free.

    Raises `ValueError` unless ``start >= end > 0``, ``stages >= 1``, and ``shape`` is one of `SHAPES`.
    """

    start: float = 1e-2
    end: float = 1e-3
    stages: int = 10
    shape: str = "exponential"

    def __post_init__(self):
        check_bounds(self.start, self.end)
        if self.stages < 1:
            raise ValueError(f"aqn_num_stages={self.stages} must be at least 1")
        if self.shape not in SHAPES:
            raise ValueError(
                f"aqn_schedule={self.shape!r} is not known; choose one of {', '.join(SHAPES)}, or 'entropy', "
                "which is no function of step and total steps"
            )

    def sigma(self, step: int, max_steps: int) -> float:
        """The value at optimizer step ``step`` (the number of steps taken before) of ``max_steps``: a function of these
        two numbers alone, so that epochs and resumed runs follow the same curve. Steps past the end have the last
        step's value."""
        max_steps = max(max_steps, 1)
        if self.stages > 1 and step * self.stages < max_steps:
            return 0.0
        if self.shape == "constant":
            return self.start
        if self.shape == "exponential":
            return self._stage_value(min(step * self.stages // max_steps, self.stages - 1))
        first = -(-max_steps // self.stages) if self.stages > 1 else 0
        last = max(max_steps - 1, first)
        t = (min(step, last) - first) / max(last - first, 1)
        falling = 1 - t if self.shape == "linear" else (1 + math.cos(math.pi * t)) / 2
        return self.end + (self.start - self.end) * falling

    def _stage_value(self, stage: int) -> float:
        """Of a noisy stage."""
        if self.stages <= 2:
            return self.start
        return self.start * (self.end / self.start) ** ((stage - 1) / (self.stages - 2))
