# SPDX-License-Identifier: Apache-2.0
"""Held-out texts, and how well a model predicts them; for `benchmarks.evidence` and `benchmarks.preparation`."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from hf_mxfp4.lab import FULL_PRECISION, ModelScheme, Row, TextOptions, reference_of, score, swapped, texts_to_predict
from hf_mxfp4.lab.evaluation.loading import Loaded
from hf_mxfp4.lab.evaluation.scoring import Reference


def short_name(file: Path) -> str:
    """Return the name of a file of texts in records and commands: its folder and its own name."""
    return f"{file.parent.name}/{file.name}"


@dataclass(frozen=True)
class HeldOut:
    """A text to predict, and how the checkpoint in full precision predicts it.

    Attributes:
        name: of the file, see [`short_name`].
        batches: token ids ``[1, tokens]``.
        reference: predictions of the checkpoint in full precision.
    """

    name: str
    batches: list[torch.Tensor]
    reference: Reference

    @classmethod
    def read(cls, file: Path, original: Loaded, samples: int) -> "HeldOut":
        """Read at most ``samples`` texts (or windows of a running text), and predict them by ``original``."""
        options = TextOptions(str(file), samples=samples)
        batches = texts_to_predict(options, original.tokenizer, options.read())
        return cls(short_name(file), batches, reference_of(original.model, batches))

    @property
    def full_precision(self) -> Row:
        """Result of the checkpoint itself."""
        scores = [self.reference.scores[index] for index in range(len(self.batches))]
        return Row(FULL_PRECISION, tuple(scores))

    def row(self, name: str, model: nn.Module) -> Row:
        """Return the result of a model as it is."""
        return Row(name, tuple(score(model, self.reference, self.batches)))

    def row_under(self, scheme: ModelScheme, model: nn.Module) -> Row:
        """Return the result of a model under a scheme."""
        with swapped(model, scheme.config) as sqnr_db:
            scores = score(model, self.reference, self.batches)
            return Row(scheme.name, tuple(scores), scheme, sqnr_db)
