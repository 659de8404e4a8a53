# SPDX-License-Identifier: Apache-2.0
"""The sampling temperature that quantization amounts to: predicted from logit noise, and measured.

**The prediction** (arXiv 2605.20402): noise of variance ``sigma**2`` on every logit widens the gap ``l_i - l_j`` of two
tokens by ``2 sigma**2``, and the policy behaves as at temperature ``sqrt(1 + 2 sigma**2 / Var(gap))``.

**What noise does.** It widens gaps, and wider gaps make a *sharper* softmax. For many Gaussian logits of variance ``v``
at one position, softmax(l + noise) has the entropy of temperature ``1 / sqrt(1 + sigma**2 / v)``, the inverse of the
prediction, while its expected clean logit is that of temperature 1. Entropy does rise where the policy is sure of a
token: the chances of the others are ``exp(-gap)``, whose mean grows with noise. So noise pulls the entropies of sure
and unsure positions towards each other, and its sign is a matter of the policy. The average over noise of a sure policy
flattens as the paper argues, but one set of quantized weights is one draw of the noise, not its average.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch


#: The search gives up beyond these temperatures and returns 0 or infinity.
_COLDEST, _HOTTEST = 2.0**-10, 2.0**10


@dataclass(frozen=True)
class EffectiveTemperature:
    """Temperatures that stand for a change of logits; 1 is no change, above 1 is flatter. Entropies and KL in nats.

    Attributes:
        predicted: ``sqrt(1 + 2 noise_variance / gap_variance)``.
        measured: the T of least mean KL(p_quantized || softmax(logits_ref / T)). 0 or infinity when T leaves 2**±10.
        entropy_matched: the T at which softmax(logits_ref / T) has the mean entropy of the quantized policy; likewise.
        noise_variance: variance of the logits' change over the vocabulary, mean over positions.
        gap_variance: mean squared difference of two different logits of the same position drawn at random, which is
            twice the variance of the logits over the vocabulary; mean over positions.
        entropy_ref, entropy_quantized: mean over positions.
        kl, kl_measured: mean KL(p_quantized || p) for the reference policy, and for it at ``measured``: how much of
            the change a temperature explains.
    """

    predicted: float
    measured: float
    entropy_matched: float
    noise_variance: float
    gap_variance: float
    entropy_ref: float
    entropy_quantized: float
    kl: float
    kl_measured: float


def effective_temperature(
    logits_ref: torch.Tensor, logits_q: torch.Tensor, *, tolerance: float = 1e-9
) -> EffectiveTemperature:
    """The temperature that turns the reference policy into the quantized one, as predicted and as measured.

    Constants added to all logits of a position do not matter. Computed in float64.

    Args:
        logits_ref, logits_q: ``[..., vocabulary]`` at the same positions.
        tolerance: relative, of the two temperatures searched for.

    Raises `ValueError` for different shapes, no position, fewer than two tokens, and NaN or infinity.
    """
    if logits_ref.shape != logits_q.shape:
        raise ValueError(f"logits of different shapes: {tuple(logits_ref.shape)} and {tuple(logits_q.shape)}")
    if logits_ref.dim() == 0 or logits_ref.numel() == 0 or logits_ref.shape[-1] < 2:
        raise ValueError(f"logits {tuple(logits_ref.shape)} must be [..., vocabulary] with two tokens or more")
    if not (torch.isfinite(logits_ref).all() and torch.isfinite(logits_q).all()):
        raise ValueError("logits hold NaN or infinity; leave out masked tokens")
    ref, quantized = (x.detach().double().flatten(0, -2) for x in (logits_ref, logits_q))
    noise_variance = float((quantized - ref).var(dim=-1).mean())
    gap_variance = 2.0 * float(ref.var(dim=-1).mean())

    log_q = quantized.log_softmax(-1)
    q = log_q.exp()
    entropy_quantized = -float((q * log_q).sum(-1).mean())

    def log_p(temperature: float) -> torch.Tensor:
        return (ref / temperature).log_softmax(-1)

    def entropy(temperature: float) -> float:
        log_probs = log_p(temperature)
        return -float((log_probs.exp() * log_probs).sum(-1).mean())

    # KL(q || p_T) is convex in 1/T, with its minimum where p_T has the expected reference logit that q has.
    def mean_logit(probs: torch.Tensor) -> float:
        return float((probs * ref).sum(-1).mean())

    measured = _solve(lambda t: -mean_logit(log_p(t).exp()), -mean_logit(q), tolerance)
    kl = float((q * (log_q - log_p(1.0))).sum(-1).mean())
    usable = 0 < measured < math.inf
    return EffectiveTemperature(
        predicted=_predict(noise_variance, gap_variance),
        measured=measured,
        entropy_matched=_solve(entropy, entropy_quantized, tolerance),
        noise_variance=noise_variance,
        gap_variance=gap_variance,
        entropy_ref=entropy(1.0),
        entropy_quantized=entropy_quantized,
        kl=kl,
        kl_measured=float((q * (log_q - log_p(measured))).sum(-1).mean()) if usable else math.nan,
    )


def _predict(noise_variance: float, gap_variance: float) -> float:
    if noise_variance == 0:
        return 1.0
    return math.sqrt(1.0 + 2.0 * noise_variance / gap_variance) if gap_variance else math.inf


def _solve(function: Callable[[float], float], target: float, tolerance: float) -> float:
    """The temperature where a function that rises with it has the target value: bisection of its logarithm."""
    at_one = function(1.0)
    if at_one == target:
        return 1.0
    if at_one < target:
        low, high = 1.0, _HOTTEST
        if function(high) < target:
            return math.inf
    else:
        low, high = _COLDEST, 1.0
        if function(low) > target:
            return 0.0
    while high > low * (1.0 + tolerance):
        middle = math.sqrt(low * high)
        if not low < middle < high:
            break
        low, high = (middle, high) if function(middle) < target else (low, middle)
    return math.sqrt(low * high)
