# SPDX-License-Identifier: Apache-2.0
"""What the parts of a checkpoint cost on texts of the user's own, and a suggestion for a budget of bits, resumable."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ...files import json_clean, write_json
from .checkpoint import Job
from .costs import PartCost, mean_kl, part_costs, parts_of
from .evaluate import OnTokens
from .log import ScoreLog
from .operands import averaged, count_operands
from .results import Evaluation, Mean
from .schemes import ModelScheme
from .scoring import Score
from .suggest import Suggestion, check_budget, split_texts, suggest
from .trials import Trials, trials_of


JSON_NAME, COSTS_LOG, HELD_OUT_LOG = "costs.json", "costs.jsonl", "held-out.jsonl"


@dataclass(frozen=True)
class Told:
    """What is told while it goes on.

    Attributes:
        on_start: how many parts there are, the predicted tokens of all passes but those of rounds, and the seconds of
            one pass over the texts, 0 where the log had it.
        on_tokens: as of [`hf_mxfp4.analysis.perplexity.evaluate.evaluate`], while parts and then schemes are measured.
        on_again: the same of the passes of rounds, which are known as they come.
        on_round: as of [`hf_mxfp4.analysis.perplexity.suggest.suggest`].
    """

    on_start: Callable[[int, int, float], None] = lambda parts, tokens, seconds: None
    on_tokens: OnTokens = lambda count, name: None
    on_again: OnTokens = lambda count, name: None
    on_round: Callable[[int, float, float], None] = lambda parts, bits, kl: None


@dataclass(frozen=True)
class CostReport:
    """What was found.

    Attributes:
        model, text: names of both.
        scheme: under which the parts were tried.
        unit: what a part is, one of [`hf_mxfp4.analysis.perplexity.costs.UNITS`].
        bits: of an operand on average under the scheme.
        kl: its divergence from full precision on the texts that the parts were tried on, nats per token.
        texts, tokens: how many these are.
        costs: of all parts, the dearest first.
        suggestion: for a budget, where one was given.
        held_out: the schemes and the suggestion on the other texts; each scheme's bits are averages over the model.
        seconds: of this run.
    """

    model: str
    text: str
    scheme: ModelScheme
    unit: str
    bits: float
    kl: Mean
    texts: int
    tokens: int
    costs: tuple[PartCost, ...]
    suggestion: Suggestion | None
    held_out: Evaluation | None
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """JSON-clean. Nats are per token."""
        data: dict[str, Any] = {
            "model": self.model,
            "text": self.text,
            "scheme": self.scheme.name,
            "unit": self.unit,
            "bits": self.bits,
            "kl": self.kl.to_dict(),
            "texts": self.texts,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "costs": [cost.to_dict() for cost in self.costs],
        }
        if self.suggestion is not None:
            data["suggestion"] = {
                "name": self.suggestion.name,
                "budget": self.suggestion.budget,
                "bits": self.suggestion.bits,
                "config": self.suggestion.options(),
            }
            data["held_out"] = self.held_out.to_dict()
            data["held_out"]["kl_differences"] = {
                row.name: self.kl_difference(row.name).to_dict() for row in self.others
            }
        return json_clean(data)

    @property
    def others(self) -> list:
        """The rows of the schemes that the suggestion is compared with."""
        return [row for row in self.held_out.schemes if row.name != self.suggestion.name]

    def kl_difference(self, name: str) -> Mean:
        """By how many nats per token the suggestion diverges more than the scheme called ``name`` on the texts that
        were held out, paired by text."""
        rows = {row.name: row for row in self.held_out.rows}
        own, other = rows[self.suggestion.name].scores, rows[name].scores
        return Mean.of([a.kl - b.kl for a, b in zip(own, other, strict=True)], own)


def cost_report(
    job: Job, unit: str, budget: float | None, folder: Path, *, overwrite: bool = False, told: Told | None = None
) -> CostReport:
    """Try every part of a checkpoint in full precision under the first scheme of ``job``, and with a budget choose some
    by one part of the texts and measure the choice on the other, beside all schemes of the job.

    Args:
        unit: what a part is, one of [`hf_mxfp4.analysis.perplexity.costs.UNITS`].
        budget: bits of an operand on average; without one all texts are those that parts are tried on.
        folder: gets the logs, and `costs.json`.
        overwrite: start over whatever the logs hold.

    Raises `ValueError` for a job without a scheme, and as [`split_texts`] and [`suggest`] do.
    """
    if not job.schemes:
        raise ValueError("parts are tried under a scheme; give one")
    told, started, suggestion, held_out = told or Told(), time.monotonic(), None, None
    chosen, others = (job.batches, []) if budget is None else split_texts(job.batches)
    model = job.loaded.model
    operands = count_operands(model, chosen[0])
    schemes = [averaged(scheme, model, operands) for scheme in job.schemes]
    trial_job = replace(job, batches=chosen, schemes=schemes)
    with trial_job.open_log(folder / COSTS_LOG, overwrite) as log:
        with trials_of(model, schemes[0], chosen, operands, log=log, on_tokens=told.on_tokens) as trials:
            parts = parts_of(trials.names, unit)
            if budget is not None:
                check_budget(trials, parts, budget)
            base, seconds = _first(trials, log)
            passes = (2 + len(parts)) * _tokens(chosen) + (len(schemes) + 2) * _tokens(others)
            told.on_start(len(parts), passes, seconds)
            costs = part_costs(trials, parts)
            trials.on_tokens = told.on_again
            bits = trials.bits()
            if budget is not None:
                suggestion = suggest(trials, costs, budget, told.on_round)
    if suggestion is not None:
        held_job = replace(job, batches=others, schemes=[*schemes, suggestion.model_scheme()])
        with held_job.open_log(folder / HELD_OUT_LOG, overwrite) as log:
            held_out = held_job.run(log, told.on_tokens)
    report = CostReport(
        model=job.loaded.name,
        text=Path(job.options.dataset).name,
        scheme=schemes[0],
        unit=unit,
        bits=bits,
        kl=mean_kl(base),
        texts=len(base),
        tokens=sum(score.tokens for score in base),
        costs=tuple(costs),
        suggestion=suggestion,
        held_out=held_out,
        seconds=time.monotonic() - started,
    )
    write_json(folder / JSON_NAME, report.to_dict(), indent=1, allow_nan=False)
    return report


def _first(trials: Trials, log: ScoreLog) -> tuple[tuple[Score, ...], float]:
    """The scores of the scheme itself, and the seconds that a pass takes; 0 where the log had a part of it."""
    known, started = len(log), time.monotonic()
    scores = trials.scores()
    return scores, time.monotonic() - started if len(log) - known == len(scores) else 0.0


def _tokens(batches: Sequence[torch.Tensor]) -> int:
    return sum(ids.shape[-1] - 1 for ids in batches)
