# SPDX-License-Identifier: Apache-2.0
"""The log that makes a long evaluation resumable: one JSON line per scheme and text."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ...files import json_clean
from ..resume_log import ResumeLog
from .scoring import Score


FORMAT = 1


class ScoreLog(ResumeLog):
    """Scores of texts, on disk as soon as they are known. Other schemes can be added to the same texts later.

    Args:
        path: the log; made with its folder if need be.
        header: what the scores are of, see [`header_of`]; kept in the first line.
        overwrite: start over whatever the log holds.

    Raises [`hf_mxfp4.lab.resume_log.ProgressMismatch`] when the log was written for something else.
    """

    def __init__(self, path: Path, header: Mapping[str, Any], *, overwrite: bool = False):
        super().__init__(path, header, overwrite=overwrite)

    def key(self, line: Mapping[str, Any]) -> tuple[str, int]:
        return line["scheme"], line["text"]

    def scores(self, scheme: str) -> dict[int, Score]:
        """By index of the text, the known scores under a scheme."""
        found = {}
        for (name, text), line in self._done.items():
            if name == scheme and text >= 0:
                found[text] = Score(**{key: line[key] for key in ("tokens", "nll", "kl", "same_top")})
        return found

    def add(self, scheme: str, text: int, score: Score) -> None:
        self._append({"scheme": scheme, "text": text, **asdict(score)})

    def sqnr_db(self, scheme: str) -> float | None:
        """The known signal to quantization noise ratio of the weights under a scheme."""
        return self._done.get((scheme, -1), {}).get("weight_sqnr_db")

    def add_sqnr_db(self, scheme: str, sqnr_db: float | None, name: str) -> None:
        """Add what is known of a scheme before its scores, and what the user calls it."""
        self._append({"scheme": scheme, "text": -1, "weight_sqnr_db": json_clean(sqnr_db), "name": name})

    def complete(self, texts: int) -> dict[str, str]:
        """Return the schemes with scores of all ``texts``, and the name of each."""
        named = {scheme: line["name"] for (scheme, text), line in self._done.items() if text < 0 and "name" in line}
        return {scheme: name for scheme, name in named.items() if len(self.scores(scheme)) == texts}


def header_of(
    version: str, model: str, identity: Sequence[Any], batches: Sequence[torch.Tensor], **facts: str | None
) -> dict[str, Any]:
    """The first line of a log: what scores can be mixed with.

    Args:
        version: of this package.
        identity: changes with the weights of ``model``.
        batches: token ids of the texts.
        facts: dtype, device, reference and what else changes the numbers.
    """
    digest = hashlib.sha256(json.dumps([ids.tolist() for ids in batches]).encode()).hexdigest()[:16]
    return {
        "format": FORMAT,
        "hf_mxfp4": version,
        "model": model,
        "files": list(identity),
        "texts": f"{len(batches)} with digest {digest}",
        **facts,
    }
