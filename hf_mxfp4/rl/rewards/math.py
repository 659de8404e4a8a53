# SPDX-License-Identifier: Apache-2.0
"""Free-form mathematical answers (MATH-500 and the like), compared by math-verify, which is an optional dependency.

Two ways to read an answer, as in `numbers.py`:

* *boxed*: the content of the last ``\\boxed{...}``.
* *flexible*: that, or without one whatever math-verify takes for the final answer: the last formula or number.

math-verify stops a comparison that takes longer than 5 seconds, in the main thread alone.

This file imports nothing of this package, so that the metric in `recipes/metrics/math_answer` can carry it.
"""

from __future__ import annotations

import functools
import logging
import threading


__all__ = ["check_math_answer", "extract_boxed", "is_boxed_correct", "is_math_correct"]

#: Seconds for one answer.
ANSWER_SECONDS = 5


def extract_boxed(text: str) -> str | None:
    """Return the content of the last ``\\boxed{...}`` of ``text``, or None when there is none or its braces are not
    closed, as in a truncated completion."""
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
    if not _read_gold(answer):
        raise ValueError(f"math-verify finds no answer in {answer!r:.80}")


def is_boxed_correct(completion: str, answer: str) -> bool:
    """Return whether the content of the last ``\\boxed{...}`` of ``completion`` is mathematically equal to ``answer``
    (LaTeX or plain text). A comparison that takes longer than 5 seconds counts as wrong.

    Raises:
        ModuleNotFoundError: math-verify is not installed.
        ValueError: there is nothing to read in ``answer``.
    """
    boxed = extract_boxed(completion)
    check_math_answer(answer)
    return boxed is not None and _is_equal(f"\\boxed{{{boxed}}}", answer)


def is_math_correct(completion: str, answer: str) -> bool:
    """Return whether the final answer of ``completion``, boxed or not, is mathematically equal to ``answer``. Limits
    and errors as those of `is_boxed_correct`."""
    boxed = extract_boxed(completion)
    check_math_answer(answer)
    return _is_equal(completion if boxed is None else f"\\boxed{{{boxed}}}", answer)


def _is_equal(text: str, answer: str) -> bool:
    from math_verify import verify

    try:
        return bool(verify(_read_gold(answer), _parse(text), timeout_seconds=_seconds()))
    except Exception:  # what the parser and sympy raise of a text; it equals nothing
        return False


@functools.lru_cache(maxsize=4096)
def _read_gold(answer: str) -> list:
    return _parse(f"\\boxed{{{answer}}}")


def _parse(text: str) -> list:
    try:
        from math_verify import parse
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "free-form mathematical answers are compared by math-verify, which is not installed: "
            "pip install 'hf-mxfp4[eval]', or pip install 'math-verify[antlr4_13_2]'"
        ) from error
    return parse(text, parsing_timeout=_seconds())


def _seconds() -> int | None:
    """The time limit, which math-verify keeps by a signal; none in other threads, without its warnings of that."""
    if threading.current_thread() is threading.main_thread():
        return ANSWER_SECONDS
    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return None
