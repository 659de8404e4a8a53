# SPDX-License-Identifier: Apache-2.0
"""What measured statistics say, in sentences: which scheme has the least error, and how its components are related."""

import math
from collections.abc import Iterable, Mapping

from ..errors.schemes import bits_per_element, parse_scheme
from ..errors.statistics import ErrorStatistics


#: Energies of the components that sum to more than so many times the energy of the error nearly cancel.
_CANCEL = 20.0
#: Cosines below this are rounding of the sums, not correlation.
_EXACT = 1e-9
#: What the ranking by error does not say.
SQNR_NOTE = (
    "SQNR does not rank schemes by the perplexity of the model: between schemes of about the same bits let that "
    "decide (hf-mxfp4 eval), or the accuracy on your task (recipes/evaluate.py)."
)


def least_error(by_scheme: Mapping[str, ErrorStatistics]) -> str:
    """One sentence: the scheme of least error, among those of each number of bits; empty where there is no error to
    compare."""
    groups: dict[str, list[tuple[str, ErrorStatistics]]] = {}
    for scheme, statistics in by_scheme.items():
        if statistics.total > 0:
            groups.setdefault(bits_text(scheme), []).append((scheme, statistics))
    parts = []
    for bits, members in sorted(groups.items(), key=lambda item: float(item[0])):
        members.sort(key=lambda item: -item[1].sqnr_db)
        (best, statistics), *others = members
        next_best = f", next is {others[0][0]} with {others[0][1].sqnr_db:.2f}" if others else ""
        parts.append(f"at {bits} bits an element {best} (SQNR {statistics.sqnr_db:.2f} dB{next_best})")
    return f"Verdict, least error: {'; '.join(parts)}." if parts else ""


def bits_text(scheme: str) -> str:
    """Bits of an element under a scheme in its string form, with two decimals."""
    return f"{bits_per_element(parse_scheme(scheme)):.2f}"


def statements(by_scheme: Mapping[str, ErrorStatistics]) -> list[str]:
    """Sentences on the angles between the error components and on what the schemes share, from the numbers alone."""
    return [*_deadzone_angles(by_scheme), *_grid_angles(by_scheme), *_common_grid_noise(by_scheme)]


def _deadzone_angles(by_scheme: Mapping[str, ErrorStatistics]) -> list[str]:
    cosines = {scheme: statistics.paper_cosines["scale_bias/deadzone"] for scheme, statistics in by_scheme.items()}
    none = [scheme for scheme, cosine in cosines.items() if math.isnan(cosine)]
    exact = [scheme for scheme, cosine in cosines.items() if abs(cosine) < _EXACT]
    tilted = [f"{scheme} (cosine {cosine:+.4f})" for scheme, cosine in cosines.items() if abs(cosine) >= _EXACT]
    sentences = []
    if exact:
        sentences.append(
            f"Scale bias and deadzone truncation are exactly orthogonal under {_listed(exact)}: whatever lies in the "
            "deadzone of the ideal scale is zero there too."
        )
    if tilted:
        sentences.append(
            f"Scale bias and deadzone truncation are not orthogonal under {_listed(tilted)}: some elements in the "
            "deadzone of the ideal scale survive there."
        )
    if none:
        sentences.append(
            f"Under {_listed(none)} scale bias or deadzone error is zero throughout, so no angle is defined."
        )
    return sentences


def _grid_angles(by_scheme: Mapping[str, ErrorStatistics]) -> list[str]:
    known = {k: s for k, s in by_scheme.items() if not math.isnan(s.paper_cosines["scale_bias/grid"])}
    cancelling = [scheme for scheme, s in known.items() if sum(s.energy_ratio.values()) > _CANCEL]
    sentences = []
    if cancelling:
        sentences.append(
            f"Under {_listed(cancelling)} the three components nearly cancel each other, since a residual is added "
            "back: their shares of the error that is left say little; compare SQNR."
        )
    known = [s for scheme, s in known.items() if scheme not in cancelling]
    if not known:
        return sentences
    cosines = _range((s.paper_cosines["scale_bias/grid"] for s in known), "+.2f")
    sums = _range((sum(s.energy_ratio.values()) for s in known), ".2f")
    return [
        *sentences,
        f"Scale bias and grid noise have cosine {cosines}, so the three energies sum to {sums} times the error's.",
    ]


def _common_grid_noise(by_scheme: Mapping[str, ErrorStatistics]) -> list[str]:
    """Grid noise is that of the ideal scale: schemes with the same blocks share it, to the last bits of the sums."""
    found = list(by_scheme.values())
    if len(found) < 2 or not found[0].grid or not all(math.isclose(s.grid, found[0].grid, rel_tol=1e-9) for s in found):
        return []
    share = 100 * found[0].grid / found[0].energy
    return [
        f"The energy of grid noise is the same under all {len(found)} schemes, {share:.4f} % of the tensors'; its "
        "share of the error differs because the error does."
    ]


def _range(values: Iterable[float], form: str) -> str:
    texts = [format(value, form) for value in sorted(values)]
    return texts[0] if texts[0] == texts[-1] else f"{texts[0]} to {texts[-1]}"


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
