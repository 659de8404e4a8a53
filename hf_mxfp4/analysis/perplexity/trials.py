# SPDX-License-Identifier: Apache-2.0
"""A model under one scheme, with some of its layers back in full precision: tried often, on one set of weights."""

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from ...layers import TRAINABLE, cached_weights, full_precision
from .evaluate import OnTokens, key_of, states_room
from .log import ScoreLog
from .operands import Operands, average_bits
from .results import FULL_PRECISION
from .schemes import ModelScheme
from .scoring import Reference, Score, reference_of, score
from .swapped import swapped


class Trials:
    """Made by [`trials_of`], and of use within its context alone.

    Attributes:
        scheme: what is on the model.
        names: of the layers that it quantizes.
        left: of those that it leaves in full precision.
        operands: of both; see [`hf_mxfp4.analysis.perplexity.operands.count_operands`].
        on_tokens: told of the predicted tokens of each text, also of those that the log has.
    """

    def __init__(
        self,
        model: nn.Module,
        scheme: ModelScheme,
        batches: Sequence[torch.Tensor],
        operands: Mapping[str, Operands],
        reference: Reference,
        log: ScoreLog | None,
        on_tokens: OnTokens,
    ):
        self._model, self._batches, self._reference = model, batches, reference
        self._log, self.on_tokens = log, on_tokens
        self._known: dict[str, tuple[Score, ...]] = {}
        quantized = {name for name, module in model.named_modules() if isinstance(module, TRAINABLE)}
        self.scheme, self.operands = scheme, operands
        self.names = tuple(name for name in operands if name in quantized)
        self.left = frozenset(operands) - quantized

    def bits(self, full: Collection[str] = ()) -> float:
        """Bits of an operand on average with the layers ``full`` in full precision too; see [`average_bits`]."""
        return average_bits(self.scheme, self.operands, self.left.union(full))

    def scores(self, full: Collection[str] = ()) -> tuple[Score, ...]:
        """How the model predicts each text with the layers ``full`` in full precision; measured once, and not again
        where the log has it."""
        key = self._key(full)
        if key not in self._known:
            found = {} if self._log is None else self._log.scores(key)
            for known in found.values():
                self.on_tokens(known.tokens, self.scheme.name)

            def on_text(index: int, text: Score) -> None:
                found[index] = text
                if self._log is not None:
                    self._log.add(key, index, text)
                self.on_tokens(text.tokens, self.scheme.name)

            missing = [index for index in range(len(self._batches)) if index not in found]
            if missing:
                with full_precision(self._model, only=full):
                    score(self._model, self._reference, self._batches, on_text, missing)
            self._known[key] = tuple(found[index] for index in range(len(self._batches)))
        return self._known[key]

    def _key(self, full: Collection[str]) -> str:
        """The same as of a model that is loaded with these layers in `modules_to_not_convert`, in model order."""
        names = [name for name in self.names if name in full]
        config = self.scheme.config
        if names:
            config = replace(config, modules_to_not_convert=[*(config.modules_to_not_convert or ()), *names])
        return key_of(config)


@contextlib.contextmanager
def trials_of(
    model: nn.Module,
    scheme: ModelScheme,
    batches: Sequence[torch.Tensor],
    operands: Mapping[str, Operands],
    *,
    log: ScoreLog | None = None,
    on_tokens: OnTokens = lambda count, name: None,
) -> Iterator[Trials]:
    """Within this context ``model`` computes under ``scheme``, each weight quantized once for all trials; afterwards it
    is what it was.

    Args:
        model: in full precision.
        batches: token ids ``[1, tokens]`` of each text.
        log: holds what is known already, and gets what is found. Hidden states of the model in full precision are kept
            beside it in the meantime if they are many.
        on_tokens: told of the predicted tokens of each text, also of those that the log has.

    Raises `ValueError` as [`hf_mxfp4.analysis.perplexity.swapped.swapped`] does.
    """

    def told(index: int, found: Score) -> None:
        on_tokens(found.tokens, FULL_PRECISION)

    folder = None if log is None else log.path.parent
    with states_room(model, batches, folder) as states:
        reference = reference_of(model, batches, states, on_text=told)
        with swapped(model, scheme.config), cached_weights("dense"):
            yield Trials(model, scheme, batches, operands, reference, log, on_tokens)
