# SPDX-License-Identifier: Apache-2.0
"""Verifiable rewards: GSM8K-style number extraction and exact match; and a guard around any reward function.

Two ways to read an answer: *strict*, the number that follows the last ``####`` (the format of GSM8K's reference
solutions), and *flexible*, the last number of the text. Numbers are compared as exact decimals. The ``*_reward``
functions are called by TRL's trainers; the ``is_*`` predicates are the same tests for one completion.
"""

import contextlib
import functools
import inspect
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from .math_answers import are_math_correct


ANSWER_MARKER = "####"

# Unicode characters used as a minus sign: hyphens, en dash, minus sign, small and full-width hyphen-minus.
_MINUS = str.maketrans(dict.fromkeys("\u2010\u2011\u2013\u2212\ufe63\uff0d", "-"))
_CURRENCY = r"(?:\\?\$|[\u20ac\u00a3\u00a5])"
# 1,234,567 or 1234567, either with decimals; or .5 (where the point does not end a word or a number).
_UNSIGNED = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![\w.])\.[0-9]+"
# The sign may stand before or after the currency symbol. "3-5" is a range or a subtraction, not the number -5.
_NUMBER = rf"(?P<sign>(?<![^\W_])(?<![)\]}}%.])[-+])?(?:{_CURRENCY}[ ]?)?(?P<digits>{_UNSIGNED})"
_FLEXIBLE = re.compile(_NUMBER)
# What may stand between the marker and the number: blanks, bold or italics, math delimiters, \boxed{. And the number
# must be whole: "1,2345" or "1.2.3" is none.
_STRICT = re.compile(rf"(?:[ \t*_]|\\[(\[]|\\boxed\{{|\\?\$)*{_NUMBER}(?![0-9]|[.,][0-9])")
_LATEX_GROUPING = re.compile(r"(?<=[0-9])(?:\{,\}|\\,|\\!,|,\\!)(?=[0-9]{3})")
_PLAIN = re.compile(r"(?P<sign>[+-]?)(?P<whole>[0-9]*)(?:\.(?P<fraction>[0-9]*))?")
_STRIPPED = re.compile(r"[\s,%\u20ac\u00a3\u00a5]|\\?\$")


def _require_str(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{what} must be a str, got {type(value).__name__}: {value!r:.80}")
    return value


def _prepare(text: str) -> str:
    """Return a text with plain minus signs, and with plain commas between thousands."""
    text = _require_str(text, "the text to extract an answer from")
    return _LATEX_GROUPING.sub(",", text.translate(_MINUS))


def _canonical(match: re.Match[str] | None) -> str | None:
    """Return the number that `_NUMBER` matched in canonical form."""
    if match is None:
        return None
    return normalize_number((match["sign"] or "") + match["digits"])


def normalize_number(s: str) -> str:
    """Return the canonical decimal string of a number: ``"$1,234.50" -> "1234.5"``, ``"+7." -> "7"``, ``"-0" -> "0"``.

    Currency symbols, thousands commas, percent signs (the value is not divided by 100) and white space are dropped.
    Exact for any number of digits. Raises `TypeError` for other than a str, and `ValueError` for one that is not one
    decimal number (no exponents, no fractions).
    """
    text = _STRIPPED.sub("", _require_str(s, "a number").translate(_MINUS))
    match = _PLAIN.fullmatch(text)
    if match is None or not (match["whole"] or match["fraction"]):
        raise ValueError(f"not a decimal number: {s!r:.80}")
    whole = match["whole"].lstrip("0") or "0"
    fraction = match["fraction"] or ""
    magnitude = f"{whole}.{fraction}".rstrip("0").rstrip(".")
    if match["sign"] == "-" and magnitude != "0":
        return f"-{magnitude}"
    return magnitude


def extract_strict(text: str) -> str | None:
    r"""Return the number after the last ``####`` of `text`, in canonical form, or None: ``"#### 1,234" -> "1234"``.

    Between the marker and the number only blanks, a currency symbol, a sign, emphasis (``**18**``) or ``\boxed{`` may
    be, on the same line; what follows the number is ignored. Raises `TypeError` for other than a str.
    """
    _, marker, tail = _prepare(text).rpartition(ANSWER_MARKER)
    if not marker:
        return None
    return _canonical(_STRICT.match(tail))


def extract_flexible(text: str) -> str | None:
    r"""Return the last number anywhere in `text`, in canonical form, or None if there is no digit in it.

    Understands ``$``, thousands commas (also LaTeX ``{,}``), ``%``, decimals, ``\boxed{..}`` and negatives (``-5``,
    ``$-5``, ``-$5``, Unicode minus). A minus that directly follows a letter, a digit or a closing bracket separates two
    numbers (``3-5`` ends in 5). Raises `TypeError` for other than a str.
    """
    last = None
    for match in _FLEXIBLE.finditer(_prepare(text)):
        last = match
    return _canonical(last)


def gsm8k_gold(answer_text: str) -> str:
    """Return the gold answer of a GSM8K reference solution, read strictly. Raises `ValueError` for none."""
    gold = extract_strict(answer_text)
    if gold is None:
        raise ValueError(f"no '#### <number>' in the reference solution {answer_text!r}")
    return gold


def _equal(extracted: str | None, answer: str) -> bool:
    """Return whether a number in canonical form equals a gold answer in any form."""
    return extracted == normalize_number(_require_str(answer, "a gold answer"))


def is_strict_correct(completion: str, answer: str) -> bool:
    """Return whether the number after the last ``####`` of `completion` equals `answer` (exact decimals). Raises
    `TypeError` for other than a str, and `ValueError` for an answer that is no number."""
    return _equal(extract_strict(completion), answer)


def is_flexible_correct(completion: str, answer: str) -> bool:
    """Return whether the last number of `completion` equals `answer`. Errors as `is_strict_correct`."""
    return _equal(extract_flexible(completion), answer)


def is_exact_match(completion: str, answer: str) -> bool:
    """Return whether `completion` is `answer` up to white space around it. Raises `TypeError` for other than a str."""
    return _require_str(completion, "a completion").strip() == _require_str(answer, "a gold answer").strip()


def _text(completion: Any) -> str:
    """Return the text of a completion: a str, or the content of the last assistant message of a conversation."""
    if isinstance(completion, str):
        return completion
    if not isinstance(completion, Sequence) or not all(isinstance(message, dict) for message in completion):
        raise TypeError(
            f"a completion must be a str or a list of message dicts, got {type(completion).__name__}: "
            f"{completion!r:.80}"
        )
    for message in reversed(completion):
        if message.get("role", "assistant") == "assistant":
            content = message.get("content")
            if content is None:  # a message that only calls tools
                return ""
            if isinstance(content, list):  # content parts
                return "".join(part.get("text") or "" for part in content if part.get("type", "text") == "text")
            return _require_str(content, "the content of a message")
    return ""


def rewards_of(check: Callable[[str, str], float], completions: Sequence[Any], answer: Sequence[str]) -> list[float]:
    """Return what ``check`` says of each completion, as a number: 1.0 if it is right, else 0.0.

    Args:
        check: called with the text of a completion and its answer.
        completions: n texts, or n conversations ``[{"role": "assistant", "content": ...}]``.
        answer: n gold answers.

    Raises `TypeError` for a str in place of a list, or a completion that is neither; `ValueError` for other lengths.
    """
    return [float(check(text, gold)) for text, gold in zip(_texts(completions, answer), answer, strict=True)]


def _texts(completions: Sequence[Any], answer: Sequence[str]) -> list[str]:
    """Return the texts of completions; errors are those of `rewards_of`."""
    if isinstance(completions, str) or isinstance(answer, str):
        raise TypeError("completions and answer must be lists with one entry per completion, not a str")
    if len(completions) != len(answer):
        raise ValueError(f"{len(completions)} completions but {len(answer)} answers: one gold answer per completion")
    return [_text(completion) for completion in completions]


def gsm8k_strict_reward(completions: Sequence[Any], answer: Sequence[str], **kwargs: Any) -> list[float]:
    """1.0 where the number after the last ``####`` is the gold answer (the dataset column ``answer``), else 0.0. Errors
    are those of `rewards_of`, and `ValueError` for a gold answer that is not a number."""
    return rewards_of(is_strict_correct, completions, answer)


def gsm8k_flexible_reward(completions: Sequence[Any], answer: Sequence[str], **kwargs: Any) -> list[float]:
    """1.0 where the last number of the completion is the gold answer, else 0.0; as `gsm8k_strict_reward`."""
    return rewards_of(is_flexible_correct, completions, answer)


def exact_match_reward(completions: Sequence[Any], answer: Sequence[str], **kwargs: Any) -> list[float]:
    """1.0 where the stripped completion is the gold string, else 0.0; as `gsm8k_strict_reward`."""
    return rewards_of(is_exact_match, completions, answer)


def math_reward(completions: Sequence[Any], answer: Sequence[str], **kwargs: Any) -> list[float]:
    """1.0 where the final answer of the completion, boxed or not, is mathematically equal to the gold answer (LaTeX or
    text), else 0.0. All comparisons that take longer than half a second share 5 seconds; those that do not end count as
    wrong. Raises `ModuleNotFoundError` without math-verify (the extra ``eval``)."""
    return [float(verdict) for verdict in are_math_correct(_texts(completions, answer), answer)]


# ---- a guard around reward functions ------------------------------------------------------------------------------


class RewardError(RuntimeError):
    """A reward function raised, or returned something that is no reward. The message names the function."""


def guard_reward(function: Any, name: str | None = None) -> Any:
    """Wrap a reward function so that its failures become [`RewardError`]; its name, unless ``name`` is given, and its
    signature stay. Reward models and their names are returned as they are. A function may return `None` for a
    completion, but not NaN."""
    if isinstance(function, (str, nn.Module)) or not callable(function):
        return function
    inner = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    name = name or getattr(inner, "__name__", type(inner).__name__)

    @functools.wraps(function)
    def guarded(*args, **kwargs):
        with _named(name):
            rewards = function(*args, **kwargs)
        return _checked(rewards, name, kwargs.get("completions"))

    @functools.wraps(function)
    async def guarded_async(*args, **kwargs):
        with _named(name):
            rewards = await function(*args, **kwargs)
        return _checked(rewards, name, kwargs.get("completions"))

    # TRL awaits reward functions that are coroutines, and asks the function itself whether it is one.
    wrapped = guarded
    if inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(type(inner).__call__):
        wrapped = guarded_async
    wrapped.__name__ = name
    return wrapped


@contextlib.contextmanager
def _named(name: str) -> Iterator[None]:
    """Turn errors into [`RewardError`] with the name of the reward function."""
    try:
        yield
    except Exception as error:
        raise RewardError(f"reward function {name!r} raised {type(error).__name__}: {error}") from error


def _checked(rewards: Any, name: str, completions: list | None) -> list[float | None]:
    """Return rewards as floats; raise [`RewardError`] for what is no list of finite float32 numbers."""
    try:
        rewards = [None if reward is None else _as_float(reward) for reward in rewards]
    except (TypeError, ValueError) as error:
        raise RewardError(
            f"reward function {name!r} must return one number (or None) per completion, got {rewards!r:.200}"
        ) from error
    for index, reward in enumerate(rewards):
        # Rewards become float32 tensors, in which larger numbers are infinite.
        if reward is not None and not abs(reward) <= torch.finfo(torch.float32).max:
            completion = "unknown"
            if completions and index < len(completions):
                completion = repr(completions[index])[:200]
            raise RewardError(
                f"reward function {name!r} returned {reward}, which is no finite float32 number, for completion "
                f"{index}: {completion}"
            )
    return rewards


def _as_float(reward: Any) -> float:
    try:
        return float(reward)
    except OverflowError:  # an integer
        return math.inf if reward > 0 else -math.inf
