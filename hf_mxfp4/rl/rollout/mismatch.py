# SPDX-License-Identifier: Apache-2.0
"""How far the policy that sampled is from the one that trains: importance weights and the measures that go with them.

``log_ratio`` is log p(token) - log q(token), with q the policy that sampled and p the one that trains, ``[B, T]``; what
``mask`` leaves out is not counted.
"""

import torch

from ...backends.devices import widest_float


#: As in TRL's `vllm_importance_sampling_mode`: a weight per token, or one per sequence, the product of its tokens'
#: ratios; those outside of the limits are set to the limit, or to zero.
CORRECTION_MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")

#: Beyond it the exponential says nothing but "too large".
_LARGEST = 20.0

#: A token's log-probabilities differ by more, in nats, than rounding makes them.
FAR = 0.1


def log_ratios(trained: torch.Tensor, sampled: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Log-probabilities ``[B, T]`` under both policies -> ``log_ratio``, zero where masked or where ``sampled`` is NaN
    (a token that the sampler could not score)."""
    return torch.nan_to_num((trained - sampled) * mask, nan=0.0)


def importance_ratios(log_ratio: torch.Tensor, mode: str) -> torch.Tensor:
    """p / q: ``[B, T]``, or ``[B, 1]`` under the sequence modes."""
    if mode.startswith("sequence"):
        log_ratio = log_ratio.sum(dim=1, keepdim=True)
    return log_ratio.clamp(-_LARGEST, _LARGEST).exp()


def limit_ratios(ratio: torch.Tensor, mode: str, cap: float | None, minimum: float | None) -> torch.Tensor:
    """The weights of one of [`CORRECTION_MODES`]; `None` is no limit."""
    if cap is None and minimum is None:
        return ratio
    if mode.endswith("truncate"):
        return ratio.clamp(min=minimum, max=cap)
    return ratio.masked_fill(outside(ratio, cap, minimum), 0.0)


def outside(ratio: torch.Tensor, cap: float | None, minimum: float | None) -> torch.Tensor:
    """Mark where a ratio exceeds a limit."""
    found = torch.zeros_like(ratio, dtype=torch.bool)
    if cap is not None:
        found |= ratio > cap
    if minimum is not None:
        found |= ratio < minimum
    return found


class MismatchSums:
    """Sums over tokens and sequences, of several batches and then of all processes, and the measures they give."""

    def __init__(self):
        self._sums: torch.Tensor | None = None
        self._extremes: torch.Tensor | None = None

    def add(self, log_ratio: torch.Tensor, mask: torch.Tensor, mode: str, cap: float | None, minimum: float | None):
        """One batch; the limits are those that clipped ratios are counted by."""
        mask, exact = mask.bool(), widest_float(log_ratio.device)
        has_tokens = mask.any(dim=1)
        by_sequence = importance_ratios(log_ratio, "sequence")[has_tokens, 0].to(exact)
        ratio = importance_ratios(log_ratio, mode)
        judged = ratio[has_tokens, 0] if mode.startswith("sequence") else ratio[mask]
        clipped, weights = outside(judged, cap, minimum), limit_ratios(judged, mode, cap, minimum).to(exact)
        log_ratio = log_ratio[mask].to(exact)
        ratio = log_ratio.clamp(-_LARGEST, _LARGEST).exp()
        parts = [
            torch.ones_like(ratio), ratio, ratio.square(), -log_ratio, ratio - 1 - log_ratio, log_ratio.abs(),
            torch.ones_like(by_sequence), by_sequence, by_sequence.square(), clipped.to(exact),
            torch.ones_like(clipped, dtype=exact), weights, weights.square(), (log_ratio.abs() > FAR).to(exact),
        ]  # fmt: skip
        sums = torch.stack([part.sum() for part in parts])
        largest = [torch.full((), -torch.inf, dtype=exact, device=ratio.device)] * 3
        if ratio.numel():
            largest = [(-ratio).max(), ratio.max(), log_ratio.abs().max()]
        extremes = torch.stack(largest)
        self._sums = sums if self._sums is None else self._sums + sums
        self._extremes = extremes if self._extremes is None else torch.maximum(self._extremes, extremes)

    def measures(self, gather) -> dict[str, float]:
        """Metrics under the names that they are logged by; empty when no process had a token.

        Args:
            gather: concatenates a tensor's first axis over processes, as `Accelerator.gather` does.
        """
        rows = gather(torch.cat([self._sums, self._extremes]).unsqueeze(0))
        sums = rows[:, : len(self._sums)].sum(dim=0).tolist()
        smallest, largest, difference = rows[:, len(self._sums) :].amax(dim=0).tolist()
        tokens, total, squares, k1, k3, absolute, sequences, by_sequence, by_sequence_squares, *sums = sums
        clipped, judged, weights, weight_squares, far = sums
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
            "sampling/kl_k1": k1 / tokens,
            "sampling/effective_sample_size": total**2 / (tokens * squares),
            "sampling/effective_sample_size_sequence": by_sequence**2 / (sequences * by_sequence_squares),
            "sampling/effective_sample_size_weights": effective,
            "sampling/far_share": far / tokens,
        }
