# SPDX-License-Identifier: Apache-2.0
"""How a causal language model predicts texts, and how far its predictions are from those of another one, in memory that
grows neither with the number of texts nor with their logits.

Logits exist for a few rows at a time. Those of the reference are computed again from its last hidden states, which are
kept, or, where a model does not allow that ([`Replay`]), by its whole forward pass.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

from ...layers import QUANTIZED, cached_weights, full_precision
from ..policy.predictions import evaluation_mode
from .replay import Logits, Replay


#: Elements of logits that exist at a time, a few times in float32 (32 MB each), and the rows that there are at least.
_ELEMENTS, _LEAST_ROWS = 2**23, 16


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


#: Told the index of a text and its score.
OnText = Callable[[int, Score], None]


@dataclass
class Reference:
    """What models are compared with.

    Attributes:
        model: computes the logits of the reference, in full precision.
        replay: how they are computed from hidden states; `None` where they cannot be.
        scores: by index of the text, how the reference predicts it; its divergence from itself is 0.
        states: by index, its last hidden states ``[1, tokens, width]`` on the CPU, or the file that has them.
    """

    model: nn.Module
    replay: Replay | None = None
    scores: dict[int, Score] = field(default_factory=dict)
    states: dict[int, torch.Tensor | Path] = field(default_factory=dict)

    def logits(self, index: int, ids: torch.Tensor) -> Logits:
        """The logits of text ``index``, whose tokens are ``ids``."""
        ids = ids.to(_device(self.model))
        if self.replay is None:
            with in_full_precision(self.model):
                return Logits(self.model, ids, None)
        kept = self.states[index]
        return Logits(self.model, ids, self.replay, load_file(kept)["states"] if isinstance(kept, Path) else kept)


def reference_of(
    model: nn.Module,
    batches: Sequence[torch.Tensor],
    folder: Path | None = None,
    on_text: OnText | None = None,
    only: Sequence[int] | None = None,
) -> Reference:
    """Run ``model`` in full precision on texts, and keep what others are compared with.

    Args:
        model: a plain one, or one with trainable quantized layers, which compute on their master weights here.
        batches: token ids ``[1, tokens]`` of each text, two or more.
        folder: where hidden states are written, a file for each text; kept in memory without one.
        on_text: told of each text as it is done.
        only: indices of the texts to run; all by default.

    Raises `ValueError` for texts that are not such tensors, for NaN among the logits, and for a model with packed
    layers, whose full precision is gone.
    """
    indices, reference = _indices(batches, only), Reference(model)
    with torch.no_grad(), evaluation_mode(model), in_full_precision(model):
        if indices:
            reference.replay = Replay.of(model, batches[indices[0]].to(_device(model)))
        for index in indices:
            ids = batches[index].to(_device(model))
            logits = Logits(model, ids, reference.replay)
            reference.scores[index] = found = _scored(index, ids, logits, logits)
            if reference.replay is not None:
                reference.states[index] = _kept(logits.states, folder, index)
            if on_text is not None:
                on_text(index, found)
    return reference


def score(
    model: nn.Module,
    reference: Reference | None,
    batches: Sequence[torch.Tensor],
    on_text: OnText | None = None,
    only: Sequence[int] | None = None,
) -> list[Score]:
    """How ``model``, as it is now, predicts texts, and how far it is from the reference. Each weight is quantized once.

    Args:
        reference: made of the same ``batches``; without one there are likelihoods alone.
        on_text: told of each text as it is done.
        only: indices of the texts to run; all by default.

    Raises `ValueError` as [`reference_of`] does, and for a text that the reference has not seen.
    """
    indices, found = _indices(batches, only), []
    seen = range(len(batches)) if reference is None else reference.scores
    if unseen := [index for index in indices if index not in seen]:
        raise ValueError(f"the reference has not seen text {unseen[0]}; make it of the same texts")
    with torch.no_grad(), evaluation_mode(model), cached_weights(model, "dense"):
        replay = Replay.of(model, batches[indices[0]].to(_device(model))) if indices else None
        for index in indices:
            ids = batches[index].to(_device(model))
            logits = Logits(model, ids, replay)
            found.append(_scored(index, ids, logits, None if reference is None else reference.logits(index, ids)))
            if on_text is not None:
                on_text(index, found[-1])
    return found


@contextlib.contextmanager
def in_full_precision(model: nn.Module) -> Iterator[None]:
    """Within this context trainable quantized layers compute on their master weights; a plain model is as it was.

    Raises `ValueError` for a model with packed layers.
    """
    quantized = any(isinstance(module, QUANTIZED) for module in model.modules())
    with full_precision(model) if quantized else contextlib.nullcontext():
        yield


def _scored(index: int, ids: torch.Tensor, logits: Logits, other: Logits | None) -> Score:
    """The score of a text against the logits of its reference, which may be its own."""
    targets = ids[0, 1:]
    nll = kl = 0.0
    same = 0
    portions = -(-len(targets) // max(_LEAST_ROWS, _ELEMENTS // logits.vocabulary))
    for part in torch.arange(len(targets)).tensor_split(portions):
        begin, end = int(part[0]), int(part[-1]) + 1
        rows = logits.rows(begin, end)
        own = F.log_softmax(rows.float(), -1)
        nll -= own.gather(1, targets[begin:end, None].to(own.device)).double().sum().item()
        if other is logits:
            same += end - begin
        elif other is not None:
            rows_of_other = other.rows(begin, end).to(rows.device)
            same += int((rows.argmax(-1) == rows_of_other.argmax(-1)).sum())
            kl += _divergence(F.log_softmax(rows_of_other.float(), -1), own)
    if math.isnan(nll) or math.isnan(kl):
        raise ValueError(f"the logits of text {index} have NaN among them; the model cannot be measured on it")
    return Score(len(targets), nll) if other is None else Score(len(targets), nll, kl, same)


def _divergence(reference: torch.Tensor, own: torch.Tensor) -> float:
    """KL(reference || own) of log-probabilities ``[rows, vocabulary]``, summed over rows, in nats."""
    probabilities = reference.exp()
    terms = probabilities * (reference - own)
    # A token that the reference excludes adds nothing, also where its log-probability is -inf.
    return terms.masked_fill_(probabilities == 0, 0).sum(-1).double().sum().item()


def _kept(states: torch.Tensor, folder: Path | None, index: int) -> torch.Tensor | Path:
    if folder is None:
        return states.to("cpu")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{index}.safetensors"
    save_file({"states": states.to("cpu").contiguous()}, path)
    return path


def _indices(batches: Sequence[torch.Tensor], only: Sequence[int] | None) -> list[int]:
    indices = list(range(len(batches)) if only is None else only)
    for index in indices:
        ids = batches[index]
        if ids.dim() != 2 or ids.shape[0] != 1 or ids.shape[1] < 2:
            raise ValueError(
                f"text {index} is {list(ids.shape)}, not [1, tokens] with two tokens or more: the first predicts"
            )
    return indices


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
