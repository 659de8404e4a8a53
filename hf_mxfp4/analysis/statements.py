# SPDX-License-Identifier: Apache-2.0
"""What measured statistics say, in sentences: where the components are orthogonal, and what a correction changed."""

import math
from collections.abc import Mapping

from .statistics import ErrorStatistics


#: Cosines below this are rounding of the sums, not correlation.
_EXACT = 1e-9


def orthogonality(scheme: str, statistics: ErrorStatistics) -> list[str]:
    """Sentences on the pairwise angles of the error components under one scheme, from the numbers alone."""
    cosine = statistics.paper_cosines["scale_bias/deadzone"]
    sentences = []
    if math.isnan(cosine):
        sentences.append(f"{scheme}: scale bias or deadzone error is zero throughout, so no angle is defined.")
    elif abs(cosine) < _EXACT:
        sentences.append(
            f"{scheme}: scale bias and deadzone truncation are exactly orthogonal (cosine 0): whatever lies in the "
            "deadzone of the ideal scale is zero under this scheme's scales too."
        )
    else:
        sentences.append(
            f"{scheme}: scale bias and deadzone truncation are not orthogonal (cosine {cosine:+.4f}): some elements in "
            "the deadzone of the ideal scale survive under this scheme."
        )
    grid = statistics.paper_cosines["scale_bias/grid"]
    if not math.isnan(grid):
        total = sum(statistics.energy_ratio.values())
        sentences.append(
            f"{scheme}: scale bias and grid noise have cosine {grid:+.3f}, so the energies of the three components sum "
            f"to {total:.2f} times that of the error; deadzone and grid noise share no element and are orthogonal."
        )
    return sentences


def changes(by_scheme: Mapping[str, ErrorStatistics]) -> list[str]:
    """Sentences that set every scheme against the first one; none when there is but one."""
    items = [(scheme, statistics) for scheme, statistics in by_scheme.items() if statistics.total > 0]
    if len(items) < 2:
        return []
    base_name, base = items[0]
    sentences = []
    for scheme, statistics in items[1:]:
        sentences.append(
            f"{scheme} has {_change(statistics.total, base.total)} error energy than {base_name} "
            f"({statistics.sqnr_db - base.sqnr_db:+.2f} dB SQNR): scale bias "
            f"{_signed(statistics.scale_bias, base.scale_bias)}, "
            f"deadzone {_signed(statistics.deadzone, base.deadzone)}; grid noise, that of the ideal scale, is the same "
            "under every scheme with these blocks."
        )
    return sentences


def _change(now: float, before: float) -> str:
    percent = 100.0 * (now / before - 1.0)
    return f"{abs(percent):.1f} % {'less' if percent <= 0 else 'more'}"


def _signed(now: float, before: float) -> str:
    return f"{100.0 * (now / before - 1.0):+.1f} %" if before else "from zero"
