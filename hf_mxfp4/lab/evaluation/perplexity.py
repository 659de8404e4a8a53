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
from .scoring import OnText, Reference, Score, score
from .texts import TextOptions


#: Called with a number of tokens that are done, and the name of what they were measured under.
OnTokens = Callable[[int, str], None]


class ScoreLog(ResumeLog):
    """Keep the scores of texts on disk, one line per scheme and text; arguments as of [`ResumeLog`].

    The line of text -1 has the SQNR of the weights under a scheme.
    """

    def __init__(self, path: Path, header: dict, *, overwrite: bool = False):
        super().__init__(path, header, lambda line: (line["scheme"], line["text"]), overwrite=overwrite)

    def scores(self, scheme: str) -> dict[int, Score]:
        """Return the known scores under a scheme, by index of the text."""
        known = {}
        for (name, text), line in self.done.items():
            if name == scheme and text >= 0:
                known[text] = Score(line["tokens"], line["nll"], line["kl"], line["same_top"])
        return known


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
    name = AS_STORED if stored else FULL_PRECISION
    rows = []
    against = None
    if reference is not None:
        against = Reference(reference)
        rows.append(run.reference(against, reference_name))
    elif not stored:
        against = Reference(model)
        rows.append(run.reference(against, name))
    if reference is not None or stored:
        rows.append(run.model(model, against, name))
    for scheme in schemes:
        rows.append(run.scheme(model, against, scheme))
    return tuple(rows)


#: Measures the texts of some indices, and tells the score of each.
_Measure = Callable[[list[int], OnText], object]


class _Run:
    """Texts, and the log of what is known of them: each row measures what is missing."""

    def __init__(self, batches: Sequence[torch.Tensor], log: ScoreLog | None, on_tokens: OnTokens):
        self._batches = batches
        self._log = log
        self._on_tokens = on_tokens

    def reference(self, reference: Reference, name: str) -> Row:
        """Return the row of the reference itself."""
        return Row(name, self._scores(name, name, lambda only, told: reference.measure(self._batches, told, only)))

    def model(self, model: nn.Module, against: Reference | None, name: str) -> Row:
        """Return the row of a model as it is."""
        return Row(name, self._scores(name, name, lambda only, told: score(model, against, self._batches, told, only)))

    def scheme(self, model: nn.Module, against: Reference | None, scheme: ModelScheme) -> Row:
        """Return the row of a model under a scheme."""
        key = json.dumps(scheme.config.to_dict(), sort_keys=True)
        sqnr_db = None
        if self._log is not None:
            sqnr_db = self._log.done.get((key, -1), {}).get("weight_sqnr_db")

        def measure(only: list[int], told: OnText) -> None:
            nonlocal sqnr_db
            with swapped(model, scheme.config) as sqnr_db:
                if self._log is not None:
                    self._log.add({"scheme": key, "text": -1, "weight_sqnr_db": json_clean(sqnr_db)})
                score(model, against, self._batches, told, only)

        scores = self._scores(key, scheme.name, measure)
        return Row(scheme.name, scores, scheme, sqnr_db)

    def _scores(self, key: str, name: str, measure: _Measure) -> tuple[Score, ...]:
        """Return the scores of all texts, those in the log under ``key`` and those that ``measure`` finds."""
        known: dict[int, Score] = {}
        if self._log is not None:
            known = self._log.scores(key)
        for text in known.values():
            self._on_tokens(text.tokens, name)

        def told(index: int, text: Score) -> None:
            known[index] = text
            if self._log is not None:
                self._log.add({"scheme": key, "text": index, **asdict(text)})
            self._on_tokens(text.tokens, name)

        missing = [index for index in range(len(self._batches)) if index not in known]
        if missing:
            measure(missing, told)
        return tuple(known[index] for index in range(len(self._batches)))


def texts_to_predict(options: TextOptions, tokenizer, texts: Sequence[str | dict]) -> list[torch.Tensor]:
    """Return token ids ``[1, tokens]`` of the texts that have two or more. Raises [`SourceError`] where none has."""
    batches = [ids for ids in options.tokens(tokenizer, texts) if ids.shape[-1] > 1]
    if not batches:
        raise SourceError(f"no text of {options.dataset} has two tokens: there is none to predict")
    return batches


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
    reference_name = ""
    reference_model = None
    reference_identity = None
    if reference is not None:
        reference_name = reference.name
        reference_model = reference.model
        reference_identity = [reference.name, *reference.identity()]
    facts = {"dtype": loaded.dtype, "device": loaded.model.device.type}
    digest = hashlib.sha256(json.dumps([ids.tolist() for ids in batches]).encode()).hexdigest()[:16]
    header = {
        "format": 2,
        "hf_mxfp4": __version__,
        "model": loaded.name,
        "files": loaded.identity(),
        "texts": f"{len(batches)} with digest {digest}",
        **facts,
        "reference": reference_identity,
    }
    with ScoreLog(log_path, header, overwrite=overwrite) as log:
        try:
            rows = evaluate(
                loaded.model,
                batches,
                schemes,
                stored=loaded.stored,
                reference=reference_model,
                reference_name=reference_name,
                log=log,
                on_tokens=on_tokens,
            )
        except ValueError as error:
            raise SourceError(str(error)) from error
    # Weights that are stored quantized have nothing to be compared with but a reference.
    base = None
    if reference is not None or not loaded.stored:
        base = rows[0].name
    return Evaluation(loaded.name, Path(dataset).name, rows, base, facts)
