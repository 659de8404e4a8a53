# SPDX-License-Identifier: Apache-2.0
"""What each error component does to a policy's predictions: the rollout pathway of arXiv 2605.20402.

The paper says that each component dominates a failure of its own: deadzone truncation that of rollouts, scale bias that
of gradients ([`hf_mxfp4.analysis.policy.gradient_gain`]), grid noise that of the entropy
([`hf_mxfp4.analysis.policy.temperature`]). Here every component meets every measure, so that the saying can be checked
on a model.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn

from ...config import MXFP4RLConfig
from ...layers import cached_weights
from ...numerics import COMPONENTS, QuantScheme
from .injection import inject_component
from .predictions import IGNORED, evaluation_mode, next_tokens, policy_logits


@dataclass(frozen=True)
class ComponentDamage:
    """How a policy changes under one error component, means over the tokens that count; all in nats.

    Attributes:
        n_layers, n_tokens: layers with the component, and tokens measured on.
        weight_energy, activation_energy: energy of the component over that of the operand; `None` for an operand left
            alone. Components of very different energy are best compared by damage per energy.
        kl: KL(p_reference || p_component) per token.
        nll, nll_change: negative log-likelihood of the tokens, and its change.
        top1_agreement: share of tokens where both policies have the same most likely token.
        entropy, entropy_change: of the policy, and its change.
        score, score_change: what the caller's score gave, and its change; `None` without one.
    """

    n_layers: int
    n_tokens: int
    weight_energy: float | None
    activation_energy: float | None
    kl: float
    nll: float
    nll_change: float
    top1_agreement: float
    entropy: float
    entropy_change: float
    score: float | None
    score_change: float | None

    @property
    def perplexity_ratio(self) -> float:
        """Perplexity under the component over that of the reference."""
        return math.exp(self.nll_change)


def component_damage(
    model: nn.Module,
    input_ids: torch.Tensor,
    scheme: QuantScheme | MXFP4RLConfig,
    *,
    labels: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    operands: str = "weights",
    components: Iterable[str] = (*COMPONENTS, "all"),
    modules_to_not_convert: Iterable[str] = (),
    score: Callable[[nn.Module], float] | None = None,
) -> dict[str, ComponentDamage]:
    """Damage that each component does alone, against the same model in full precision.

    Args:
        model: a causal language model, plain or quantized (whose own quantization is off meanwhile).
        input_ids, labels, attention_mask: the sequences, as of [`next_tokens`]. They go through the model as one batch,
            and float64 log-probabilities ``[tokens, vocabulary]`` are kept.
        components: what to measure; see [`inject_component`] for it and the other arguments.
        score: called with the model under each component and once in full precision, in evaluation mode: for example
            the greedy accuracy on a task.

    Raises as [`inject_component`] and [`next_tokens`] do.
    """
    targets = next_tokens(input_ids, labels, attention_mask)
    targets = targets[targets != IGNORED]

    def measure(component: str) -> tuple[int, list[float | None], torch.Tensor, float | None]:
        with (
            evaluation_mode(model),
            cached_weights(),  # substitutes of weights are made once
            inject_component(
                model, component, scheme, operands=operands, modules_to_not_convert=modules_to_not_convert
            ) as injection,
        ):
            logits = policy_logits(model, input_ids, labels, attention_mask)
            # Before the score, whose own passes would count too.
            parts = (injection.weights, injection.activations)
            energies = [None if part is None else part.ratio for part in parts]
            new_score = None if score is None else float(score(model))
            return injection.n_layers, energies, logits.double().log_softmax(-1), new_score

    modules_to_not_convert = tuple(modules_to_not_convert)
    _, _, reference, reference_score = measure("none")
    reference_nll, reference_entropy = _nll(reference, targets), _entropy(reference)
    damage = {}
    for component in components:
        n_layers, (weight_energy, activation_energy), changed, new_score = measure(component)
        nll, entropy = _nll(changed, targets), _entropy(changed)
        damage[component] = ComponentDamage(
            n_layers=n_layers,
            n_tokens=len(targets),
            weight_energy=weight_energy,
            activation_energy=activation_energy,
            kl=float((reference.exp() * (reference - changed)).sum(-1).mean()),
            nll=nll,
            nll_change=nll - reference_nll,
            top1_agreement=float((reference.argmax(-1) == changed.argmax(-1)).double().mean()),
            entropy=entropy,
            entropy_change=entropy - reference_entropy,
            score=new_score,
            score_change=None if score is None else new_score - reference_score,
        )
    return damage


def _nll(log_probs: torch.Tensor, targets: torch.Tensor) -> float:
    return -float(log_probs.gather(-1, targets.to(log_probs.device).unsqueeze(-1)).mean())


def _entropy(log_probs: torch.Tensor) -> float:
    return -float((log_probs.exp() * log_probs).sum(-1).mean())
