# SPDX-License-Identifier: Apache-2.0
"""Confidence intervals of shares, such as accuracies, and of their differences: with a width also when none or all of
few problems are solved."""

import math
from collections.abc import Sequence
from statistics import NormalDist


CONFIDENCE = 0.95


def wilson_interval(correct: int, n: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Wilson's score interval of ``correct / n`` (JASA 22, 1927), which stays within 0 and 1.

    Raises `ValueError` unless 0 <= ``correct`` <= ``n`` and ``n`` >= 1.
    """
    if not 0 <= correct <= n or n < 1:
        raise ValueError(f"a share needs 0 <= correct <= n and n >= 1, got {correct} of {n}")
    z, p = NormalDist().inv_cdf((1 + confidence) / 2), correct / n
    center = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    # The ends are exactly 0 and 1 there; rounding errors are not.
    return 0.0 if correct == 0 else center - half, 1.0 if correct == n else center + half


def difference_interval(
    first: tuple[int, int], second: tuple[int, int], confidence: float = CONFIDENCE
) -> tuple[float, float]:
    """The interval of the share ``second`` less the share ``first``, each ``(correct, n)``, as of independent problems:
    made of the two Wilson intervals (Newcombe, Statistics in Medicine 17, 1998, method 10)."""
    (low1, high1), (low2, high2) = (wilson_interval(*share, confidence) for share in (first, second))
    p1, p2 = first[0] / first[1], second[0] / second[1]
    low = p2 - p1 - math.hypot(p2 - low2, high1 - p1)
    return low, p2 - p1 + math.hypot(high2 - p2, p1 - low1)


def share_text(accuracy: float, n: int) -> str:
    """An accuracy on ``n`` problems with its interval, as ``0.250 [0.071, 0.591]``."""
    low, high = wilson_interval(round(accuracy * n), n)
    return f"{accuracy:.3f} [{low:.3f}, {high:.3f}]"


def means_with_interval(values: Sequence[float]) -> tuple[float, float, float] | None:
    """Mean of the first and of the last fifth of ``values`` (three at least), and the half width of the 95 % interval
    of their difference, from the scatter within each; `None` for fewer than 6 values."""
    if len(values) < 6:
        return None
    width = max(3, len(values) // 5)
    ends = (values[:width], values[-width:])
    means = [sum(part) / width for part in ends]
    variances = [sum((v - mean) ** 2 for v in part) / (width - 1) for part, mean in zip(ends, means, strict=True)]
    # Student's t of two samples of one variance; within 1 % of its tables from 4 degrees of freedom on.
    freedom = 2 * (width - 1)
    t = 1.96 + 2.4 / freedom + 3.4 / freedom**2
    return means[0], means[1], t * math.sqrt(sum(variances) / width)
