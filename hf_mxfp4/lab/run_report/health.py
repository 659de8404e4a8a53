# SPDX-License-Identifier: Apache-2.0
"""What a training run's numbers say about its health, in plain words with a line of advice each.

The limits are rules of thumb, and not laws: a report says "look", it does not stop anything.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from . import findings
from .check import STATE_WORDS, STATES, Check, graded
from .findings import reward_words
from .log import RunRecord


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _last(values: Sequence[float]) -> float:
    return values[-1]


def _mean_of_last_fifth(values: Sequence[float]) -> float:
    return _mean(values[-max(1, len(values) // 5) :])


@dataclass(frozen=True)
class Rule:
    """A check of one logged quantity against two limits.

    Attributes:
        metrics: names in the log; the first that has values counts. Without any the check is left out.
        measure: from its values to the number that is judged.
        limits: of that number, where it is amber and where red; falling ones for a quantity that should be high.
        finding: a format of the words, with ``value`` (the number), ``first``, ``last``, ``mean`` and ``max`` of the
            values, and ``beside_first`` and ``beside_last`` of those of ``beside``, which is then needed too.
    """

    title: str
    metrics: tuple[str, ...]
    measure: Callable[[Sequence[float]], float]
    limits: tuple[float, float]
    finding: str
    advice: str
    beside: str | None = None

    def __call__(self, record: RunRecord) -> Check | None:
        values = next(filter(None, map(record.values, self.metrics)), None)
        beside = record.values(self.beside) if self.beside else [0.0]
        if not values or not beside:
            return None
        value = self.measure(values)
        words = self.finding.format(
            value=value,
            first=values[0],
            last=values[-1],
            mean=_mean(values),
            max=max(values),
            beside_first=beside[0],
            beside_last=beside[-1],
        )
        return graded(self.title, words, value, self.limits, self.advice)


#: In the order of importance.
CHECKS: tuple[Callable[[RunRecord], Check | None], ...] = (
    findings.ending,
    findings.reward,
    findings.accuracy,
    findings.entropy,
    findings.noise,
    findings.layers,
    findings.sqnr,
    Rule(
        "Importance weights",
        ("sampling/importance_sampling_ratio/clipped",),
        _mean,
        (0.01, 0.10),
        "{mean:.2%} of the importance weights were clipped on average, {max:.2%} at most.",
        "Rollouts are far from the policy that trains: lower aqn_sigma_start, or reuse rollouts less.",
    ),
    Rule(
        "Effective sample size",
        ("sampling/effective_sample_size",),
        _mean,
        (0.7, 0.3),
        "{mean:.1%} on average.",
        "Few tokens carry the gradient: lower aqn_sigma_start, or reuse rollouts less.",
    ),
    Rule(
        "Learning signal",
        ("dynamic_sampling/zero_variance_share", "frac_reward_zero_std"),
        _mean,
        (0.5, 0.9),
        "In {mean:.0%} of the groups all responses got the same reward, and taught nothing.",
        "Choose prompts the policy solves sometimes, raise num_generations or temperature, or resample groups.",
    ),
    Rule(
        "Response length",
        ("completions/clipped_ratio",),
        _mean_of_last_fifth,
        (0.3, 0.8),
        "{beside_first:.0f} to {beside_last:.0f} tokens on average; {value:.0%} cut off in the last fifth.",
        "Raise max_completion_length, or reward shorter answers.",
        beside="completions/mean_length",
    ),
    findings.movement,
    findings.finite,
    Rule(
        "Router agreement",
        ("router/agreement",),
        _last,
        (0.9, 0.7),
        "{last:.1%} of the experts chosen are those that full precision would choose.",
        "Try router_replay: true, and a scheme with less error.",
    ),
)


def health_checks(record: RunRecord) -> list[Check]:
    """All checks of a run, in the order of importance; those whose quantities were not logged are left out."""
    return [found for check in CHECKS if (found := check(record)) is not None]


def overall(checks: Sequence[Check]) -> str:
    """The worst state of the checks."""
    return min((check.state for check in checks if check.state != "none"), key=STATES.index, default="none")


def summary(record: RunRecord, checks: Sequence[Check]) -> str:
    """The run in one or two sentences."""
    counts = {state: sum(check.state == state for check in checks) for state in ("red", "amber")}
    words = {"red": "is not healthy", "amber": "needs a look", "green": "looks healthy", "none": "cannot be judged"}
    reasons = [f"{count} {STATE_WORDS[state]}" for state, count in counts.items() if count]
    of = f" of {record.max_steps}" if record.max_steps else ""
    because = f" ({', '.join(reasons)})" if reasons else ""
    return f"This run {words[overall(checks)]}{because}: {record.step}{of} steps. {reward_words(record)}".strip()
