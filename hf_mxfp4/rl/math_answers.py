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


#: Seconds for one answer.
ANSWER_SECONDS = 5.0
_START_SECONDS = 120.0
_MEMORY_BYTES = 4 << 30


def extract_boxed(text: str) -> str | None:
    r"""Return the content of the last ``\boxed{...}`` of ``text``, or None without one or with open braces."""
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
    boxed = extract_boxed(completion)
    return bool(_WORKER.ask(answer, completion if boxed is None else f"\\boxed{{{boxed}}}", ANSWER_SECONDS))


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
        """Return whether ``text`` equals ``answer`` (without a text: whether ``answer`` can be read), or None when that
        is not known after ``seconds``."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._start()
            with contextlib.suppress(BrokenPipeError):  # it has just ended, and so there is no reply
                self._process.stdin.write(json.dumps([answer, text]).encode() + b"\n")
            reply = self._read(seconds)
            if not reply:
                self._stop()
            return reply == b"1" if reply else None

    def _start(self) -> None:
        run = "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')"
        self._process = subprocess.Popen(
            [sys.executable, "-c", run, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )
        if self._read(_START_SECONDS) != b"1":
            self._stop()
            raise RuntimeError("math-verify cannot be run; `python -c 'import math_verify'` says why")

    def _read(self, seconds: float) -> bytes:
        """One byte; nothing when there is none in time, or when the process has ended."""
        stream = self._process.stdout.fileno()
        return os.read(stream, 1) if select.select([stream], [], [], seconds)[0] else b""

    def _stop(self) -> None:
        self._process.kill()
        self._process.wait()
        self._process = None


_WORKER = _Worker()


os.register_at_fork(after_in_child=_WORKER.__init__)  # type: ignore[misc]  # the process is the parent's


def _serve() -> None:
    """Answer requests, lines of JSON ``[answer, text or null]``, by the bytes 0 and 1."""
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
    replies, sys.stdout = os.fdopen(os.dup(1), "wb", buffering=0), sys.stderr
    replies.write(b"1")
    for line in sys.stdin.buffer:
        try:
            replies.write(b"1" if is_equal(*json.loads(line)) else b"0")
        except Exception:  # math-verify raises what its parser and sympy do; such a text equals nothing
            replies.write(b"0")


if __name__ == "__main__":
    _serve()
