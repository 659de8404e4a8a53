# SPDX-License-Identifier: Apache-2.0
"""Rows shared out over the threads that torch computes with.

Threads of our own would take turns with them: OpenMP's turn round for milliseconds before they sleep. Where OpenMP is
not found, or a fork has left its threads behind, a pool stays alive: starting a thread costs as much as quantizing a
million elements.
"""

import ctypes
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch


#: Work, in elements of plain quantization, that is worth waking a thread for.
WORTH_A_THREAD = 1 << 19

_PARALLEL_BODY = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_PARALLEL = ctypes.CFUNCTYPE(None, _PARALLEL_BODY, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
_pools: dict[int, ThreadPoolExecutor] = {}  # by process: a forked child has none of its parent's threads


def _find() -> int | None:
    try:
        return ctypes.cast(ctypes.CDLL(None).GOMP_parallel, ctypes.c_void_p).value
    except (AttributeError, OSError):
        return None


_openmp = _find()


def openmp_parallel() -> int | None:
    """Where OpenMP's function ``GOMP_parallel(body, data, threads, flags)`` lies, of the library that torch computes
    with; `None` where there is none, and in forked processes, in which it would wait for threads that are not there."""
    return _openmp


def _forget_openmp() -> None:
    global _openmp
    _openmp = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_openmp)


def in_threads(work: Callable[[int, int], None], count: int, cost: int) -> None:
    """Call ``work(first, last)`` on consecutive ranges that make up ``0..count``, in as many threads as torch uses and
    ``cost`` justifies. ``work`` must release the interpreter lock to gain anything."""
    threads = max(1, min(torch.get_num_threads(), count, cost // WORTH_A_THREAD))
    if threads == 1:
        return work(0, count)
    spans = [(count * i // threads, count * (i + 1) // threads) for i in range(threads)]
    if (parallel := openmp_parallel()) is None:
        return _in_pool(work, spans)
    left, errors = iter(spans), []

    def body(_: int | None) -> None:
        for span in left:  # OpenMP may give fewer threads than asked for
            try:
                work(*span)
            except BaseException as error:
                errors.append(error)

    _PARALLEL(parallel)(_PARALLEL_BODY(body), None, threads, 0)
    if errors:
        raise errors[0]


def _in_pool(work: Callable[[int, int], None], spans: list[tuple[int, int]]) -> None:
    waiting = [_pool().submit(work, *span) for span in spans[1:]]
    work(*spans[0])
    for future in waiting:
        future.result()


def _pool() -> ThreadPoolExecutor:
    process = os.getpid()
    if process not in _pools:
        _pools.clear()
        _pools[process] = ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="mxfp4")
    return _pools[process]
