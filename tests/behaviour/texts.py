# SPDX-License-Identifier: Apache-2.0
"""Texts without what says nothing about behaviour."""

import re
from html.parser import HTMLParser
from typing import Any


#: What differs between runs and versions without a difference in behaviour, and what stands in its place.
_MASKS = (
    # Lines of progress, which are written every ten seconds.
    (re.compile(r"^.* MB (of .* MB )?\(\d+ ?%\).*\n?", re.MULTILINE), ""),
    (re.compile(r'("transformers_version": )"[^"]*"'), r'\1"VERSION"'),
    (re.compile(r"\b20\d\d-\d\d-\d\d([ T]\d\d:\d\d(:\d\d)?)?"), "DATE"),
    (re.compile(r"\b\d+(\.\d+)? ?(ms|s|seconds?|min|minutes?|h|hours?)\b"), "TIME"),
    (re.compile(r"\b\d+(\.\d+)? [kMG]?B/s"), "SPEED"),
)


def masked(text: str) -> str:
    """``text`` with words for dates, durations, speeds and the version of transformers, without lines of progress."""
    for pattern, replacement in _MASKS:
        text = pattern.sub(replacement, text)
    return text


def without_names(ptx: str) -> str:
    """PTX with numbers for the names of kernels and parameters, without comments and locations in sources."""
    ptx = re.sub(r"//.*", "", ptx)
    ptx = re.sub(r"^\s*\.(loc|file|section|b\d+)\b.*$", "", ptx, flags=re.MULTILINE)
    names = dict.fromkeys(re.findall(r"\.(?:entry|func)(?:\s*\([^)]*\))?\s+([\w$]+)", ptx))
    for number, name in enumerate(sorted(names, key=len, reverse=True)):
        ptx = re.sub(rf"\b{re.escape(name)}(?=\b|_param_\d)", f"function{number}", ptx)
    return "\n".join(line.rstrip() for line in ptx.splitlines() if line.strip())


class _Text(HTMLParser):
    """Collects what a page shows, without scripts and styles."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self._hidden = 0

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        self._hidden += tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self._hidden -= tag in ("script", "style")

    def handle_data(self, data: str) -> None:
        if not self._hidden and data.strip():
            self.parts.append(" ".join(data.split()))


def visible_text(html: str) -> str:
    """The text of a page, one line per piece, without scripts and styles."""
    parser = _Text()
    parser.feed(html)
    return "\n".join(parser.parts)
