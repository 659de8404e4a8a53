# SPDX-License-Identifier: Apache-2.0
"""What to say of a name that does not exist; options that say what they are."""

import dataclasses
import difflib
import functools
import textwrap
from collections.abc import Sequence
from typing import Any, TypeVar


_Class = TypeVar("_Class", bound=type)


def described_options(cls: _Class) -> _Class:
    """Make a dataclass of options refuse unknown ones with the nearest names, and list its own in its docstring, by the
    ``help`` that their fields carry. Options that are gone, named in its ``REMOVED``, may still be `None`."""
    known, removed = [option.name for option in dataclasses.fields(cls) if option.init], getattr(cls, "REMOVED", {})
    init = cls.__init__

    @functools.wraps(init)
    def __init__(self, *args: Any, **options: Any) -> None:
        for name in options:
            if name in removed and options[name] is not None:
                raise TypeError(f"{cls.__name__} no longer has the option {name!r}: {removed[name]}")
            if name not in known and name not in removed:
                raise TypeError(unknown_key_message(cls.__name__, name, known))
        init(self, *args, **{name: value for name, value in options.items() if name not in removed})

    cls.__init__ = __init__
    inherited = {name for base in cls.__bases__ for name in getattr(base, "__dataclass_fields__", {})}
    own = [option for option in dataclasses.fields(cls) if option.init and option.name not in inherited]
    lines = [_described(option) for option in own]
    cls.__doc__ = f"{cls.__doc__.rstrip()}\n\n    Args:\n" + "\n".join(lines) + "\n    "
    return cls


def _described(option: dataclasses.Field) -> str:
    kind = option.type.__name__ if type(option.type) is type else str(option.type)
    text = f"{option.name} ({kind}, default {option.default!r}): {option.metadata['help']}"
    return textwrap.fill(text, 116, initial_indent=" " * 8, subsequent_indent=" " * 12, break_on_hyphens=False)


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
