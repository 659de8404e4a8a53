# SPDX-License-Identifier: Apache-2.0
"""Weights on sampled tokens by how likely the policy that trains is to sample them.

TRL weights them for vLLM alone. Without vLLM the policy that samples is another one, too: noise in its norms, tokens
computed one by one from a key-value cache, compiled code, packed copies of weights, each with its own rounding, which
4-bit activations turn into steps of their grid. See docs/rollouts.md.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from transformers import ContinuousBatchingConfig

from ..._logging import get_logger
from ..config import MXFP4GRPOConfig
from .correction_options import limits_in_force
from .generation import generating_module
from .logprobs import recorded_batches, recorded_generate
from .mismatch import FAR, MismatchSums, importance_ratios, limit_ratios, log_ratios


_SAMPLED = "sampling_per_token_logps"
#: What TRL records under vLLM itself.
_RECORDED_BY_TRL = ("sampling/importance_sampling_ratio/m", "sampling/sampling_logp_difference/")

#: An effective sample size of the weights below this share of the sequences (or tokens) is warned of.
_FEW = 0.3

#: Gives one list of log-probabilities for each of the completions that were generated.
RowsOf = Callable[[list[list[int]]], list[list[float]]]


class RolloutCorrection:
    """Importance weights (`rollout_correction*`) and the `sampling/*` metrics.

    Both need the log-probabilities of the sampled tokens under the policy as it is when training on them begins. Where
    TRL does not compute those (rollouts and updates are aligned), they are what the training step itself computes, at
    no cost. TRL's loss takes one advantage per token as well as one per completion: the door for the weights, since
    they are not negative and every loss but VESPO's is, for a token, proportional to its advantage as long as the sign
    stays. VESPO takes them as they are.

    Args:
        args: of the trainer.
        accelerator: knows when an optimizer step ends, and gathers its measures.
        batching: under continuous batching, which is made to return log-probabilities; else `None`.
        record: called with a metric's name and value.
    """

    def __init__(
        self,
        args: MXFP4GRPOConfig,
        accelerator: Accelerator,
        batching: ContinuousBatchingConfig | None,
        record: Callable[[str, float], None],
    ):
        self._args, self._accelerator, self._batching, self._record = args, accelerator, batching, record
        self._sums, self._sums_step = MismatchSums(), -1
        self._waiting: tuple[dict[str, Any], torch.Tensor, int] | None = None
        self._is_same_policy = False
        self._warned: set[str] = set()
        if batching is not None:
            batching.return_logprobs = True

    # ---- the policy that samples ----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def recording(self, model: nn.Module) -> Iterator[RowsOf]:
        """Within this context one generation is recorded; gives what has its log-probabilities afterwards."""
        generator = generating_module(model)
        if self._batching is not None:
            with recorded_batches(generator) as rows:
                yield lambda completions: rows
        else:
            with recorded_generate(generator) as recorder:
                yield recorder.rows

    def check(self, batch: dict[str, Any], step: int, is_same_policy: bool = False) -> None:
        """Warn, before the first step, of a rollout for training that came without log-probabilities.

        Args:
            is_same_policy: whether what sampled this batch should differ from what trains by rounding alone, so that a
                warning is due when it does not.
        """
        self._is_same_policy = is_same_policy
        if _SAMPLED not in batch and limits_in_force(self._args) and step == 0:
            get_logger().warning("rollout_func returns no log-probabilities: its rollouts are not corrected")

    # ---- the policy that trains -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def weighting(self, inputs: dict[str, Any], step: int) -> Iterator[dict[str, Any]]:
        """Gives the training batch to compute the loss of within this context: its advantages are weighted already, or
        not there before [`take_log_probs`] was called, so that a loss that reads them earlier fails."""
        if _SAMPLED not in inputs:
            yield inputs
            return
        inputs = dict(inputs)  # weighted anew when the batch is trained on again
        old = inputs.get("old_per_token_logps")
        if old is not None:
            self._weigh(inputs, old, step)
            yield inputs
            return
        self._waiting = inputs, inputs.pop("advantages"), step
        try:
            yield inputs
        finally:
            self._waiting = None

    def take_log_probs(self, trained: torch.Tensor) -> None:
        """Weight the batch that waits for its log-probabilities ``[B, T]`` under the policy that trains."""
        if self._waiting is not None:
            (inputs, advantages, step), self._waiting = self._waiting, None
            inputs["advantages"] = advantages
            self._weigh(inputs, trained.detach(), step)

    def _weigh(self, inputs: dict[str, Any], trained: torch.Tensor, step: int) -> None:
        """Weight a batch in place by the ratio of ``trained`` to the probabilities it was sampled with; measure it."""
        mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        log_ratio = log_ratios(trained, inputs[_SAMPLED], mask)
        limits = limits_in_force(self._args)
        self._measure(log_ratio, mask, limits, step)
        if self._args.use_vllm or limits is None:
            return
        weights = limit_ratios(importance_ratios(log_ratio, limits[0]), *limits)
        if self._args.loss_type == "vespo":
            inputs["importance_sampling_ratio"] = weights.masked_fill(~mask.bool(), 1.0)
        else:
            inputs["advantages"] = inputs["advantages"].unsqueeze(1) * weights

    def _measure(self, log_ratio: torch.Tensor, mask: torch.Tensor, limits: tuple | None, step: int) -> None:
        """Add to what is logged once per optimizer step, over its batches and all processes."""
        if self._sums_step != step:
            self._sums, self._sums_step = MismatchSums(), step
        args = self._args
        would_be = args.rollout_correction_mode, args.rollout_correction_cap, args.rollout_correction_min
        self._sums.add(log_ratio, mask, *(limits or would_be))
        if self._accelerator.sync_gradients:
            by_trl = args.use_vllm and limits is not None
            measures = self._sums.measures(self._accelerator.gather)
            for name, value in measures.items():
                if not (by_trl and name.startswith(_RECORDED_BY_TRL)):
                    self._record(name, value)
            if measures:
                self._judge(measures, limits, step)
            self._sums_step = -1

    def _judge(self, measures: dict[str, float], limits: tuple | None, step: int) -> None:
        """Count and warn of, once each, weights that leave little to learn from, and a sampler that is another policy
        where it should not be."""
        if limits is not None:
            share = measures["sampling/effective_sample_size_weights"]
            self._record("sampling/few_effective", float(share < _FEW))
            if share < _FEW:
                self._warn(
                    "few",
                    "step %d: the importance weights (%s) have an effective sample size of %.2g of the %s: little is "
                    "learnt from the others. What samples is too far from what trains: see sampling/kl, lower the "
                    "noise, quantize alike on both sides, or use rollout_correction_mode='token_truncate'",
                    step, limits[0], share, "sequences" if limits[0].startswith("sequence") else "tokens",
                )  # fmt: skip
        if self._is_same_policy and measures["sampling/far_share"] > 0.5:
            self._warn(
                "far",
                "step %d: more than half of the sampled tokens have log-probabilities in vLLM that are off by more "
                "than %g, without noise and with the same quantization on both sides: what vLLM samples from is not "
                "what was pushed to it (a weight that it has renamed, repacked or not taken), or not what trains",
                step, FAR,
            )  # fmt: skip

    def _warn(self, what: str, message: str, *values: Any) -> None:
        if what not in self._warned:
            self._warned.add(what)
            get_logger().warning(message, *values)
