# SPDX-License-Identifier: Apache-2.0
"""Free-form mathematical answers (MATH-500 and the like), compared by math-verify, which is an optional dependency.

Two ways to read an answer, as in `rewards.py`:

* *boxed*: the content of the last ``\\boxed{...}``.
* *flexible*: that, or without one whatever math-verify takes for the final answer: the last formula or number.

It imports nothing of this package, so that the metric in `recipes/metrics/math_answer` can carry it.
"""

from __future__ import annotations

import functools
import importlib.util
import threading
from typing import Any


__all__ = ["check_math_answer", "extract_boxed", "is_boxed_correct", "is_math_correct"]

_SECONDS = 5


def extract_boxed(text: str) -> str | None:
    """The content of the last ``\\boxed{...}`` of ``text``, or None when there is none or its braces are not closed, as
    in a truncated completion."""
    _, marker, tail = text.rpartition("\\boxed{")
    depth, escaped = 1, False
    for end, character in enumerate(tail if marker else ""):
        if escaped or character == "\\":
            escaped = not escaped
            continue
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return tail[:end]
    return None


def check_math_answer(answer: str) -> None:
    """Raise `ValueError` for a gold answer that math-verify reads nothing in, against which all would be wrong."""
    if not _gold(answer):
        raise ValueError(f"math-verify finds no answer in {answer!r:.80}")


def is_boxed_correct(completion: str, answer: str) -> bool:
    """Whether the content of the last ``\\boxed{...}`` of ``completion`` is mathematically equal to ``answer`` (LaTeX
    or plain text).

    Raises:
        ModuleNotFoundError: math-verify is not installed.
        ValueError: there is nothing to read in ``answer``.
    """
    check_math_answer(answer)
    boxed = extract_boxed(completion)
    return boxed is not None and _equal(answer, f"\\boxed{{{boxed}}}")


def is_math_correct(completion: str, answer: str) -> bool:
    """Whether the final answer of ``completion``, boxed or not, is mathematically equal to ``answer``. Errors as
    `is_boxed_correct`."""
    check_math_answer(answer)
    boxed = extract_boxed(completion)
    return _equal(answer, completion if boxed is None else f"\\boxed{{{boxed}}}")


def _equal(answer: str, text: str) -> bool:
    found = _parse(text)
    return bool(found) and bool(_library().verify(list(_gold(answer)), found, timeout_seconds=_limit()))


@functools.lru_cache(maxsize=4096)
def _gold(answer: str) -> tuple[Any, ...]:
    return tuple(_parse(f"\\boxed{{{answer}}}"))


def _parse(text: str) -> list[Any]:
    return _library().parse(text, parsing_timeout=_limit())


def _limit() -> int | None:
    """Seconds for one formula. math-verify interrupts itself by a signal, which the main thread alone can receive."""
    return _SECONDS if threading.current_thread() is threading.main_thread() else None


def _library() -> Any:
    if importlib.util.find_spec("math_verify") is None:
        raise ModuleNotFoundError(
            "free-form mathematical answers are compared by math-verify, which is not installed: "
            "pip install 'hf-mxfp4[eval]', or pip install 'math-verify[antlr4_13_2]'"
        )
    import math_verify

    return math_verify
