# SPDX-License-Identifier: Apache-2.0
"""Confidence intervals and standard errors: of shares, of pass@k, of means, and of differences, paired or not.

All intervals are 95 %."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, stdev
from typing import Any

import numpy as np
from scipy import stats

from ...utils import Z_975, wilson_interval


CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A number between 0 and 1 (a difference: between -1 and 1) and its confidence interval.

    Attributes:
        value, low, high: the estimate and the ends of its interval.
        n: problems that it rests on.
        confidence: probability that such an interval covers the true value.
        method: how the interval was made.
    """

    value: float
    low: float
    high: float
    n: int
    method: str
    confidence: float = CONFIDENCE

    def to_dict(self) -> dict[str, float | int | str]:
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"

    def signed(self) -> str:
        """Return the text of a difference."""
        return f"{self.value:+.3f} [{self.low:+.3f}, {self.high:+.3f}]"


def wilson(correct: int, n: int) -> Estimate:
    """Return the share ``correct / n`` with Wilson's score interval ([`hf_mxfp4.utils.wilson_interval`]).

    Raises `ValueError` unless 0 <= ``correct`` <= ``n`` and ``n`` >= 1.
    """
    if not 0 <= correct <= n or n < 1:
        raise ValueError(f"a share needs 0 <= correct <= n and n >= 1, got {correct} of {n}")
    return Estimate(correct / n, *wilson_interval(correct, n), n, "Wilson")


def t_interval(values: Sequence[float]) -> dict[str, Any]:
    """Return mean, standard deviation and interval of the mean under Student's t; the last two `None` for one value."""
    n = len(values)
    mean = fmean(values)
    if n < 2:
        return {"n": n, "mean": mean, "sd": None, "interval": None}
    sd = stdev(values)
    low, high = stats.t.interval(CONFIDENCE, n - 1, mean, sd / math.sqrt(n)) if sd else (mean, mean)
    return {"n": n, "mean": mean, "sd": sd, "interval": [float(low), float(high)]}


def welch_interval(first: Sequence[float], second: Sequence[float]) -> dict[str, Any]:
    """Return the mean of ``second`` less that of ``first``, independent values, and its interval after Welch
    (Biometrika 34, 1947), which lets their variances differ; `None` where one of them has a single value."""
    mean = fmean(second) - fmean(first)
    if min(len(first), len(second)) < 2:
        return {"mean": mean, "interval": None}
    if len(set(first)) == len(set(second)) == 1:
        return {"mean": mean, "interval": [mean, mean]}
    low, high = stats.ttest_ind(second, first, equal_var=False).confidence_interval(CONFIDENCE)
    return {"mean": mean, "interval": [float(low), float(high)]}


def with_interval(
    statistics: Mapping[str, Any],
    factor: float,
    digits: int,
    *,
    unit: str = "",
    missing: str = "not finite",
    alone: str = " (one seed)",
) -> str:
    """Format ``factor`` times the ``mean`` and ``interval`` of ``statistics``, such as ``"+1.25 % [+0.80, +1.70]"``:
    ``missing`` where the mean is None, and the mean and ``alone`` where the interval is."""
    if statistics["mean"] is None:
        return missing
    text = f"{factor * statistics['mean']:+.{digits}f}{unit}"
    if statistics["interval"] is None:
        return f"{text}{alone}"
    low, high = (factor * bound for bound in statistics["interval"])
    return f"{text} [{low:+.{digits}f}, {high:+.{digits}f}]"


def ratio_of_sums(sums: Sequence[float], counts: Sequence[int]) -> tuple[float, float | None]:
    """Return the mean over items that come in groups (tokens in texts), and its standard error by group: items of one
    group depend on each other.

    With the sum ``y_i`` of a group and its ``n_i`` items, the mean is ``r = sum(y_i) / sum(n_i)``, and its standard
    error ``sqrt(k / (k - 1) * sum((y_i - r n_i)**2)) / sum(n_i)`` for ``k`` groups (Cochran, Sampling Techniques, 1977,
    chapter 6); `None` for one.

    Raises `ValueError` for sequences of different length, and where there is no item.
    """
    total = sum(counts)
    if len(sums) != len(counts) or total < 1:
        raise ValueError(f"a mean over groups needs a sum and a count of each: {len(sums)} sums, {total} items")
    mean = math.fsum(sums) / total
    groups = len(sums)
    if groups < 2:
        return mean, None
    squares = math.fsum((value - mean * count) ** 2 for value, count in zip(sums, counts, strict=True))
    return mean, math.sqrt(groups / (groups - 1) * squares) / total


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Return an unbiased estimate of the probability that one of ``k`` completions of a problem is correct, when
    ``correct`` of ``samples`` were: 1 - C(n-c, k) / C(n, k) (Chen et al., arXiv 2107.03374, equation 1).

    Raises `ValueError` unless 1 <= ``k`` <= ``samples`` and 0 <= ``correct`` <= ``samples``.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} needs 1 <= k <= samples, and there are {samples} samples")
    if not 0 <= correct <= samples:
        raise ValueError(f"{correct} correct of {samples} samples")
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def mean_pass_at_k(correct: Sequence[int], samples: int, k: int, seed: int = 0) -> Estimate:
    """Return pass@``k`` averaged over problems, of which ``correct`` has the number of correct ones among ``samples``
    completions each. Completions of one problem depend on each other, so whole problems are resampled; a single
    completion per problem is a plain share."""
    if samples == 1:
        return wilson(sum(correct), len(correct))
    return bootstrap_mean([pass_at_k(samples, c, k) for c in correct], seed)


def bootstrap_mean(values: Sequence[float], seed: int = 0) -> Estimate:
    """Return the mean of one value per problem with the percentile bootstrap interval over problems (Efron, 1979).

    Where all values are 0, or all are 1, every resample is the same; the interval is then Wilson's.

    Raises `ValueError` for an empty sequence.
    """
    data = np.asarray(values, dtype=np.float64)
    if data.size == 0:
        raise ValueError("no values to average")
    if (data == data[0]).all() and data[0] in (0.0, 1.0):
        return wilson(int(data.sum()), data.size)
    return _bootstrap(data, seed, "bootstrap over problems", lowest=0.0)


def paired_share_difference(first: Sequence[bool], second: Sequence[bool]) -> tuple[Estimate, int, int]:
    """Return the accuracy of ``first`` less that of ``second`` on the same problems, and how many each of the two alone
    solves, for [`mcnemar`].

    The interval is that of Bonett and Price (J. Educ. Behav. Stat. 37, 2012, equation 4): Wald's after one more problem
    of each kind of disagreement, which keeps its coverage when few problems disagree.

    Raises `ValueError` for sequences that are empty or of different length.
    """
    n = _paired(first, second)
    only_first = sum(a and not b for a, b in zip(first, second, strict=True))
    only_second = sum(b and not a for a, b in zip(first, second, strict=True))
    p12 = (only_first + 1) / (n + 2)
    p21 = (only_second + 1) / (n + 2)
    half = Z_975 * math.sqrt((p12 + p21 - (p12 - p21) ** 2) / (n + 2))
    low = max(-1.0, p12 - p21 - half)
    high = min(1.0, p12 - p21 + half)
    return Estimate((only_first - only_second) / n, low, high, n, "Bonett-Price"), only_first, only_second


def mcnemar(only_first: int, only_second: int) -> float:
    """Return the two-sided p-value of the exact McNemar test: so many problems that only one of two models solves, or
    more, fall on one side by chance (binomial with probability 1/2)."""
    discordant = only_first + only_second
    if discordant == 0:
        return 1.0
    return float(stats.binomtest(only_first, discordant).pvalue)


def paired_mean_difference(first: Sequence[float], second: Sequence[float], seed: int = 0) -> Estimate:
    """Return the mean of ``first`` less that of ``second``, one value per problem, with the bootstrap interval over
    problems. Where no problem differs, every resample is the same; the interval is then that of shares without
    disagreement.

    Raises `ValueError` for sequences that are empty or of different length.
    """
    n = _paired(first, second)
    data = np.asarray(first, dtype=np.float64) - np.asarray(second, dtype=np.float64)
    if not data.any():
        return paired_share_difference([True] * n, [True] * n)[0]
    return _bootstrap(data, seed, "paired bootstrap over problems", lowest=-1.0)


def _bootstrap(data: np.ndarray, seed: int, method: str, lowest: float) -> Estimate:
    """Return the mean with its percentile bootstrap interval; with all that is possible for a single value."""
    if data.size == 1:
        return Estimate(float(data[0]), lowest, 1.0, 1, method)
    resampled = stats.bootstrap(
        (data,), np.mean, n_resamples=10_000, batch=500, confidence_level=CONFIDENCE, method="percentile", rng=seed
    )
    low, high = resampled.confidence_interval
    return Estimate(float(data.mean()), float(low), float(high), data.size, method)


def _paired(first: Sequence, second: Sequence) -> int:
    if len(first) == 0 or len(first) != len(second):
        raise ValueError(f"a paired difference needs the same problems twice, got {len(first)} and {len(second)}")
    return len(first)
