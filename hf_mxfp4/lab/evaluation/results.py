# SPDX-License-Identifier: Apache-2.0
"""Results of an evaluation: perplexity, divergence and paired differences of schemes, with standard errors by text."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .intervals import ratio_of_sums
from .schemes import ModelScheme
from .scoring import Score


FULL_PRECISION = "full precision"
AS_STORED = "as stored"


@dataclass(frozen=True)
class Mean:
    """A mean per token, and its standard error by text; `None` for a single text."""

    value: float
    error: float | None

    @classmethod
    def of(cls, sums: Sequence[float], scores: Sequence[Score]) -> "Mean":
        """Return the standard error of sums over texts. The formula is in [`ratio_of_sums`]."""
        return cls(*ratio_of_sums(sums, [score.tokens for score in scores]))

    def text(self, digits: int = 3, sign: str = "") -> str:
        """Return the mean ``±`` its error, with so many decimals."""
        error = "" if self.error is None else f" ± {self.error:.{digits}f}"
        return f"{self.value:{sign}.{digits}f}{error}"

    def to_dict(self) -> dict[str, float | None]:
        return {"value": self.value, "standard_error": self.error}


@dataclass(frozen=True)
class Row:
    """A model as it was measured.

    Attributes:
        name: of the scheme, or what it is without one.
        scores: of each text.
        scheme: what was put on the model; `None` for the model itself.
        weight_sqnr_db: signal to quantization noise ratio of the weights under the scheme, in decibels.
    """

    name: str
    scores: tuple[Score, ...]
    scheme: ModelScheme | None = None
    weight_sqnr_db: float | None = None

    @property
    def tokens(self) -> int:
        return sum(score.tokens for score in self.scores)

    @property
    def nats(self) -> Mean:
        """Negative log-likelihood per token."""
        return Mean.of([score.nll for score in self.scores], self.scores)

    @property
    def perplexity(self) -> float:
        return math.exp(self.nats.value)

    @property
    def kl(self) -> Mean | None:
        """Divergence of the predictions from those of the reference, in nats per token; `None` without one."""
        if any(score.kl is None for score in self.scores):
            return None
        return Mean.of([score.kl for score in self.scores], self.scores)

    @property
    def same_top(self) -> float | None:
        """Share of positions whose likeliest token is that of the reference."""
        if any(score.same_top is None for score in self.scores):
            return None
        return sum(score.same_top for score in self.scores) / self.tokens

    def difference(self, other: "Row") -> Mean:
        """By how many nats per token this is worse than ``other`` on the same texts, paired by text."""
        pairs = zip(self.scores, other.scores, strict=True)
        return Mean.of([mine.nll - theirs.nll for mine, theirs in pairs], self.scores)


@dataclass(frozen=True)
class Evaluation:
    """All that was found about one model.

    Attributes:
        model: its name.
        text: what the texts are, in words.
        rows: the reference first, where there is one.
        reference: name of the row that the others are compared with; `None` for a model whose full precision is gone.
        facts: what else to say: dtype, device.
    """

    model: str
    text: str
    rows: tuple[Row, ...]
    reference: str | None
    facts: dict[str, str]

    @property
    def tokens(self) -> int:
        return self.rows[0].tokens

    @property
    def texts(self) -> int:
        return len(self.rows[0].scores)

    @property
    def base(self) -> Row | None:
        """The row of the reference."""
        return next((row for row in self.rows if row.name == self.reference), None)

    @property
    def schemes(self) -> list[Row]:
        return [row for row in self.rows if row.scheme is not None]

    @property
    def best(self) -> Row | None:
        """The scheme of the least perplexity, where there are two at least."""
        if len(self.schemes) < 2:
            return None
        return min(self.schemes, key=lambda row: row.nats.value)

    @property
    def fronts(self) -> dict[str, list[Row]]:
        """By what is quantized, the schemes that no other of that kind beats in both bits and divergence, by bits."""
        kinds: dict[str, list[Row]] = {}
        for row in self.schemes:
            if row.kl is not None:
                kinds.setdefault(row.scheme.operands, []).append(row)
        return {kind: _front(rows) for kind, rows in kinds.items()}

    @property
    def front(self) -> list[Row]:
        """The schemes on the front of their kind."""
        return [row for rows in self.fronts.values() for row in rows]

    def to_dict(self) -> dict[str, Any]:
        """Return the evaluation as JSON-clean data, without single texts. Nats are per token."""
        return {
            "model": self.model,
            "text": self.text,
            "texts": self.texts,
            "tokens": self.tokens,
            "reference": self.reference,
            **self.facts,
            "rows": [self._row_to_dict(row) for row in self.rows],
            "differences": {
                row.name: {other.name: row.difference(other).to_dict() for other in self.rows if other is not row}
                for row in self.rows
            },
        }

    def _row_to_dict(self, row: Row) -> dict[str, Any]:
        data: dict[str, Any] = {"name": row.name, "perplexity": row.perplexity, "nats": row.nats.to_dict()}
        if self.base is not None and row is not self.base:
            data["difference"] = row.difference(self.base).to_dict()
            data["kl"] = row.kl.to_dict()
            data["same_top"] = row.same_top
        if row.scheme is not None:
            data["scheme"] = row.scheme.config.describe()
            data["bits"] = row.scheme.bits
            data["weight_bits"] = row.scheme.weight_bits
            data["activation_bits"] = row.scheme.activation_bits
            data["weight_sqnr_db"] = row.weight_sqnr_db
            data["on_front"] = row in self.front
        return data


def _front(rows: Sequence[Row]) -> list[Row]:
    """Return the rows that no other beats in both bits and divergence, from the fewest bits to the most."""
    front: list[Row] = []
    for row in sorted(rows, key=lambda row: (row.scheme.bits, row.kl.value)):
        if not front or row.kl.value < front[-1].kl.value and row.scheme.bits > front[-1].scheme.bits:
            front.append(row)
    return front
