# SPDX-License-Identifier: Apache-2.0
"""Measure the perplexity of one model under several schemes, and their divergence from full precision, resumable."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from torch import nn

from ... import __version__
from ...files import json_clean
from ..errors.source import SourceError
from ..resume_log import ResumeLog
from .loading import Loaded, check_same_tokens
from .results import AS_STORED, FULL_PRECISION, Evaluation, Row
from .schemes import ModelScheme, swapped
from .scoring import Reference, Score, score
from .texts import TextOptions


#: Told of tokens as they are done, and of what they were measured under.
OnTokens = Callable[[int, str], None]


class ScoreLog(ResumeLog):
    """Keep the scores of texts on disk, one line per scheme and text; arguments as of [`ResumeLog`]."""

    def __init__(self, path: Path, header: dict, *, overwrite: bool = False):
        super().__init__(path, header, lambda line: (line["scheme"], line["text"]), overwrite=overwrite)

    def scores(self, scheme: str) -> dict[int, Score]:
        """Return the known scores under a scheme, by index of the text."""
        lines = {text: line for (name, text), line in self.done.items() if name == scheme and text >= 0}
        return {
            text: Score(*(line[key] for key in ("tokens", "nll", "kl", "same_top"))) for text, line in lines.items()
        }


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
) -> tuple[Row, ...]:
    """Measure a model in full precision and under each scheme, one after the other on one set of weights.

    Args:
        model: in full precision; see ``stored``.
        batches: token ids ``[1, tokens]`` of each text, two or more.
        schemes: see [`hf_mxfp4.lab.read_schemes`].
        stored: the weights are stored quantized, and there is no full precision of them.
        reference: another model of the same tokens to compare with, in place of the model in full precision.
        reference_name: what its row is called.
        log: holds what is known already, and gets what is found.
        on_tokens: told of the predicted tokens of each text, also of those that the log has.

    Returns:
        The rows: the reference, the model itself, and the schemes.

    Raises `ValueError` for schemes on weights that are stored quantized, for texts or logits
    that cannot be scored, and as [`swapped`] does.
    """
    if stored and schemes:
        raise ValueError("the weights are stored quantized, so no other scheme can be put on them")
    run = _Run(batches, log, on_tokens)
    own = AS_STORED if stored else FULL_PRECISION
    base, first = (reference, reference_name) if reference is not None else (None if stored else model, own)
    against, rows = None, []
    if base is not None:
        against = Reference(base)
        rows.append(run.row(first, first, lambda only, told: against.measure(batches, told, only)))
    if base is not model:
        rows.append(run.row(own, own, lambda only, told: score(model, against, batches, told, only)))
    for scheme in schemes:
        rows.append(run.under(scheme, model, against))
    return tuple(rows)


class _Run:
    """What is known, and what is still to be done."""

    def __init__(self, batches: Sequence[torch.Tensor], log: ScoreLog | None, on_tokens: OnTokens):
        self._batches, self._log, self._on_tokens = batches, log, on_tokens

    def row(self, key: str, name: str, measure: Callable[[list[int], Callable[[int, Score], None]], object]) -> Row:
        """Measure the texts that are not known yet."""
        known = {} if self._log is None else self._log.scores(key)
        for found in known.values():
            self._on_tokens(found.tokens, name)

        def told(index: int, found: Score) -> None:
            known[index] = found
            if self._log is not None:
                self._log.add({"scheme": key, "text": index, **asdict(found)})
            self._on_tokens(found.tokens, name)

        if missing := [index for index in range(len(self._batches)) if index not in known]:
            measure(missing, told)
        return Row(name, tuple(known[index] for index in range(len(self._batches))))

    def under(self, scheme: ModelScheme, model: nn.Module, against: Reference | None) -> Row:
        key = json.dumps(scheme.config.to_dict(), sort_keys=True)
        sqnr_db = None if self._log is None else self._log.done.get((key, -1), {}).get("weight_sqnr_db")

        def measure(only: list[int], told: Callable[[int, Score], None]) -> None:
            nonlocal sqnr_db
            with swapped(model, scheme.config) as sqnr_db:
                if self._log is not None:
                    self._log.add({"scheme": key, "text": -1, "weight_sqnr_db": json_clean(sqnr_db)})
                score(model, against, self._batches, told, only)

        found = self.row(key, scheme.name, measure)
        return Row(scheme.name, found.scores, scheme, sqnr_db)


def texts_to_predict(options: TextOptions, tokenizer, texts: Sequence[str | dict]) -> list[torch.Tensor]:
    """Return token ids ``[1, tokens]`` of the texts that have two or more. Raises [`SourceError`] where none has."""
    found = [ids for ids in options.tokens(tokenizer, texts) if ids.shape[-1] > 1]
    if not found:
        raise SourceError(f"no text of {options.dataset} has two tokens: there is none to predict")
    return found


def evaluate_checkpoint(
    loaded: Loaded,
    dataset: str,
    batches: list[torch.Tensor],
    schemes: Sequence[ModelScheme],
    reference: Loaded | None,
    log_path: Path,
    *,
    overwrite: bool = False,
    on_tokens: OnTokens = lambda count, name: None,
) -> Evaluation:
    """Evaluate a checkpoint on texts; the log at ``log_path`` makes it resumable.

    Raises:
        SourceError: schemes on weights that are stored quantized, a scheme that does not fit the model, a reference of
            other tokens, or a model that gives NaN.
        ProgressMismatch: the log is of something else.
    """
    if loaded.stored and schemes:
        raise SourceError(
            f"{loaded.name} stores quantized weights, so no other scheme can be put on it; leave out --scheme "
            "(and give --reference ORIGINAL to compare it with what it was made from)"
        )
    if reference is not None:
        check_same_tokens(loaded, reference)
        if reference.name in (FULL_PRECISION, AS_STORED):
            raise SourceError(f"a reference cannot be called {reference.name!r}; rename its folder")
    facts = {"dtype": loaded.dtype, "device": loaded.model.device.type}
    digest = hashlib.sha256(json.dumps([ids.tolist() for ids in batches]).encode()).hexdigest()[:16]
    header = {
        "format": 2,
        "hf_mxfp4": __version__,
        "model": loaded.name,
        "files": loaded.identity(),
        "texts": f"{len(batches)} with digest {digest}",
        **facts,
        "reference": None if reference is None else [reference.name, *reference.identity()],
    }
    with ScoreLog(log_path, header, overwrite=overwrite) as log:
        try:
            rows = evaluate(
                loaded.model,
                batches,
                schemes,
                stored=loaded.stored,
                reference=None if reference is None else reference.model,
                reference_name="" if reference is None else reference.name,
                log=log,
                on_tokens=on_tokens,
            )
        except ValueError as error:
            raise SourceError(str(error)) from error
    base = None if reference is None and loaded.stored else rows[0].name
    return Evaluation(loaded.name, Path(dataset).name, rows, base, facts)
