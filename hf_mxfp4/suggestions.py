# SPDX-License-Identifier: Apache-2.0
"""What to say of a name that does not exist."""

import difflib


def unknown_key_message(owner: str, key: str, known: list[str]) -> str:
    """`"<owner> has no option 'key'"`, with the closest known names when there are any."""
    close = difflib.get_close_matches(key, known, n=2)
    if close:
        return f"{owner} has no option {key!r}; did you mean {' or '.join(map(repr, close))}?"
    return f"{owner} has no option {key!r}" + (f"; options are {', '.join(known)}" if len(known) < 30 else "")
