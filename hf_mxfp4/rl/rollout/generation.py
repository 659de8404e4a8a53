# SPDX-License-Identifier: Apache-2.0
"""How transformers generates rollouts, and the log-probability that each token was drawn with.

accelerate puts autocast on the forward pass of what TRL trains. For adapters that is PEFT's, which `generate` goes
past, so that the policy would sample in the dtype of its parameters; and TRL samples in training mode, in which dropout
would draw another policy for each token. [`sampling`] sets both right.

Log-probabilities come from the very scores that transformers samples from, so noise, the key-value cache, packed copies
of weights, temperature, top-k and top-p are all in them, and no second forward pass is needed.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from transformers import GenerationMixin, LogitsProcessor

from ...utils import evaluation_mode, replaced_method


@contextlib.contextmanager
def sampling(model: nn.Module, accelerator: Accelerator) -> Iterator[None]:
    """Generate in the dtype of training and without dropout within this context, which restores each module's mode."""
    with evaluation_mode(model), accelerator.autocast():
        yield


class SampledLogProbs(LogitsProcessor):
    """Last in `generate`'s chain of processors: keeps the log-probability of each token that was drawn.

    It sees the scores of a position before the token is drawn, so the token is read off the next call's input; memory
    is that of one position's scores, ``[B, vocabulary]``.
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
