# SPDX-License-Identifier: Apache-2.0
"""The part of [`MXFP4GRPOTrainer`] that has to do with adaptive quantization noise: rollouts see it, and nothing else.

What training computes with, evaluation and checkpoints are clean: noise lives in the forward passes of one rollout, or
in the weights that vLLM is given for one.
"""

import contextlib
import functools
import math
from collections.abc import Iterator
from typing import Any

import torch
from trl import GRPOTrainer

from ..._logging import get_logger
from ...adapters import is_packed_with_adapters, policy_parameters
from ...layers import QUANTIZED
from ..rollout.vllm import rollout_parameters
from .controller import EntropyNoiseController
from .linears import LinearNoise, linear_targets
from .norms import NoiseReport, NormNoise, find_norms
from .targets import check_patterns, plain_name


class RolloutNoise(GRPOTrainer):
    """Noise around each rollout of training, and its way to vLLM. Does nothing under `aqn=False`.

    Attributes:
        noise: on norms; `None` without.
        linear_noise: on linear layers and experts; `None` without.
        noise_controller: under `aqn_schedule="entropy"`; else `None`.
    """

    noise: NormNoise | None = None
    linear_noise: LinearNoise | None = None
    noise_controller: EntropyNoiseController | None = None

    def _set_up_noise(self) -> None:
        """Set up what the config asks for; raises `ValueError` where there is nothing to put noise on."""
        args = self.args
        # Whether vLLM holds noisy weights.
        self._noise_is_pushed = False
        self._swallowed: set[str] = set()
        if not args.aqn:
            return
        seed = args.seed if args.aqn_seed is None else args.aqn_seed
        if args.aqn_layers is not None:
            self._check_layers()
        if args.aqn_targets != "linears":
            self.noise = NormNoise(self.model, seed, compiled=self._generates_compiled, layers=args.aqn_layers)
        if args.aqn_targets != "norms":
            if self._generates_compiled:
                raise ValueError(
                    f"aqn_targets={args.aqn_targets!r} puts noise on linear layers in eager mode, which compiled code "
                    "does not see; set aqn_targets='norms', or switch the compilation of rollouts off"
                )
            self.linear_noise = LinearNoise(self.model, seed, args.aqn_linear_sigma_scale, args.aqn_layers)
        if args.aqn_schedule == "entropy":
            self.noise_controller = args.noise_controller(record=self._record)
            # Ahead of all callbacks that may fail: a step that is counted has moved it.
            self.callback_handler.callbacks.insert(0, self.noise_controller)

    def _check_layers(self) -> None:
        targets, names = self.args.aqn_targets, []
        if targets != "linears":
            names += [plain_name(name) for name in find_norms(self.model)]
        if targets != "norms":
            names += [name for target in linear_targets(self.model).values() for name in target.names]
        what = {"norms": "norms", "linears": "linear layers", "both": "norms and linear layers"}[targets]
        check_patterns(self.args.aqn_layers, names, what)

    def _describe_noise(self) -> str:
        """What gets noise, counted."""
        parts = []
        if self.noise is not None:
            parts.append(f"{len(self.noise.norms)} norms")
        if self.linear_noise is not None:
            parts.append(f"{self.linear_noise.n_matrices} linear weights")
        return f"{' and '.join(parts)} ({self.args.aqn_schedule})" if parts else "nothing"

    def _sigma(self) -> float:
        """Standard deviation of the noise at this step; 0 outside of training."""
        if not self.args.aqn or not self.model.training:
            return 0.0
        if self.noise_controller is not None:
            return self.noise_controller.sigma
        return self.args.noise_schedule.sigma(self.state.global_step, self.state.max_steps)

    @contextlib.contextmanager
    def _rollout_noise(self) -> Iterator[float]:
        """Noise for one rollout; gives its standard deviation, 0 outside of training."""
        sigma = self._sigma()
        if self.use_vllm and (self._noise_is_pushed or self.args.aqn and self.model.training):
            # The noise travels with the weights: a push is due even if they have not changed, to bring noise, or in
            # evaluation to take it away.
            self._last_loaded_step = -1
        if not self.args.aqn or not self.model.training:
            yield 0.0
            return
        noises = [noise for noise in (self.noise, self.linear_noise) if noise is not None]
        if self.use_vllm:
            for noise in noises:
                noise.last_report = NoiseReport(0.0, 0.0, 0) if sigma == 0 else None
            yield sigma
            if any(noise.last_report is None for noise in noises):
                raise RuntimeError("adaptive quantization noise did not reach vLLM: no weights were pushed")
        else:
            with contextlib.ExitStack() as stack:
                for noise in noises:
                    stack.enter_context(noise.active(self.state.global_step, sigma))
                yield sigma
        self._record_noise(sigma)

    def _record_noise(self, sigma: float) -> None:
        self._record("aqn/sigma", sigma)
        if self.noise is not None:
            report = self.noise.last_report
            self._record("aqn/measured_std", report.measured_std)
            self._record("aqn/n_modules", report.modules)
            self._warn_of_swallowed("norms", report)
        if self.linear_noise is not None:
            report = self.linear_noise.last_report
            self._record("aqn/linear_sigma", report.sigma)
            self._record("aqn/linear_measured_std", report.measured_std)
            self._record("aqn/n_linears", report.modules)
            self._record("aqn/n_dense_copies", self.linear_noise.n_dense)
            self._warn_of_swallowed("linear layers", report)

    def _warn_of_swallowed(self, what: str, report: NoiseReport) -> None:
        if not report.is_swallowed or what in self._swallowed:
            return
        self._swallowed.add(what)
        get_logger().warning(
            "step %d: noise on %s was meant to have a standard deviation of %.2g and has %.2g: the dtype that they "
            "sample in rounds it away; raise aqn_sigma_end, or sample in float32",
            self.state.global_step,
            what,
            report.sigma,
            report.measured_std,
        )

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        metrics = self._metrics["train"]  # evaluation's are others
        before = len(metrics.get("entropy", ()))
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        entropies = metrics.get("entropy", [])
        if len(entropies) == before:
            return loss
        if not self._any_token_counts(inputs):
            # TRL logs 0, which is the entropy of a policy that has collapsed. What is NaN, its log leaves out.
            entropies[before:] = [math.nan] * (len(entropies) - before)
        if self.noise_controller is not None:
            # Of the tokens of all processes.
            for entropy in entropies[before:]:
                self.noise_controller.observe(entropy)
        return loss

    def _any_token_counts(self, inputs: dict[str, Any]) -> bool:
        """Whether the loss has a token in the micro-batch of any process, all of which must call this."""
        counted = (inputs["completion_mask"] * inputs.get("tool_mask", 1)).sum()
        return self.accelerator.reduce(counted, reduction="sum").item() > 0

    def _push_rollout_policy_to_vllm(self) -> None:
        generation = self.vllm_generation
        named_parameters = generation._iter_named_params

        @functools.wraps(named_parameters)
        def rollout_policy():
            # TRL would merge the adapters, which for packed layers means to quantize their sum with the weight; the
            # policy that trains adds them to the quantized weight.
            packed = is_packed_with_adapters(self.model)
            named = policy_parameters(self.model) if packed else named_parameters()
            sigma = self._sigma()
            # From the first tensor on, and until all of them are clean again.
            self._noise_is_pushed = self._noise_is_pushed or sigma > 0
            step = self.state.global_step
            yield from rollout_parameters(named, self.model, self.noise, step, sigma, self.linear_noise)
            self._noise_is_pushed = sigma > 0

        generation._iter_named_params = rollout_policy
        layers = [module for module in self.model.modules() if isinstance(module, QUANTIZED)]
        if any(layer.config.activation_scheme is not None for layer in layers):
            get_logger().warning(
                "vLLM samples from the quantized weights with full-precision activations (W4A16); "
                "vllm_importance_sampling_correction accounts for the difference"
            )
