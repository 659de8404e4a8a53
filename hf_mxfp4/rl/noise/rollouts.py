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
from .controller import EntropyNoiseController
from .linears import LinearNoise, linear_targets
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
        norms: on norms; `None` without.
        linears: on linear layers and experts; `None` without.
        controller: under `aqn_schedule="entropy"`; else `None`. A callback.

    Raises `ValueError` where there is nothing to put noise on.
    """

    def __init__(
        self, model: nn.Module, args: MXFP4GRPOConfig, is_compiled: bool, record: Callable[[str, float], None]
    ):
        self._args, self._record = args, record
        self._swallowed: set[str] = set()
        self.norms: NormNoise | None = None
        self.linears: LinearNoise | None = None
        self.controller: EntropyNoiseController | None = None
        seed = args.seed if args.aqn_seed is None else args.aqn_seed
        if args.aqn_layers is not None:
            _check_layers(model, args)
        if args.aqn_targets != "linears":
            self.norms = NormNoise(model, seed, compiled=is_compiled, layers=args.aqn_layers)
        if args.aqn_targets != "norms":
            if is_compiled:
                raise ValueError(
                    f"aqn_targets={args.aqn_targets!r} puts noise on linear layers in eager mode, which compiled code "
                    "does not see; set aqn_targets='norms', or switch the compilation of rollouts off"
                )
            self.linears = LinearNoise(model, seed, args.aqn_linear_sigma_scale, args.aqn_layers)
        if args.aqn_schedule == "entropy":
            self.controller = args.noise_controller(record=record)

    def describe(self) -> str:
        """Say what gets noise, counted."""
        parts = []
        if self.norms is not None:
            parts.append(f"{len(self.norms.norms)} norms")
        if self.linears is not None:
            parts.append(f"{self.linears.n_matrices} linear weights")
        return f"{' and '.join(parts)} ({self._args.aqn_schedule})"

    def sigma(self, step: int, max_steps: int) -> float:
        """Standard deviation of the noise in a rollout for training after optimizer step ``step``."""
        if self.controller is not None:
            return self.controller.sigma
        return self._args.noise_schedule.sigma(step, max_steps)

    @contextlib.contextmanager
    def active(self, step: int, sigma: float) -> Iterator[None]:
        """Noise on the policy's own modules as long as one rollout by them lasts."""
        with contextlib.ExitStack() as stack:
            for noise in self._parts():
                stack.enter_context(noise.active(step, sigma))
            yield
        self._log(step, sigma)

    @contextlib.contextmanager
    def pushed(self, step: int, sigma: float) -> Iterator[None]:
        """One rollout by vLLM, to which weights are pushed within the context; they carry the noise, see
        [`rollout_parameters`]. Raises `RuntimeError` at the end when none were pushed."""
        for noise in self._parts():
            noise.last_report = NoiseReport(0.0, 0.0, 0) if sigma == 0 else None
        yield
        if any(noise.last_report is None for noise in self._parts()):
            raise RuntimeError("adaptive quantization noise did not reach vLLM: no weights were pushed")
        self._log(step, sigma)

    def _parts(self) -> list[NormNoise | LinearNoise]:
        return [noise for noise in (self.norms, self.linears) if noise is not None]

    def _log(self, step: int, sigma: float) -> None:
        self._record("aqn/sigma", sigma)
        if self.norms is not None:
            report = self.norms.last_report
            self._record("aqn/measured_std", report.measured_std)
            self._record("aqn/n_modules", report.modules)
            self._warn_of_swallowed("norms", report, step)
        if self.linears is not None:
            report = self.linears.last_report
            self._record("aqn/linear_sigma", report.sigma)
            self._record("aqn/linear_measured_std", report.measured_std)
            self._record("aqn/n_linears", report.modules)
            self._record("aqn/n_dense_copies", self.linears.n_dense)
            self._warn_of_swallowed("linear layers", report, step)

    def _warn_of_swallowed(self, what: str, report: NoiseReport, step: int) -> None:
        if not report.is_swallowed or what in self._swallowed:
            return
        self._swallowed.add(what)
        get_logger().warning(
            "step %d: noise on %s was meant to have a standard deviation of %.2g and has %.2g: the dtype that they "
            "sample in rounds it away; raise aqn_sigma_end, or sample in float32",
            step,
            what,
            report.sigma,
            report.measured_std,
        )


def _check_layers(model: nn.Module, args: MXFP4GRPOConfig) -> None:
    targets, names = args.aqn_targets, []
    if targets != "linears":
        names += [plain_name(name) for name in find_norms(model)]
    if targets != "norms":
        names += [name for target in linear_targets(model).values() for name in target.names]
    what = {"norms": "norms", "linears": "linear layers", "both": "norms and linear layers"}[targets]
    check_patterns(args.aqn_layers, names, what)
