# SPDX-License-Identifier: Apache-2.0
"""Rollouts: the log-probability that each token was drawn with, and importance weights on it (docs/rollouts.md).

Log-probabilities come from the very scores that transformers samples from, so noise, the key-value cache, packed copies
of weights, temperature, top-k and top-p are all in them, and no second forward pass is needed.

``log_ratio`` is log p(token) - log q(token), with q the policy that sampled and p the one that trains, ``[B, T]``; what
``mask`` leaves out is not counted.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from transformers import GenerationMixin, LogitsProcessor

from .._logging import get_logger
from ..backends import widest_float
from ..utils import replaced_method


#: As in TRL's `vllm_importance_sampling_mode`: a weight per token, or one per sequence, the product of its tokens'
#: ratios; those above the limit are set to the limit, or to zero.
CORRECTION_MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
#: Measures of a whole sequence by which it can be rejected, and what their limits must be above. As in verl.
REJECTION_MODES = {"geometric": 1.0, "k3": 0.0}
#: TRL's options for vLLM, by ours.
_THEIRS = {
    "rollout_correction": "vllm_importance_sampling_correction",
    "rollout_correction_mode": "vllm_importance_sampling_mode",
    "rollout_correction_cap": "vllm_importance_sampling_clip_max",
}

_SAMPLED = "sampling_per_token_logps"
#: What TRL records under vLLM itself.
_RECORDED_BY_TRL = ("sampling/importance_sampling_ratio/m", "sampling/sampling_logp_difference/")
#: Beyond it the exponential says nothing but "too large".
_LARGEST = 20.0
#: An effective sample size of the weights below this share of the sequences (or tokens) is warned of.
_FEW = 0.3


# ---- generation ---------------------------------------------------------------------------------------------------


class SampledLogProbs(LogitsProcessor):
    """Last in `generate`'s chain of processors: keeps the log-probability of each token that was drawn, which it reads
    off the next call's input."""

    def __init__(self):
        self._steps: list[torch.Tensor] = []
        self._scores: torch.Tensor | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self._scores is not None:
            self._steps.append(_log_prob(self._scores, input_ids[:, -1]))
        self._scores = scores
        return scores

    def rows(self, completions: list[list[int]]) -> list[list[float]]:
        """One list per completion, as long as it is. Raises `RuntimeError` when fewer positions were sampled."""
        longest = max((len(row) for row in completions), default=0)
        if self._scores is None or len(self._scores) != len(completions) or longest > len(self._steps) + 1:
            sampled = 0 if self._scores is None else len(self._steps) + 1
            raise RuntimeError(
                f"{sampled} sampled positions are recorded for {len(completions)} completions of up to {longest} tokens"
            )
        # The token of the last position went into no further call; a completion that ended earlier does not need it.
        last = torch.tensor([row[-1] if row else 0 for row in completions], device=self._scores.device)
        steps = torch.stack([*self._steps, _log_prob(self._scores, last)], dim=1).tolist()
        return [row[: len(ids)] for row, ids in zip(steps, completions, strict=True)]


def _log_prob(scores: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """``[B, V]``, ``[B]`` -> float32 ``[B]``."""
    scores = scores.float()
    return scores.gather(1, tokens.unsqueeze(1)).squeeze(1) - scores.logsumexp(dim=1)


@contextlib.contextmanager
def recorded_log_probs(model: nn.Module) -> Iterator[SampledLogProbs]:
    """Record one `generate` of ``model``, which PEFT may have wrapped, within this context."""
    generator = next(module for module in model.modules() if isinstance(module, GenerationMixin))
    recorder = SampledLogProbs()
    make_processors = generator._get_logits_processor

    # The public `logits_processor` of `generate` runs before temperature, top-k and top-p.
    @functools.wraps(make_processors)
    def with_recorder(*args: Any, **kwargs: Any):
        processors = make_processors(*args, **kwargs)
        processors.append(recorder)
        return processors

    with replaced_method(generator, "_get_logits_processor", with_recorder):
        yield recorder


# ---- correction ---------------------------------------------------------------------------------------------------


def check_correction(args: Any) -> None:
    """Raise `ValueError` for values of `rollout_correction*` and `rollout_rejection*` that mean nothing."""
    mode, limit = args.rollout_rejection, args.rollout_rejection_limit
    if mode is None and limit is not None:
        raise ValueError(f"rollout_rejection_limit={limit} has no effect without rollout_rejection")
    if mode is not None and mode not in REJECTION_MODES:
        raise ValueError(f"rollout_rejection={mode!r} is not known; choose one of {', '.join(REJECTION_MODES)}")
    if mode is not None and not (limit is not None and REJECTION_MODES[mode] < limit < math.inf):
        raise ValueError(f"rollout_rejection_limit={limit} must be above {REJECTION_MODES[mode]} for {mode!r}")
    mode, cap = args.rollout_correction_mode, args.rollout_correction_cap
    if mode not in CORRECTION_MODES:
        raise ValueError(f"rollout_correction_mode={mode!r} is not known; choose one of {', '.join(CORRECTION_MODES)}")
    if not cap > 0 or not math.isfinite(cap):
        raise ValueError(f"rollout_correction_cap={cap} must be a positive number")
    if args.rollout_correction and args.loss_type == "vespo" and mode.startswith("sequence"):
        raise ValueError(
            "loss_type='vespo' multiplies the ratios of a sequence's tokens itself: use rollout_correction_mode="
            "'token_truncate' or 'token_mask'"
        )


def share_with_trl(args: Any) -> None:
    """Give TRL's options for vLLM the values of ours.

    Raises `ValueError` under `use_vllm` where one of TRL's is given, as far as its value can tell, and differs.
    """
    if args.vllm_importance_sampling_cap is not None:  # the old name of the upper limit, which TRL still reads
        args.vllm_importance_sampling_clip_max = args.vllm_importance_sampling_cap
    for own, theirs in _THEIRS.items():
        given, value = getattr(args, theirs), getattr(args, own)
        if args.use_vllm and given not in (value, args.__dataclass_fields__[theirs].default):
            raise ValueError(f"{theirs}={given!r} is the same option as {own}={value!r}; set {own} alone")
        setattr(args, theirs, value)


def importance_ratios(log_ratio: torch.Tensor, mode: str) -> torch.Tensor:
    """Return p / q: ``[B, T]``, or ``[B, 1]`` under the sequence modes."""
    if mode.startswith("sequence"):
        log_ratio = log_ratio.sum(dim=1, keepdim=True)
    return log_ratio.clamp(-_LARGEST, _LARGEST).exp()


def limit_ratios(ratio: torch.Tensor, mode: str, cap: float) -> torch.Tensor:
    """Return the weights of one of `CORRECTION_MODES`."""
    return ratio.clamp(max=cap) if mode.endswith("truncate") else ratio.masked_fill(ratio > cap, 0.0)


def kept_sequences(log_ratio: torch.Tensor, mask: torch.Tensor, mode: str | None, limit: float | None) -> torch.Tensor:
    """Which sequences one of `REJECTION_MODES`, or none, leaves in the loss: bool ``[B]``.

    Averaged over the tokens of a sequence, unlike their product, the ratios do not vanish with its length. ``k3`` is an
    estimate of the KL divergence that is never negative (http://joschu.net/blog/kl-approx.html).
    """
    if mode is None:
        return torch.ones_like(mask[:, 0], dtype=torch.bool)
    if mode == "geometric":
        each, limit = log_ratio, math.log(limit)
    else:
        each = log_ratio.clamp(-_LARGEST, _LARGEST).expm1() - log_ratio
    return ((each * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)).abs() <= limit


class RolloutCorrection:
    """Importance weights (`rollout_correction*`), rejected sequences and the `sampling/*` metrics.

    Both need the log-probabilities of the sampled tokens as training on them begins. Where TRL does not compute those
    (rollouts and updates are aligned), the training step itself does. The weights multiply the advantages.
    """

    def __init__(self, args: Any, accelerator: Accelerator, record: Callable[[str, float], None]):
        self._args, self._accelerator, self._record = args, accelerator, record
        self._sums = MismatchSums()
        self._waiting: tuple[dict[str, Any], torch.Tensor, int] | None = None
        self._warned = False

    def forget_step(self) -> None:
        """Forget the batches of an optimizer step that is measured, or was cut short."""
        self._sums = MismatchSums()

    def check(self, batch: dict[str, Any], step: int) -> None:
        """Warn, before the first step, of a rollout for training that came without log-probabilities."""
        if _SAMPLED not in batch and self._args.rollout_correction and step == 0:
            get_logger().warning("rollout_func returns no log-probabilities: its rollouts are not corrected")

    @contextlib.contextmanager
    def weighting(self, inputs: dict[str, Any], step: int) -> Iterator[dict[str, Any]]:
        """Give the training batch to compute the loss of: its advantages are weighted, or missing until
        [`take_log_probs`] was called."""
        if _SAMPLED not in inputs:
            yield inputs
            return
        inputs = dict(inputs)  # the batch itself may be trained on again
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
        mask, args = inputs["completion_mask"] * inputs.get("tool_mask", 1), self._args
        # NaN: a token that the sampler could not score.
        log_ratio = torch.nan_to_num((trained - inputs[_SAMPLED]) * mask, nan=0.0)
        kept = kept_sequences(log_ratio, mask, args.rollout_rejection, args.rollout_rejection_limit)
        self._measure(log_ratio, mask, kept, step)
        if args.rollout_rejection:
            inputs["advantages"] = inputs["advantages"] * kept
        if args.use_vllm or not args.rollout_correction:
            return
        mode, cap = args.rollout_correction_mode, args.rollout_correction_cap
        weights = limit_ratios(importance_ratios(log_ratio, mode), mode, cap)
        if args.loss_type == "vespo":
            inputs["importance_sampling_ratio"] = weights.masked_fill(~mask.bool(), 1.0)
        else:
            inputs["advantages"] = inputs["advantages"].unsqueeze(1) * weights

    def _measure(self, log_ratio: torch.Tensor, mask: torch.Tensor, kept: torch.Tensor, step: int) -> None:
        """Add to what is logged once per optimizer step, over its batches and all processes."""
        args = self._args
        self._sums.add(log_ratio, mask, args.rollout_correction_mode, args.rollout_correction_cap, kept)
        if not self._accelerator.sync_gradients:
            return
        measures = self._sums.measures(self._accelerator.gather)
        self.forget_step()
        if not args.rollout_rejection:
            measures.pop("sampling/rejected", None)
        for name, value in measures.items():
            if not (args.use_vllm and args.rollout_correction and name.startswith(_RECORDED_BY_TRL)):
                self._record(name, value)
        share, mode = measures.get("sampling/effective_sample_size_weights", 1.0), args.rollout_correction_mode
        if self._warned or share >= _FEW or not (args.rollout_correction or args.rollout_rejection):
            return
        self._warned = True
        get_logger().warning(
            "step %d: the importance weights (%s) have an effective sample size of %.2g of the %s: little is learnt "
            "from the others. What samples is too far from what trains: see sampling/kl, lower the noise, quantize "
            "alike on both sides, or use rollout_correction_mode='token_truncate'",
            step, mode, share, "sequences" if mode.startswith("sequence") else "tokens",
        )  # fmt: skip


class MismatchSums:
    """Sums over tokens and sequences of several batches, then of all processes, and the measures they give."""

    def __init__(self):
        self._batches: list[torch.Tensor] = []  # of each the sums, and three maxima

    def add(
        self, log_ratio: torch.Tensor, mask: torch.Tensor, mode: str, cap: float, kept: torch.Tensor | None = None
    ) -> None:
        """Count one batch, with its weights under ``mode`` and ``cap``, zero for sequences that are not ``kept``."""
        kept = torch.ones_like(mask[:, 0]) if kept is None else kept
        mask, exact = mask.bool(), widest_float(log_ratio.device)
        has_tokens = mask.any(dim=1)
        by_sequence = importance_ratios(log_ratio, "sequence")[has_tokens, 0].to(exact)
        ratio = importance_ratios(log_ratio, mode)
        chosen = (has_tokens, 0) if mode.startswith("sequence") else mask
        judged, rejected = ratio[chosen], ~kept.bool()
        weights = limit_ratios(judged, mode, cap).masked_fill(rejected.unsqueeze(1).expand_as(ratio)[chosen], 0.0)
        clipped, weights = judged > cap, weights.to(exact)
        log_ratio = log_ratio[mask].to(exact)
        ratio = log_ratio.clamp(-_LARGEST, _LARGEST).exp()
        sums = [
            torch.ones_like(ratio), ratio, ratio.square(), ratio - 1 - log_ratio, log_ratio.abs(),
            torch.ones_like(by_sequence), by_sequence, by_sequence.square(), clipped.to(exact),
            torch.ones_like(weights), weights, weights.square(), rejected[has_tokens].to(exact),
        ]  # fmt: skip
        nothing = ratio.new_full((1,), -torch.inf)
        maxima = [torch.cat([nothing, each]).max() for each in (-ratio, ratio, log_ratio.abs())]
        self._batches.append(torch.stack([*(each.sum() for each in sums), *maxima]))

    def measures(self, gather: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, float]:
        """Return metrics under the names that they are logged by; empty when no process had a token. ``gather``
        concatenates a tensor's first axis over processes, which have the same number of batches."""
        rows = gather(torch.stack(self._batches))
        smallest, largest, difference = rows[:, -3:].amax(dim=0).tolist()
        tokens, total, squares, k3, absolute, sequences, by_sequence, by_sequence_squares, *sums = (
            rows[:, :-3].sum(dim=0).tolist()
        )
        clipped, judged, weights, weight_squares, rejected = sums
        if tokens == 0:
            return {}
        # Weights that are all alike and next to nothing count for little, too: no more than their mean.
        effective = min(weights**2 / (judged * weight_squares), weights / judged) if weight_squares else 0.0
        return {
            "sampling/importance_sampling_ratio/min": -smallest,
            "sampling/importance_sampling_ratio/mean": total / tokens,
            "sampling/importance_sampling_ratio/max": largest,
            "sampling/importance_sampling_ratio/clipped": clipped / judged,
            "sampling/sampling_logp_difference/mean": absolute / tokens,
            "sampling/sampling_logp_difference/max": difference,
            "sampling/kl": k3 / tokens,
            "sampling/effective_sample_size": total**2 / (tokens * squares),
            "sampling/effective_sample_size_sequence": by_sequence**2 / (sequences * by_sequence_squares),
            "sampling/effective_sample_size_weights": effective,
            "sampling/rejected": rejected / sequences,
        }
