# SPDX-License-Identifier: Apache-2.0
"""One finding about the health of a training run, and its state."""

from dataclasses import dataclass


#: From worst to best; "none": there is nothing to judge.
STATES = ("red", "amber", "green", "none")
#: What a report calls them.
STATE_WORDS = {"red": "BAD", "amber": "LOOK", "green": "OK", "none": "–"}


@dataclass(frozen=True)
class Check:
    """One finding: its state (see [`STATES`]), what was looked at, what was found, and what to do about it."""

    state: str
    title: str
    finding: str
    advice: str = ""


def graded(title: str, finding: str, value: float, limits: tuple[float, float], advice: str) -> Check:
    """A check that is amber from the first limit on and red from the second; limits that fall are reached from above.
    Advice is given unless it is green."""
    amber, red = limits if limits[0] <= limits[1] else (-limits[0], -limits[1])
    value = value if limits[0] <= limits[1] else -value
    state = "red" if value >= red else "amber" if value >= amber else "green"
    return Check(state, title, finding, "" if state == "green" else advice)
