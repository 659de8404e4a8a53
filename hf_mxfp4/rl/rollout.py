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
from ..ops import widest_float
from ..utils import replaced_method


#: As in TRL's `vllm_importance_sampling_mode`: a weight per token, or one per sequence, the product of its tokens'
#: ratios. Weights above the limit are set to the limit (truncate) or to zero (mask).
CORRECTION_MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
#: Other values of `rollout_correction`: a boolean, from Python, YAML or the command line.
_BOOLEANS = {True: "token_truncate", False: "none", "true": "token_truncate", "false": "none"}

_SAMPLED = "sampling_per_token_logps"
#: What TRL records under vLLM itself.
_RECORDED_BY_TRL = ("sampling/importance_sampling_ratio/m", "sampling/sampling_logp_difference/")
#: Logarithms of ratios are clamped to this, as TRL clamps them.
_LARGEST = 20.0
#: Warn when the effective sample size of the weights is below this share of the sequences (or tokens).
_FEW = 0.3
#: Positions in a completion, the first and the last of each range, that the divergence is measured at apart.
_POSITIONS = [(1, 4), *((2**power + 1, 2 ** (power + 1)) for power in range(2, 20))]


# ---- generation ---------------------------------------------------------------------------------------------------


class SampledLogProbs(LogitsProcessor):
    """Keeps the log-probability of each token that `generate` draws; last in its chain of processors.

    The token that was drawn from the scores of one call is the last one in the input of the next call.
    """

    def __init__(self):
        self._steps: list[torch.Tensor] = []
        self._scores: torch.Tensor | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self._scores is not None:
            self._steps.append(_log_prob(self._scores, input_ids[:, -1]))
        self._scores = scores
        return scores

    def rows(self, completions: list[list[int]]) -> list[list[float]]:
        """Return one list per completion, as long as it is. Raises `RuntimeError` when fewer positions were sampled."""
        longest = max((len(row) for row in completions), default=0)
        n_sampled = 0
        if self._scores is not None:
            n_sampled = len(self._steps) + 1
        if n_sampled == 0 or len(self._scores) != len(completions) or longest > n_sampled:
            raise RuntimeError(
                f"{n_sampled} sampled positions are recorded for {len(completions)} completions of up to {longest} "
                "tokens"
            )
        # The tokens of the last position are in no input. Completions that ended earlier do not need it.
        last = torch.tensor([row[-1] if row else 0 for row in completions], device=self._scores.device)
        steps = torch.stack([*self._steps, _log_prob(self._scores, last)], dim=1).tolist()
        return [row[: len(ids)] for row, ids in zip(steps, completions, strict=True)]


def _log_prob(scores: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the log-probabilities, float32 ``[B]``, of tokens ``[B]`` under scores ``[B, V]``."""
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


def read_correction(value: Any) -> str:
    """Return one of `CORRECTION_MODES` or ``"none"``; true and false are read too. Raises `ValueError` for others."""
    known = (*CORRECTION_MODES, "none")
    word = value
    if isinstance(value, str):
        word = value.lower()
    mode = _BOOLEANS.get(word, value)
    if mode not in known:
        raise ValueError(f"rollout_correction={value!r} is not known; choose one of {', '.join(known)}")
    return mode


def check_correction(args: Any) -> None:
    """Raise `ValueError` for values of `rollout_correction*` that mean nothing."""
    cap = args.rollout_correction_cap
    if not cap > 0 or not math.isfinite(cap):
        raise ValueError(f"rollout_correction_cap={cap} must be a positive number")
    if args.loss_type == "vespo" and args.rollout_correction.startswith("sequence"):
        raise ValueError(
            "loss_type='vespo' multiplies the ratios of a sequence's tokens itself: use rollout_correction="
            "'token_truncate' or 'token_mask'"
        )


def is_corrected(args: Any) -> bool:
    """Return whether importance weights correct rollouts."""
    return args.rollout_correction != "none"


def weighting_mode(args: Any) -> str:
    """Return the mode of the weights; without correction the default mode, in which the mismatch is measured."""
    if not is_corrected(args):
        return "token_truncate"
    return args.rollout_correction


def share_with_trl(args: Any) -> None:
    """Give TRL's options for vLLM the values of ours.

    Raises `ValueError` under `use_vllm` where one of TRL's is given, as far as its value can tell, and differs.
    """
    if args.vllm_importance_sampling_cap is not None:  # the old name of the upper limit, which TRL still reads
        args.vllm_importance_sampling_clip_max = args.vllm_importance_sampling_cap
    shared = {
        "vllm_importance_sampling_correction": ("rollout_correction", is_corrected(args)),
        "vllm_importance_sampling_mode": ("rollout_correction", weighting_mode(args)),
        "vllm_importance_sampling_clip_max": ("rollout_correction_cap", args.rollout_correction_cap),
    }
    for of_trl, (ours, value) in shared.items():
        given = getattr(args, of_trl)
        default = args.__dataclass_fields__[of_trl].default
        if args.use_vllm and given not in (value, default):
            raise ValueError(f"{of_trl}={given!r} contradicts {ours}={getattr(args, ours)!r}; set {ours} alone")
        setattr(args, of_trl, value)


def importance_ratios(log_ratio: torch.Tensor, mode: str) -> torch.Tensor:
    """Return p / q: ``[B, T]``, or ``[B, 1]`` under the sequence modes."""
    if mode.startswith("sequence"):
        log_ratio = log_ratio.sum(dim=1, keepdim=True)
    return log_ratio.clamp(-_LARGEST, _LARGEST).exp()


def limit_ratios(ratio: torch.Tensor, mode: str, cap: float) -> torch.Tensor:
    """Return the weights under one of `CORRECTION_MODES`."""
    if mode.endswith("truncate"):
        return ratio.clamp(max=cap)
    return ratio.masked_fill(ratio > cap, 0.0)


class RolloutCorrection:
    """Importance weights (`rollout_correction*`) and the `sampling/*` metrics.

    Both need the log-probabilities of the sampled tokens as training on them begins. Where TRL does not compute those
    (rollouts and updates are aligned), the training step itself does. The weights multiply the advantages.
    """

    def __init__(self, args: Any, accelerator: Accelerator, record: Callable[[str, float], None]):
        self._args = args
        self._accelerator = accelerator
        self._record = record
        self._sums = MismatchSums()
        #: A batch without advantages, the advantages, and the step.
        self._waiting: tuple[dict[str, Any], torch.Tensor, int] | None = None
        self._warned = False

    def forget_step(self) -> None:
        """Forget the batches of an optimizer step, which were measured or whose step was cut short."""
        self._sums = MismatchSums()

    def check(self, batch: dict[str, Any], step: int) -> None:
        """Warn, before the first step, of a rollout for training that came without log-probabilities."""
        if _SAMPLED not in batch and is_corrected(self._args) and step == 0:
            get_logger().warning("rollout_func returns no log-probabilities: its rollouts are not corrected")

    @contextlib.contextmanager
    def weighting(self, inputs: dict[str, Any], step: int) -> Iterator[dict[str, Any]]:
        """Yield the batch to compute the loss of, with weighted advantages. Where TRL has not computed
        log-probabilities yet, the advantages are missing until [`take_log_probs`] is called."""
        if _SAMPLED not in inputs:
            yield inputs
            return
        inputs = dict(inputs)  # the batch itself may be trained on again
        old_log_probs = inputs.get("old_per_token_logps")
        if old_log_probs is not None:
            self._weigh(inputs, old_log_probs, step)
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
            inputs, advantages, step = self._waiting
            self._waiting = None
            inputs["advantages"] = advantages
            self._weigh(inputs, trained.detach(), step)

    def _weigh(self, inputs: dict[str, Any], trained: torch.Tensor, step: int) -> None:
        """Weight a batch in place by the ratio of ``trained`` to the probabilities it was sampled with; measure it."""
        args = self._args
        mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        # NaN: a token that the sampler could not score.
        log_ratio = torch.nan_to_num((trained - inputs[_SAMPLED]) * mask, nan=0.0)
        self._measure(log_ratio, mask, step)
        if args.use_vllm or not is_corrected(args):
            return
        mode = args.rollout_correction
        weights = limit_ratios(importance_ratios(log_ratio, mode), mode, args.rollout_correction_cap)
        if args.loss_type == "vespo":
            inputs["importance_sampling_ratio"] = weights.masked_fill(~mask.bool(), 1.0)
        else:
            inputs["advantages"] = inputs["advantages"].unsqueeze(1) * weights

    def _measure(self, log_ratio: torch.Tensor, mask: torch.Tensor, step: int) -> None:
        """Add to what is logged once per optimizer step, over its batches and all processes."""
        args = self._args
        mode = weighting_mode(args)
        self._sums.add(log_ratio, mask, mode, args.rollout_correction_cap)
        if not self._accelerator.sync_gradients:
            return
        measures = self._sums.measures(self._accelerator.gather)
        self.forget_step()
        for name, value in measures.items():
            if not (args.use_vllm and is_corrected(args) and name.startswith(_RECORDED_BY_TRL)):
                self._record(name, value)
        share = measures.get("sampling/effective_sample_size_weights", 1.0)
        if self._warned or share >= _FEW or not is_corrected(args):
            return
        self._warned = True
        counted = "sequences" if mode.startswith("sequence") else "tokens"
        get_logger().warning(
            "step %d: the importance weights (%s) have an effective sample size of %.2g of the %s: little is learnt "
            "from the others. What samples is too far from what trains: see sampling/kl, lower the noise, quantize "
            "alike on both sides, or use rollout_correction='token_truncate'",
            step, mode, share, counted,
        )  # fmt: skip


class MismatchSums:
    """Sums over tokens and sequences of several batches, then of all processes, and the measures they give."""

    def __init__(self):
        #: The sums and three maxima of each batch, in the order of their names.
        self._batches: list[torch.Tensor] = []
        self._names: list[str] = []

    def add(self, log_ratio: torch.Tensor, mask: torch.Tensor, mode: str, cap: float) -> None:
        """Count one batch, with its weights under ``mode`` and ``cap``."""
        mask = mask.bool()
        exact = widest_float(log_ratio.device)
        has_tokens = mask.any(dim=1)
        sequence_ratio = importance_ratios(log_ratio, "sequence")[has_tokens, 0].to(exact)
        # The ratios that are weights before they are limited: of sequences, or of tokens.
        weighted = importance_ratios(log_ratio, mode)
        if mode.startswith("sequence"):
            weighted = weighted[has_tokens, 0]
        else:
            weighted = weighted[mask]
        weights = limit_ratios(weighted, mode, cap).to(exact)
        log_ratio = log_ratio[mask].to(exact)
        ratio = log_ratio.clamp(-_LARGEST, _LARGEST).exp()
        divergence = ratio - 1 - log_ratio  # the k3 estimator
        sums = {
            "tokens": torch.ones_like(ratio),
            "ratios": ratio,
            "squared ratios": ratio.square(),
            "kl": divergence,
            "differences": log_ratio.abs(),
            "sequences": torch.ones_like(sequence_ratio),
            "sequence ratios": sequence_ratio,
            "squared sequence ratios": sequence_ratio.square(),
            "clipped": (weighted > cap).to(exact),
            "weighted": torch.ones_like(weights),
            "weights": weights,
            "squared weights": weights.square(),
        }
        at_positions = torch.zeros(mask.shape, dtype=exact, device=mask.device).masked_scatter(mask, divergence)
        for first, last in _POSITIONS:
            sums[f"tokens {first}-{last}"] = mask[:, first - 1 : last].to(exact)
            sums[f"kl {first}-{last}"] = at_positions[:, first - 1 : last]
        maxima = {"negative smallest ratio": -ratio, "largest ratio": ratio, "largest difference": log_ratio.abs()}
        values = [value.sum() for value in sums.values()]
        # A batch may have no token, of which there would be no maximum.
        lowest = ratio.new_full((1,), -torch.inf)
        values += [torch.cat([lowest, value]).max() for value in maxima.values()]
        self._names = [*sums, *maxima]
        self._batches.append(torch.stack(values))

    def measures(self, gather: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, float]:
        """Return metrics under the names that they are logged by; empty when no process had a token. ``gather``
        concatenates a tensor's first axis over processes, which have the same number of batches."""
        rows = gather(torch.stack(self._batches))
        values = torch.cat([rows[:, :-3].sum(dim=0), rows[:, -3:].amax(dim=0)]).tolist()
        total = dict(zip(self._names, values, strict=True))
        if total["tokens"] == 0:
            return {}
        effective = 0.0
        if total["squared weights"]:
            # Weights that are all alike and next to nothing count for little, too: no more than their mean.
            share = total["weights"] ** 2 / (total["weighted"] * total["squared weights"])
            effective = min(share, total["weights"] / total["weighted"])
        by_position = {}
        for first, last in _POSITIONS:
            n_tokens = total[f"tokens {first}-{last}"]
            if n_tokens:
                by_position[f"sampling/kl/{first}-{last}"] = total[f"kl {first}-{last}"] / n_tokens
        if len(by_position) == 1:
            by_position = {}
        by_sequence = total["sequence ratios"] ** 2 / (total["sequences"] * total["squared sequence ratios"])
        return {
            "sampling/importance_sampling_ratio/min": -total["negative smallest ratio"],
            "sampling/importance_sampling_ratio/mean": total["ratios"] / total["tokens"],
            "sampling/importance_sampling_ratio/max": total["largest ratio"],
            "sampling/importance_sampling_ratio/clipped": total["clipped"] / total["weighted"],
            "sampling/sampling_logp_difference/mean": total["differences"] / total["tokens"],
            "sampling/sampling_logp_difference/max": total["largest difference"],
            "sampling/kl": total["kl"] / total["tokens"],
            "sampling/effective_sample_size": total["ratios"] ** 2 / (total["tokens"] * total["squared ratios"]),
            "sampling/effective_sample_size_sequence": by_sequence,
            "sampling/effective_sample_size_weights": effective,
            **by_position,
        }
