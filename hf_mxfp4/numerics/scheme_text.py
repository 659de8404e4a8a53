# SPDX-License-Identifier: Apache-2.0
"""Schemes as text: the inverse of ``str(QuantScheme)``."""

import difflib
import re

from .e8m0 import ScaleRule
from .scheme import MACRO_BLOCKS, MACRO_SEARCHES, ROUNDINGS, QuantScheme


_MACRO = re.compile(r"mbs(?P<size>[^-]+)(?:-(?P<search>.+))?")
_FALLBACK = re.compile(r"of(?P<alpha>[^@]+)(?:@(?P<rate>.+))?")
_EXAMPLE = "rceil+mbs128-static+of0.5"


def parse_scheme(text: str) -> QuantScheme:
    """The scheme that ``str(scheme)`` describes: ``"mxfp4+rceil+mbs128-static+of0.5"``, with or without ``"mxfp4+"``.

    The parts after the rule come in any order: ``mbs<size>[-<search>]`` (static when no search is named), ``of<alpha>``
    or ``of<alpha>@<share of blocks>``, ``stochastic``, ``32x32``.

    Raises `ValueError` for what cannot be read, with the nearest known spelling.
    """
    parts = [part.strip() for part in text.strip().split("+")]
    if parts[0] == "mxfp4":
        parts = parts[1:]
    if not parts or not parts[0]:
        raise ValueError(f"scheme {text!r} names no scale rule; give one first, as in {_EXAMPLE!r}")
    rules = [rule.value for rule in ScaleRule]
    if parts[0] not in rules:
        raise ValueError(f"scheme {text!r}: no scale rule {parts[0]!r}; {_nearest(parts[0], rules)}")
    options: dict = {"scale_rule": ScaleRule(parts[0])}
    for part in parts[1:]:
        for key, value in _part_options(text, part).items():
            if key in options:
                raise ValueError(f"scheme {text!r} gives {key} twice")
            options[key] = value
    try:
        return QuantScheme(**options)
    except ValueError as error:
        raise ValueError(f"scheme {text!r}: {error}") from None


def _part_options(text: str, part: str) -> dict:
    if match := _MACRO.fullmatch(part):
        size, search = match["size"], match["search"] or "static"
        sizes = [str(choice) for choice in MACRO_BLOCKS]
        if size not in sizes:
            raise ValueError(
                f"scheme {text!r}: macro blocks have {', '.join(sizes[:-1])} elements or 'row', not {size}"
            )
        if search not in MACRO_SEARCHES:
            known = list(MACRO_SEARCHES)
            raise ValueError(f"scheme {text!r}: no macro search {search!r}; {_nearest(search, known)}")
        return {"macro_block": size if size == "row" else int(size), "macro_search": search}
    if match := _FALLBACK.fullmatch(part):
        options = {"outlier_fallback": _number(text, match["alpha"])}
        if match["rate"] is not None:
            options["fallback_rate"] = _number(text, match["rate"])
        return options
    if part in ROUNDINGS:
        return {"rounding": part}
    if part in ("1x32", "32x32"):
        return {"block_rows": int(part.split("x")[0])}
    known = ["mbs128-static", "mbs128-dynamic", "mbs128-blockwise", "of0.5", "stochastic", "32x32"]
    raise ValueError(f"scheme {text!r}: {part!r} is no part of a scheme; {_nearest(part, known)}")


def _number(text: str, word: str) -> float:
    try:
        return float(word)
    except ValueError:
        raise ValueError(f"scheme {text!r}: {word!r} is not a number") from None


def _nearest(word: str, known: list[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known are {', '.join(known)}, as in {_EXAMPLE!r}"
