# SPDX-License-Identifier: Apache-2.0
r"""Free-form mathematical answers (MATH-500 and the like), compared by math-verify, which is an optional dependency.

A completion such as ``\boxed{9^{9^{9^9}}}`` can keep math-verify busy for hours, so it runs in a process of its own
(this file, as a script, so it imports nothing of this package), which is killed after a time limit.
"""

import contextlib
import functools
import importlib.util
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Sequence


#: Seconds for one answer; in a batch for all that are not compared within the quick ones, so that hostile completions
#: do not hold up training.
ANSWER_SECONDS = 5.0
_QUICK_SECONDS = 0.5
_START_SECONDS = 120.0
_MEMORY_BYTES = 4 << 30


def extract_boxed(text: str) -> str | None:
    r"""Return the content of the last ``\boxed{...}`` of ``text``, or None without one or with open braces."""
    _, marker, tail = text.rpartition("\\boxed{")
    if not marker:
        return None
    depth = 1
    is_escaped = False
    for end, character in enumerate(tail):
        if is_escaped or character == "\\":
            is_escaped = not is_escaped
        elif character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
        if depth == 0:
            return tail[:end]
    return None


def check_math_answer(answer: str) -> None:
    """Raise `ValueError` for a gold answer that math-verify reads nothing in, against which all would be wrong."""
    if not _is_readable(answer):
        raise ValueError(f"math-verify finds no answer in {answer!r:.80} (within {ANSWER_SECONDS:g} seconds)")


def is_boxed_correct(completion: str, answer: str) -> bool:
    r"""Return whether the content of the last ``\boxed{...}`` of ``completion`` is mathematically equal to ``answer``
    (LaTeX or plain text). A comparison that takes longer than 5 seconds counts as wrong. Raises `ModuleNotFoundError`
    without math-verify, and `ValueError` where there is nothing to read in ``answer``."""
    check_math_answer(answer)
    boxed = extract_boxed(completion)
    return boxed is not None and bool(_WORKER.ask(answer, f"\\boxed{{{boxed}}}", ANSWER_SECONDS))


def is_math_correct(completion: str, answer: str) -> bool:
    """Return whether the final answer of ``completion``, boxed or not, equals ``answer``; as `is_boxed_correct`."""
    check_math_answer(answer)
    return bool(_WORKER.ask(answer, _final_answer(completion), ANSWER_SECONDS))


def are_math_correct(completions: Sequence[str], answers: Sequence[str]) -> list[bool]:
    """Return `is_math_correct` of each completion and its answer, where all comparisons of more than half a second
    share the 5 seconds that one has."""
    for answer in answers:
        check_math_answer(answer)
    pairs = [(answer, _final_answer(text)) for text, answer in zip(completions, answers, strict=True)]
    verdicts = {pair: _WORKER.ask(*pair, _QUICK_SECONDS) for pair in dict.fromkeys(pairs)}
    slow = [pair for pair, verdict in verdicts.items() if verdict is None]
    end = time.monotonic() + ANSWER_SECONDS
    for index, pair in enumerate(slow):
        left = end - time.monotonic()
        if left > 0:
            verdicts[pair] = _WORKER.ask(*pair, left / (len(slow) - index))
    return [bool(verdicts[pair]) for pair in pairs]


def _final_answer(completion: str) -> str:
    boxed = extract_boxed(completion)
    return completion if boxed is None else f"\\boxed{{{boxed}}}"


@functools.lru_cache(maxsize=4096)
def _is_readable(answer: str) -> bool:
    if importlib.util.find_spec("math_verify") is None:
        raise ModuleNotFoundError(
            "free-form mathematical answers are compared by math-verify, which is not installed: "
            "pip install 'hf-mxfp4[eval]', or pip install 'math-verify[antlr4_13_2]'"
        )
    return bool(_WORKER.ask(answer, None, ANSWER_SECONDS))


class _Worker:
    """The process that runs math-verify; started when it is first needed, and again after it was killed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def ask(self, answer: str, text: str | None, seconds: float) -> bool | None:
        """Return whether ``text`` equals ``answer``, or without a text whether ``answer`` can be read; None when that
        is not known after ``seconds``."""
        with self._lock:
            # Only a process that has answered is used again: the reply to a question that was interrupted would be
            # taken for the reply to the next one.
            process = self._process
            self._process = None
            try:
                if process is None or process.poll() is not None:
                    process = _start()
                with contextlib.suppress(BrokenPipeError):  # it has just ended, and so there is no reply
                    process.stdin.write(json.dumps([answer, text]).encode() + b"\n")
                    process.stdin.flush()
                reply = _read(process, seconds)
                if not reply:
                    return None
                self._process = process
                return reply == b"1"
            finally:
                if process is not None and self._process is None:  # interrupted, too slow, or dead
                    _stop(process)


def _start() -> subprocess.Popen[bytes]:
    run = "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')"
    process = subprocess.Popen(
        [sys.executable, "-c", run, __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    if _read(process, _START_SECONDS) != b"1":
        _stop(process)
        raise RuntimeError("math-verify cannot be run; `python -c 'import math_verify'` says why")
    return process


def _read(process: subprocess.Popen[bytes], seconds: float) -> bytes:
    """Return one byte; nothing when there is none in time, or when the process has ended."""
    stream = process.stdout.fileno()
    readable, _, _ = select.select([stream], [], [], seconds)
    if not readable:
        return b""
    return os.read(stream, 1)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


_WORKER = _Worker()


os.register_at_fork(after_in_child=_WORKER.__init__)  # type: ignore[misc]  # the process is the parent's


def _serve() -> None:
    """Answer requests, which are lines of JSON ``[answer, text or null]``, with the byte 0 or 1."""
    import signal

    from math_verify import parse, verify

    def is_equal(answer: str, text: str | None) -> bool:
        gold = parse(f"\\boxed{{{answer}}}", parsing_timeout=None)
        found = text is None or parse(text, parsing_timeout=None)
        return bool(gold and found and (text is None or verify(gold, found, timeout_seconds=None)))

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is the other process that is interrupted
    with contextlib.suppress(ImportError, ValueError, OSError):  # not on every system
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    sys.stdout = sys.stderr
    replies.write(b"1")
    for line in sys.stdin.buffer:
        try:
            replies.write(b"1" if is_equal(*json.loads(line)) else b"0")
        except Exception:  # math-verify raises what its parser and sympy do; such a text equals nothing
            replies.write(b"0")


if __name__ == "__main__":
    _serve()
