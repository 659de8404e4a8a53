# SPDX-License-Identifier: Apache-2.0
"""Estimates of accuracy and pass@k, their confidence intervals, and paired differences."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist

import numpy as np

from hf_mxfp4.stats import CONFIDENCE, wilson_interval


_RESAMPLES = 10_000
#: Resamples whose indices are held in memory at a time.
_CHUNK = 500


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


def wilson(correct: int, n: int, confidence: float = CONFIDENCE) -> Estimate:
    """The share ``correct / n`` with Wilson's score interval (JASA 22, 1927), which stays within 0 and 1 and has a
    width also when none or all are correct.

    Raises `ValueError` unless 0 <= ``correct`` <= ``n`` and ``n`` >= 1.
    """
    low, high = wilson_interval(correct, n, confidence)
    return Estimate(correct / n, low, high, n, "Wilson", confidence)


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Unbiased estimate of the probability that one of ``k`` completions of a problem is correct, when ``correct`` of
    ``samples`` were: 1 - C(n-c, k) / C(n, k) (Chen et al., arXiv 2107.03374, equation 1).

    Raises `ValueError` unless 1 <= ``k`` <= ``samples`` and 0 <= ``correct`` <= ``samples``.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} needs 1 <= k <= samples, and there are {samples} samples")
    if not 0 <= correct <= samples:
        raise ValueError(f"{correct} correct of {samples} samples")
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def mean_pass_at_k(correct: Sequence[int], samples: int, k: int, seed: int = 0) -> Estimate:
    """pass@``k`` averaged over problems, of which ``correct`` has the number of correct ones among ``samples``
    completions each. Completions of one problem depend on each other, so whole problems are resampled; a single
    completion per problem is a plain share."""
    if samples == 1:
        return wilson(sum(correct), len(correct))
    return bootstrap_mean([pass_at_k(samples, c, k) for c in correct], seed)


def bootstrap_mean(values: Sequence[float], seed: int = 0, confidence: float = CONFIDENCE) -> Estimate:
    """The mean of one value per problem with the percentile bootstrap interval over problems (Efron, 1979).

    Where all values are 0, or all are 1, every resample is the same; the interval is then Wilson's.

    Raises `ValueError` for an empty sequence.
    """
    data = np.asarray(values, dtype=np.float64)
    if data.size == 0:
        raise ValueError("no values to average")
    if (data == data[0]).all() and data[0] in (0.0, 1.0):
        return wilson(int(data.sum()), data.size, confidence)
    low, high = _bootstrap_interval(data, seed, confidence)
    return Estimate(float(data.mean()), low, high, data.size, "bootstrap over problems", confidence)


def _bootstrap_interval(data: np.ndarray, seed: int, confidence: float) -> tuple[float, float]:
    rng = np.random.default_rng(seed)
    means = [data[rng.integers(data.size, size=(_CHUNK, data.size))].mean(axis=1) for _ in range(_RESAMPLES // _CHUNK)]
    low, high = np.quantile(np.concatenate(means), [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def paired_share_difference(
    first: Sequence[bool], second: Sequence[bool], confidence: float = CONFIDENCE
) -> tuple[Estimate, float]:
    """The accuracy of ``first`` less that of ``second`` on the same problems, and the two-sided p-value of McNemar's
    exact test that both are equally good.

    The interval is that of Bonett and Price (J. Educ. Behav. Stat. 37, 2012, equation 4): Wald's after one more problem
    of each kind of disagreement, which keeps its coverage when few problems disagree.

    Raises `ValueError` for sequences that are empty or of different length.
    """
    n = len(first)
    if n == 0 or n != len(second):
        raise ValueError(f"a paired difference needs the same problems twice, got {n} and {len(second)}")
    only_first = sum(a and not b for a, b in zip(first, second, strict=True))
    only_second = sum(b and not a for a, b in zip(first, second, strict=True))
    p12, p21 = (only_first + 1) / (n + 2), (only_second + 1) / (n + 2)
    half = NormalDist().inv_cdf((1 + confidence) / 2) * math.sqrt((p12 + p21 - (p12 - p21) ** 2) / (n + 2))
    low, high = max(-1.0, p12 - p21 - half), min(1.0, p12 - p21 + half)
    estimate = Estimate((only_first - only_second) / n, low, high, n, "Bonett-Price", confidence)
    return estimate, mcnemar(only_first, only_second)


def mcnemar(only_first: int, only_second: int) -> float:
    """Two-sided p-value of the exact McNemar test: so many problems that only one of two models solves, or more, fall
    on one side by chance (binomial with probability 1/2)."""
    discordant, fewer = only_first + only_second, min(only_first, only_second)
    tail = sum(math.comb(discordant, i) for i in range(fewer + 1))
    # Integers as long as they can be: 2 ** discordant overflows a float from 1024 problems on.
    return min(1.0, 2 * tail / 2**discordant)


def paired_mean_difference(
    first: Sequence[float], second: Sequence[float], seed: int = 0, confidence: float = CONFIDENCE
) -> Estimate:
    """The mean of ``first`` less that of ``second``, one value per problem, with the bootstrap interval over problems.

    Where no problem differs, every resample is the same; the interval is then that of shares without disagreement.

    Raises `ValueError` for sequences that are empty or of different length.
    """
    if len(first) == 0 or len(first) != len(second):
        raise ValueError(f"a paired difference needs the same problems twice, got {len(first)} and {len(second)}")
    data = np.asarray(first, dtype=np.float64) - np.asarray(second, dtype=np.float64)
    if not data.any():
        return paired_share_difference([True] * data.size, [True] * data.size, confidence)[0]
    low, high = _bootstrap_interval(data, seed, confidence)
    return Estimate(float(data.mean()), low, high, data.size, "paired bootstrap over problems", confidence)
