# SPDX-License-Identifier: Apache-2.0
"""How a causal language model predicts texts, and how far its predictions are from those of another one."""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn

from ...layers import QUANTIZED, cached_weights, full_precision
from ...utils import evaluation_mode


#: Rows of logits that are turned into float32 log-probabilities at a time.
_ROWS = 256
#: Bytes of a reference's logits that are kept; those of further texts are computed again for each model.
_KEPT_BYTES = 2**30


@dataclass(frozen=True)
class Score:
    """How a model predicts one text.

    Attributes:
        tokens: those predicted: all but the first.
        nll: their negative log-likelihood, summed, in nats.
        kl: Kullback-Leibler divergence of the predictions from those of the reference, KL(reference || model), summed
            over positions, in nats; `None` without a reference.
        same_top: positions at which both have the same likeliest token; `None` without a reference.
    """

    tokens: int
    nll: float
    kl: float | None = None
    same_top: int | None = None


#: Called with the index of a text and its score.
OnText = Callable[[int, Score], None]


@dataclass
class Reference:
    """What models are compared with.

    Attributes:
        model: computes the logits of the reference, in full precision: a plain one, or one with trainable quantized
            layers, which compute on their master weights here.
        scores: by index of the text, how the reference predicts it; its divergence from itself is 0.
    """

    model: nn.Module
    scores: dict[int, Score] = field(default_factory=dict)
    _kept: dict[int, torch.Tensor] = field(default_factory=dict, repr=False)

    def logits(self, index: int, ids: torch.Tensor) -> torch.Tensor:
        """Return the logits ``[tokens, vocabulary]`` of text ``index``, whose tokens are ``ids``."""
        if index in self._kept:
            return self._kept[index]
        with evaluation_mode(self.model), in_full_precision(self.model):
            logits = _logits(self.model, ids)
        kept = sum(others.nbytes for others in self._kept.values())
        if kept + logits.nbytes <= _KEPT_BYTES:
            self._kept[index] = logits
        return logits

    @torch.no_grad()
    def measure(
        self,
        batches: Sequence[torch.Tensor],
        on_text: OnText = lambda index, score: None,
        only: Sequence[int] | None = None,
    ) -> None:
        """Fill [`scores`].

        Args:
            batches: token ids ``[1, tokens]`` of each text, two or more.
            on_text: told of each text as it is done.
            only: indices of the texts to run; all by default.

        Raises `ValueError` for texts that are not such tensors, for NaN among the logits, and for a model with packed
        layers, whose full precision is gone.
        """
        for index in _indices(batches, only):
            logits = self.logits(index, batches[index])
            self.scores[index] = _scored(index, batches[index], logits, logits)
            on_text(index, self.scores[index])


def reference_of(model: nn.Module, batches: Sequence[torch.Tensor]) -> Reference:
    """Run ``model`` in full precision on texts, to compare others with it; see [`Reference.measure`]."""
    reference = Reference(model)
    reference.measure(batches)
    return reference


@torch.no_grad()
def score(
    model: nn.Module,
    reference: Reference | None,
    batches: Sequence[torch.Tensor],
    on_text: OnText = lambda index, score: None,
    only: Sequence[int] | None = None,
) -> list[Score]:
    """Measure how ``model``, as it is now, predicts texts, and how far it is from the reference. Each weight is
    quantized once.

    Args:
        reference: made of the same ``batches``; without one there are likelihoods alone.
        on_text: told of each text as it is done.
        only: indices of the texts to run; all by default.

    Raises `ValueError` as [`Reference.measure`] does.
    """
    scores = []
    with evaluation_mode(model), cached_weights(model, "dense"):
        for index in _indices(batches, only):
            ids = batches[index]
            logits = _logits(model, ids)
            reference_logits = None
            if reference is not None:
                reference_logits = reference.logits(index, ids)
            scores.append(_scored(index, ids, logits, reference_logits))
            on_text(index, scores[-1])
    return scores


@contextlib.contextmanager
def in_full_precision(model: nn.Module) -> Iterator[None]:
    """Let trainable quantized layers compute on their master weights; a plain model is as it was.

    Raises `ValueError` for a model with packed layers.
    """
    if not any(isinstance(module, QUANTIZED) for module in model.modules()):
        yield
        return
    with full_precision(model):
        yield


def _logits(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids.to(next(model.parameters()).device), use_cache=False).logits[0]


def _scored(index: int, ids: torch.Tensor, logits: torch.Tensor, other: torch.Tensor | None) -> Score:
    """Return the score of a text against the logits of its reference, which may be its own."""
    targets = ids[0, 1:].to(logits.device)
    nll = 0.0
    kl = 0.0
    same = 0
    for begin in range(0, len(targets), _ROWS):
        end = min(begin + _ROWS, len(targets))
        rows = logits[begin:end]
        own = F.log_softmax(rows.float(), -1)
        nll -= own.gather(1, targets[begin:end, None]).double().sum().item()
        if other is logits:
            same += end - begin
        elif other is not None:
            rows_of_other = other[begin:end].to(rows.device)
            same += int((rows.argmax(-1) == rows_of_other.argmax(-1)).sum())
            kl += _divergence(F.log_softmax(rows_of_other.float(), -1), own)
    if math.isnan(nll) or math.isnan(kl):
        raise ValueError(f"the logits of text {index} have NaN among them; the model cannot be measured on it")
    if other is None:
        return Score(len(targets), nll)
    return Score(len(targets), nll, kl, same)


def _divergence(reference: torch.Tensor, own: torch.Tensor) -> float:
    """Return KL(reference || own) of log-probabilities ``[rows, vocabulary]``, summed over rows, in nats."""
    probabilities = reference.exp()
    terms = probabilities * (reference - own)
    # A token that the reference excludes adds nothing, also where its log-probability is -inf.
    return terms.masked_fill_(probabilities == 0, 0).sum(-1).double().sum().item()


def _indices(batches: Sequence[torch.Tensor], only: Sequence[int] | None) -> list[int]:
    """Return the indices of the texts to run. Raises `ValueError` for one that nothing is predicted in."""
    if only is None:
        only = range(len(batches))
    indices = list(only)
    for index in indices:
        ids = batches[index]
        if ids.dim() != 2 or ids.shape[0] != 1 or ids.shape[1] < 2:
            raise ValueError(
                f"text {index} is {list(ids.shape)}, not [1, tokens] with two tokens or more: the first predicts"
            )
    return indices
