# SPDX-License-Identifier: Apache-2.0
"""Perplexity of one model under several schemes, and their divergence from full precision."""

import contextlib
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import nn

from ...config import MXFP4RLConfig
from .log import ScoreLog
from .results import AS_STORED, FULL_PRECISION, Row
from .schemes import ModelScheme
from .scoring import Reference, Score, reference_of, score
from .swapped import swapped


__all__ = ["Reference", "Row", "Score", "evaluate", "key_of", "reference_of", "score", "states_room"]

#: Bytes of hidden states that are kept in memory; more go to files.
_KEPT_BYTES = 2**30

#: Told of tokens as they are done, and of what they were measured under.
OnTokens = Callable[[int, str], None]


def evaluate(
    model: nn.Module,
    batches: Sequence[torch.Tensor],
    schemes: Sequence[ModelScheme] = (),
    *,
    stored: bool = False,
    reference: nn.Module | None = None,
    reference_name: str = "reference",
    log: ScoreLog | None = None,
    on_tokens: OnTokens = lambda count, name: None,
    folder: Path | None = None,
) -> tuple[Row, ...]:
    """Measure a model in full precision and under each scheme, one after the other on one set of weights.

    Args:
        model: in full precision, in evaluation mode or not; see ``stored``.
        batches: token ids ``[1, tokens]`` of each text, two or more; see [`hf_mxfp4.lab.texts.tokenized`].
        schemes: see [`hf_mxfp4.lab.perplexity.schemes.read_schemes`].
        stored: the weights are stored quantized, and there is no full precision of them.
        reference: another model of the same tokens to compare with, in place of the model in full precision.
        reference_name: what its row is called.
        log: holds what is known already, and gets what is found.
        on_tokens: told of the predicted tokens of each text, also of those that the log has.
        folder: where hidden states lie in the meantime if they are many; by default where temporary files do.

    Returns:
        The rows: the reference, the model itself, and the schemes.

    Raises `ValueError` for schemes on weights that are stored quantized, and as [`reference_of`] and [`swapped`] do.
    """
    if stored and schemes:
        raise ValueError("the weights are stored quantized, so no other scheme can be put on them")
    own = AS_STORED if stored else FULL_PRECISION
    base, first = (reference, reference_name) if reference is not None else (None if stored else model, own)
    keys = {scheme.name: key_of(scheme.config) for scheme in schemes}
    run = _Run(batches, log, on_tokens)
    with states_room(base or model, batches, folder) as states:
        against, rows = None, []
        if base is not None:
            compared = [*keys.values(), *([own] if base is not model else [])]
            needed = {index for name in (first, *compared) for index in run.missing(name)}
            against = reference_of(base, batches, states, on_text=run.tell(first), only=sorted(needed))
            rows.append(Row(first, run.scores(first)))
        if base is not model:
            score(model, against, batches, on_text=run.tell(own), only=run.missing(own))
            rows.append(Row(own, run.scores(own)))
        for scheme in schemes:
            rows.append(run.under(scheme, keys[scheme.name], model, against))
    return tuple(rows)


class _Run:
    """What is known, and what is still to be done."""

    def __init__(self, batches: Sequence[torch.Tensor], log: ScoreLog | None, on_tokens: OnTokens):
        self._batches, self._log, self._on_tokens = batches, log, on_tokens
        self._known: dict[str, dict[int, Score]] = {}

    def known(self, key: str) -> dict[int, Score]:
        if key not in self._known:
            self._known[key] = {} if self._log is None else self._log.scores(key)
        return self._known[key]

    def missing(self, key: str) -> list[int]:
        return [index for index in range(len(self._batches)) if index not in self.known(key)]

    def scores(self, key: str) -> tuple[Score, ...]:
        return tuple(self.known(key)[index] for index in range(len(self._batches)))

    def tell(self, key: str, name: str | None = None) -> Callable[[int, Score], None]:
        """What is done with a score: it is kept, logged and told, unless it was known."""
        for found in self.known(key).values():
            self._on_tokens(found.tokens, name or key)

        def on_text(index: int, found: Score) -> None:
            if index in self.known(key):
                return
            self._known[key][index] = found
            if self._log is not None:
                self._log.add(key, index, found)
            self._on_tokens(found.tokens, name or key)

        return on_text

    def under(self, scheme: ModelScheme, key: str, model: nn.Module, against: Reference | None) -> Row:
        on_text, missing = self.tell(key, scheme.name), self.missing(key)
        sqnr_db = None if self._log is None else self._log.sqnr_db(key)
        if missing:
            with swapped(model, scheme.config) as sqnr_db:
                if self._log is not None:
                    self._log.add_sqnr_db(key, sqnr_db, scheme.name)
                score(model, against, self._batches, on_text=on_text, only=missing)
        return Row(scheme.name, self.scores(key), scheme, sqnr_db)


def key_of(config: MXFP4RLConfig) -> str:
    """What a log calls the scores under a config."""
    return json.dumps(config.to_dict(), sort_keys=True)


@contextlib.contextmanager
def states_room(model: nn.Module, batches: Sequence[torch.Tensor], folder: Path | None) -> Iterator[Path | None]:
    """Where hidden states are kept: `None` for the memory, or a folder that is gone afterwards."""
    parameter = next(model.parameters())
    width = getattr(model.config.get_text_config(), "hidden_size", None) or parameter.shape[-1]
    if sum(ids.shape[-1] for ids in batches) * width * parameter.element_size() <= _KEPT_BYTES:
        yield None
        return
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="states-", dir=folder) as temporary:
        yield Path(temporary)
