# SPDX-License-Identifier: Apache-2.0
"""Adaptive quantization noise around a rollout of training, which sees it, and nothing else.

What training computes with, evaluation and checkpoints are clean: noise lives in the forward passes of one rollout, or
in the weights that vLLM is given for one.
"""

import contextlib
from collections.abc import Callable, Iterator

from torch import nn

from ..._logging import get_logger
from ..config import MXFP4GRPOConfig
from .norms import NoiseReport, NormNoise, find_norms
from .targets import check_patterns, plain_name


class RolloutNoise:
    """Noise as the `aqn_*` options ask for it, and the log of what it did (`aqn/*`).

    Args:
        model: the policy.
        args: of the trainer.
        is_compiled: whether compiled code of the model runs in a rollout, too.
        record: called with a metric's name and value.

    Attributes:
        norms: the noise on norms.

    Raises `ValueError` where there is nothing to put noise on.
    """

    def __init__(
        self, model: nn.Module, args: MXFP4GRPOConfig, is_compiled: bool, record: Callable[[str, float], None]
    ):
        self._args, self._record = args, record
        self._warned = False
        seed = args.seed if args.aqn_seed is None else args.aqn_seed
        if args.aqn_layers is not None:
            check_patterns(args.aqn_layers, [plain_name(name) for name in find_norms(model)])
        self.norms = NormNoise(model, seed, compiled=is_compiled, layers=args.aqn_layers)

    def describe(self) -> str:
        """Say what gets noise, counted."""
        return f"{len(self.norms.norms)} norms ({self._args.aqn_schedule})"

    def sigma(self, step: int, max_steps: int) -> float:
        """Standard deviation of the noise in a rollout for training after optimizer step ``step``."""
        return self._args.noise_schedule.sigma(step, max_steps)

    @contextlib.contextmanager
    def active(self, step: int, sigma: float) -> Iterator[None]:
        """Noise on the policy's own modules as long as one rollout by them lasts."""
        with self.norms.active(step, sigma):
            yield
        self._log(step, sigma)

    @contextlib.contextmanager
    def pushed(self, step: int, sigma: float) -> Iterator[None]:
        """One rollout by vLLM, to which weights are pushed within the context; they carry the noise, see
        [`rollout_parameters`]. Raises `RuntimeError` at the end when none were pushed."""
        self.norms.last_report = NoiseReport(0.0, 0.0, 0) if sigma == 0 else None
        yield
        if self.norms.last_report is None:
            raise RuntimeError("adaptive quantization noise did not reach vLLM: no weights were pushed")
        self._log(step, sigma)

    def _log(self, step: int, sigma: float) -> None:
        report = self.norms.last_report
        self._record("aqn/sigma", sigma)
        self._record("aqn/measured_std", report.measured_std)
        self._record("aqn/n_modules", report.modules)
        if report.is_swallowed and not self._warned:
            self._warned = True
            get_logger().warning(
                "step %d: noise on norms was meant to have a standard deviation of %.2g and has %.2g: the dtype that "
                "they sample in rounds it away; raise aqn_sigma_end, or sample in float32",
                step,
                report.sigma,
                report.measured_std,
            )
