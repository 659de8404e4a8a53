# SPDX-License-Identifier: Apache-2.0
"""What to say of a name that does not exist."""

import difflib
from collections.abc import Sequence


def unknown_key_message(owner: str, key: str, known: list[str]) -> str:
    """`"<owner> has no option 'key'"`, with the closest known names when there are any."""
    close = difflib.get_close_matches(key, known, n=2)
    if close:
        return f"{owner} has no option {key!r}; did you mean {' or '.join(map(repr, close))}?"
    return f"{owner} has no option {key!r}" + (f"; options are {', '.join(known)}" if len(known) < 30 else "")


def nearest_names(name: str, known: Sequence[str]) -> list[str]:
    """At most three names that a misspelled one may have meant, given the full dotted names ``known``: the ends of
    these, which names of layers mostly are, as long as the name and one part longer; else, full names."""
    length = name.count(".") + 1
    runs: dict[str, None] = {}
    for full in known:
        parts = full.split(".")
        for size in (length, length + 1):
            runs |= dict.fromkeys(".".join(parts[i : i + size]) for i in range(len(parts) - size + 1))
    return difflib.get_close_matches(name, list(runs), n=3, cutoff=0.5) or list(known[:3])
