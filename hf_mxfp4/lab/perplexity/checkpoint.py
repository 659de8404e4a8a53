# SPDX-License-Identifier: Apache-2.0
"""A checkpoint evaluated on texts of the user's own, resumable."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ... import __version__
from ...config import MXFP4RLConfig
from ..errors.source import SourceError
from ..texts import TextOptions
from .evaluate import OnTokens, evaluate
from .load import Loaded, check_same_tokens
from .log import ScoreLog, header_of
from .results import AS_STORED, FULL_PRECISION, Evaluation
from .schemes import ModelScheme


PROGRESS_NAME = "progress.jsonl"


def texts_to_predict(options: TextOptions, tokenizer, texts: Sequence[str]) -> list[torch.Tensor]:
    """Token ids ``[1, tokens]`` of the texts that have two or more. Raises [`SourceError`] where none has."""
    found = [ids for ids in options.tokens(tokenizer, texts) if ids.shape[-1] > 1]
    if not found:
        raise SourceError(f"no text of {options.dataset} has two tokens: there is none to predict")
    return found


@dataclass(frozen=True)
class Job:
    """A checkpoint, what it is measured on, and under what.

    Raises [`SourceError`] for schemes on weights that are stored quantized, and for a reference of other tokens.
    """

    loaded: Loaded
    options: TextOptions
    batches: list[torch.Tensor]
    schemes: Sequence[ModelScheme]
    reference: Loaded | None = None

    def __post_init__(self) -> None:
        if self.loaded.stored and self.schemes:
            raise SourceError(
                f"{self.loaded.name} stores quantized weights, so no other scheme can be put on it; leave out --scheme "
                "(and give --reference ORIGINAL to compare it with what it was made from)"
            )
        if self.reference is not None:
            check_same_tokens(self.loaded, self.reference)
            if self.reference.name in (FULL_PRECISION, AS_STORED):
                raise SourceError(f"a reference cannot be called {self.reference.name!r}; rename its folder")

    @property
    def total(self) -> int:
        """Predicted tokens of all rows."""
        rows = 1 + len(self.schemes) + (self.reference is not None)
        return rows * sum(ids.shape[-1] - 1 for ids in self.batches)

    def open_log(self, path: Path, overwrite: bool = False) -> ScoreLog:
        """The log of this job. Raises [`hf_mxfp4.lab.resume_log.ProgressMismatch`] for one of another."""
        model, reference = self.loaded, self.reference
        compared = None if reference is None else [reference.name, *reference.identity]
        facts = {"dtype": model.dtype, "device": model.model.device.type, "reference": compared}
        header = header_of(__version__, model.name, model.identity, self.batches, **facts)
        return ScoreLog(path, header, overwrite=overwrite)

    def with_earlier(self, log: ScoreLog) -> "Job":
        """Return this job with the schemes that an earlier one has measured on the same texts."""
        schemes = list(self.schemes)
        for key, name in log.complete(len(self.batches)).items():
            config = MXFP4RLConfig.from_dict(json.loads(key))
            if all(scheme.config != config and scheme.name != name for scheme in schemes):
                schemes.append(ModelScheme(name, config))
        return replace(self, schemes=schemes)

    def run(self, log: ScoreLog | None = None, on_tokens: OnTokens = lambda count, name: None) -> Evaluation:
        """Measure what the log does not know. Raises [`SourceError`] where a scheme does not fit the model, and for a
        model that gives NaN."""
        model, other = self.loaded, self.reference
        try:
            rows = evaluate(
                model.model,
                self.batches,
                self.schemes,
                stored=model.stored,
                reference=None if other is None else other.model,
                reference_name="" if other is None else other.name,
                log=log,
                on_tokens=on_tokens,
                folder=None if log is None else log.path.parent,
            )
        except ValueError as error:
            raise SourceError(str(error)) from error
        base = None if other is None and model.stored else rows[0].name
        facts = {"dtype": model.dtype, "device": model.model.device.type}
        return Evaluation(model.name, Path(self.options.dataset).name, rows, base, facts)
